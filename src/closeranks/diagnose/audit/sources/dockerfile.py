"""Dockerfiles: the version in the image that they build on, their environment, and the command that they start."""

import json
import re
from dataclasses import replace

from closeranks.diagnose.audit.model import Engine
from closeranks.diagnose.audit.sources import flags, shell, units

_NAME = re.compile(r"(?i)(?:docker|container)file(?:\..*)?|.*\.(?:docker|container)file")
_INSTRUCTION = re.compile(r"(?i)\s*(FROM|ARG|ENV|CMD|ENTRYPOINT|RUN)\s+(.*)")
_FROM = re.compile(r"(?i)(?:--platform=\S+\s+)?(\S+)(?:\s+AS\s+(\S+))?")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
_INSTALLED = re.compile(r"\b(sglang|vllm)(?:\[[^\]]*\])?==(\d[^\s\"';]*)")


def is_dockerfile(name: str, text: str) -> bool:
    """By name, or by its first instruction."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return _NAME.fullmatch(name) is not None or re.match(r"\s*FROM\s+\S+(?:\s+AS\s+\S+)?\s*$", first) is not None


class _Stage:
    """What one `FROM` builds, as far as it is known."""

    def __init__(self, image: str, parent: "_Stage | None") -> None:
        tag = shell.IMAGE_TAG.search(image)
        self.kind = flags.image_kind(image)
        self.version = tag[2].split("-")[0] if tag and self.kind else None
        self.env: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.line = 0
        if parent is not None:
            self.kind, self.version = parent.kind, parent.version
            self.env, self.entrypoint, self.command = dict(parent.env), parent.entrypoint, parent.command
            self.line = parent.line


def engines(text: str, label: str) -> list[Engine]:
    """The engine that the last stage starts; [] when it starts none."""
    stages: dict[str, _Stage] = {}
    stage = _Stage("", None)
    arguments: dict[str, str] = {}
    for number, line in shell.joined(text, "#"):
        if not (m := _INSTRUCTION.fullmatch(line)):
            continue
        name, rest = m[1].upper(), m[2].strip()
        if name == "FROM" and (base := _FROM.match(_filled(rest, arguments))):
            stage = stages[base[2] or str(len(stages))] = _Stage(base[1], stages.get(base[1]))
        elif name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key.strip()] = value.strip("\"'")
        elif name == "ENV":
            stage.env |= _environment(rest)
        elif name == "RUN":
            for installed in _INSTALLED.finditer(_filled(rest, {**arguments, **stage.env})):
                stage.kind, stage.version = installed[1], installed[2]
        elif name == "ENTRYPOINT":
            stage.entrypoint, stage.command, stage.line = _words(rest), [], number
        elif name == "CMD":
            stage.command, stage.line = _words(rest), number
    engine = _engine(stage, label)
    return [replace(engine, line=stage.line)] if engine is not None else []


def _engine(stage: _Stage, label: str) -> Engine | None:
    words = [*stage.entrypoint, *stage.command]
    script = shell.shell_script(words)
    if script is not None:
        started = next(iter(units.from_text(script, label, stage.env)), None)
    else:
        by_image = stage.kind and any(w.startswith("--") for w in words) and shell.by_image(words)
        known = flags.program(words) is not None or by_image
        started = flags.parse(words, label, stage.env) if known else None
    if started is None:
        return None
    kind = started.kind or stage.kind
    made = flags.make(kind, label, started.flags, started.env, started.version)
    return replace(made, version=made.version or (stage.version if stage.kind in ("", kind) else None))


def _words(rest: str) -> list[str]:
    """A command in its JSON form, or in a shell's, which is run by `/bin/sh -c`."""
    try:
        found = json.loads(rest) if rest.startswith("[") else None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list):
        return [word for word in found if isinstance(word, str)]
    return ["/bin/sh", "-c", rest]


def _environment(rest: str) -> dict[str, str]:
    """`ENV A=1 B="2"`, and the old `ENV A 1`."""
    if re.match(r"\w+=", rest):
        pairs = (word.partition("=") for word in flags.split_line(rest))
        return {name: value for name, given, value in pairs if given}
    name, _, value = rest.partition(" ")
    return {name: value.strip()}


def _filled(text: str, known: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda m: known.get(m[1]) or m[2] or m[0], text)
