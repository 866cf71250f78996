"""systemd units, containers of compose and Kubernetes files, shell files and logs: where command lines are found."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from closeranks.diagnose.audit.model import Engine
from closeranks.diagnose.audit.sources import flags, plainyaml, shell

_SERVER_ARGS = re.compile(r"server_args=(?:ServerArgs\(|\{(?='))(.*)[)}]\s*$")
_ARGUMENT = re.compile(r"(\w+)(?:=|': )('(?:[^'\\]|\\.)*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|[^,()]+)(?:, |$)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*)")
_ITEM = re.compile(r"'(\w+)': ('[^']*'|[\d.]+|True)")
_KV = re.compile(r"kv_(connector|role)='(\w+)'")
_VLLM_VERSION = re.compile(r"(?:vLLM (?:API server )?|[█▀▄] +)version (\d\S*)")  # newer ones print a banner
_BRANCHES = re.compile(
    r"^\s*(?:if|case|for|while|function|trap)\b|\(\)\s*\{|&&|\|\||^\s*(?:kill|pkill|killall)\b", re.MULTILINE
)
_PAIR = re.compile(r"(\w+)=(\"[^\"]*\"|'[^']*'|[^,]*)")
_RUN = re.compile(r"\b(?:docker|podman|nerdctl)\s+(?:container\s+)?run\b.*\s--\w")


def from_unit(text: str, label: str, drop_ins: Sequence[str] = ()) -> list[Engine]:
    """The engine that a systemd unit starts, with its drop-ins in their order; [] when it starts none.

    As systemd reads it: lines that begin with `#` or `;` are none, also within a command that goes on over several
    lines, and an empty assignment forgets what was assigned before.
    """
    directives: dict[str, list[str]] = {}
    started: list[tuple[str, int]] = []
    for nth, part in enumerate([text, *drop_ins]):
        for number, line in shell.joined(part, "#;"):
            name, given, value = line.partition("=")
            key, value = name.strip().lower(), value.strip()
            if not given or line.lstrip().startswith("["):
                continue
            if not value:
                directives.pop(key, None)
                started = [] if key == "execstart" else started
            elif key == "execstart":
                started.append((value, number if nth == 0 else 0))
            else:
                directives.setdefault(key, []).append(value)
    env: dict[str, str] = {}
    for value in directives.pop("environment", []):
        for word in flags.split_line(value):
            name, given, content = word.partition("=")
            if given:
                env[name] = content
    started = [(command, number) for command, number in started if flags.is_command_line(command)]
    unit = {name: tuple(values) for name, values in directives.items()}
    unit["execstart"] = tuple("" for _ in started)  # its words are in the engine's flags, without secrets
    complete = "environmentfile" not in directives
    engines = [
        replace(_command(command.lstrip("-@:+!"), label, env) or flags.parse([], label), line=number)
        for command, number in started
    ]
    return [replace(engine, unit=unit, complete_env=complete) for engine in engines]


def is_supervisord(text: str) -> bool:
    """By a section of a program."""
    return re.search(r"^\[program:[^\]]+\]", text, re.MULTILINE) is not None


def from_supervisord(text: str, label: str) -> list[Engine]:
    """The engines that supervisord's programs start, each with its environment."""
    sections: list[tuple[int, dict[str, str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        name, given, value = line.partition("=")
        if line.startswith("["):
            sections.append((number, {}))
        elif sections and line[:1].isspace() and sections[-1][1]:
            last = next(reversed(sections[-1][1]))
            sections[-1][1][last] += f" {line.strip()}"  # goes on
        elif sections and given and not line.startswith((";", "#")):
            sections[-1][1][name.strip().lower()] = value.strip()
    engines = []
    for number, section in sections:
        pairs = _PAIR.findall(section.get("environment", ""))
        env = {name: value.strip("\"'") for name, value in pairs}
        engine = _command(section.get("command", ""), label, env)
        if engine is not None:
            engines.append(replace(engine, line=number, complete_env=True))
    return engines


def drop_ins(unit: Path) -> list[Path]:
    """The drop-ins of a unit's file, in systemd's order."""
    folder = unit.with_name(unit.name + ".d")
    return sorted(p for p in folder.glob("*.conf") if p.is_file()) if folder.is_dir() else []


def unit_of_drop_ins(folder: Path) -> Path | None:
    """The unit beside it whose drop-ins a folder holds."""
    unit = folder.with_name(folder.name.removesuffix(".d"))
    return unit if folder.is_dir() and folder.name.endswith(".service.d") and unit.is_file() else None


def _command(
    line: str, label: str, env: Mapping[str, str], known: Mapping[str, list[str]] | None = None
) -> Engine | None:
    """The engine of the first command of a line that starts one; a shell's script (`sh -c`, `ssh host '...'`) is read
    as one. `known`: words that the shell's variables and arrays stand for."""
    for given in shell.commands(line):
        words = [word for one in given for word in shell.expanded(one, known or {})]
        script = shell.shell_script(words)
        if script is None:
            script = next((word for word in words if " " in word.strip() and flags.is_command_line(word)), None)
            script = None if script is None or flags.speaks(words[: words.index(script)]) else script
        started = flags.program(words)
        if started is not None or script is not None:
            before = words[: started[1]] if started else words[: words.index(script or "")]
            engine = (
                flags.parse(words, label, env) if started else next(iter(from_text(script or "", label, env)), None)
            )
            tags = (shell.IMAGE_TAG.search(word) for word in before if flags.image_kind(word))
            version = next((tag[2].split("-")[0] for tag in tags if tag), None)
            return replace(engine, version=engine.version or version) if engine else None
        if (run := shell.container_run(words, label, env)) is not None:
            return run
        if re.match(r"(sglang|vllm)==\S", words[0]):
            return flags.parse(words, label, env)
    return None


def from_yaml(text: str, label: str) -> list[Engine]:
    """Engines in a compose file or in Kubernetes manifests; [] when there are none. Raises `plainyaml.Refused`."""
    engines = []
    for document in plainyaml.load(text):
        for name, container, shared in _containers(document):
            engine = _container(name, container, shared, label)
            if engine is not None:
                engines.append(engine)
    return engines


def _containers(document: Any) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    if not isinstance(document, Mapping):
        return
    services = document.get("services")
    if isinstance(services, Mapping):
        for name, service in services.items():
            if isinstance(service, Mapping):
                yield str(name), service, {"restart": str(service.get("restart") or "")}
        return
    pending: list[Any] = [document]
    while pending:
        here = pending.pop()
        if isinstance(here, Mapping):
            found = here.get("containers")
            for container in found if isinstance(found, list) else []:
                if isinstance(container, Mapping):
                    yield (
                        str(container.get("name", "?")),
                        container,
                        {"restart": str(here.get("restartPolicy") or "Always")},
                    )
            pending += here.values()
        elif isinstance(here, list):
            pending += here


def _container(name: str, container: Mapping[str, Any], shared: Mapping[str, str], label: str) -> Engine | None:
    words = [*_words(container.get("entrypoint")), *_words(container.get("command")), *_words(container.get("args"))]
    image = str(container.get("image", ""))
    environment = container.get("environment") or container.get("env") or {}
    env = _environment(environment)
    script = shell.shell_script(words)
    if script is not None:
        started = next(iter(from_text(script, f"{label}: {name}", env)), None)
        if started is None:
            return None
        engine = started
    else:
        own = flags.image_kind(image)
        if flags.program(words) is not None:
            engine = flags.parse(words, f"{label}: {name}", env)
        elif own and any(word.startswith("--") for word in words) and shell.by_image(words):
            engine = flags.parse(shell.served(own, words), f"{label}: {name}", env)
        else:
            return None
    tag = shell.IMAGE_TAG.search(image) if flags.image_kind(image) else None
    security = _mapping(container.get("securityContext"))
    caps = [*_words(container.get("cap_add")), *_words(_mapping(security.get("capabilities")).get("add"))]
    privileged = container.get("privileged") or security.get("privileged")
    return replace(
        flags.make(engine.kind or flags.image_kind(image), engine.label, engine.flags, engine.env, engine.version),
        front=engine.front,
        version=engine.version or (tag[2].split("-")[0] if tag else None),
        container={"cap_add": " ".join(caps), "privileged": str(privileged or "false").lower(), **shared},
        line=int(container[plainyaml.LINE]),
        complete_env="env_file" not in container and "envFrom" not in container,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return flags.split_line(value)
    return [str(word) for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _environment(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): str(value or "") for name, value in given.items() if name != plainyaml.LINE}
    env = {}
    for item in given if isinstance(given, list) else []:
        if isinstance(item, Mapping):
            env[str(item.get("name"))] = str(item.get("value") or "")
        else:
            name, _, value = str(item).partition("=")
            env[name] = value
    return env


def from_text(text: str, label: str, env: Mapping[str, str] | None = None) -> list[Engine]:
    """Engines in a shell file, a list of flags, a `ps` listing or a log, each with its line.

    SGLang logs `server_args=ServerArgs(...)` or a dictionary; vLLM its version and `non-default args: {...}`. `env` is
    the environment that the commands begin with.
    """
    version = _VLLM_VERSION.search(text)
    env = dict(env or {})
    known: dict[str, list[str]] = {}
    straight = _BRANCHES.search(text) is None
    engines, logs = [], dict[object, Engine]()
    for number, line in shell.arrays(shell.joined(text, "#"), known):
        shell.remember(line, known)
        if exported := re.fullmatch(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(\S*)\s*", line):
            env[exported[1]] = exported[2].strip("'\"")
        elif logged := _SERVER_ARGS.search(line):
            found = {name: value.strip("'\"") for name, value in _ARGUMENT.findall(logged[1])}
            given = {
                flags.normal(k): "true" if v == "True" else v for k, v in found.items() if v not in ("None", "False")
            }
            engine = flags.make("sglang", label, given, env)
            logs[engine.flag("host"), engine.flag("port"), engine.role] = replace(engine, line=number)  # its last life
        elif logged := _NON_DEFAULT.search(line):
            engine = _from_vllm_log(logged[1], label, env, version[1] if version else None)
            engines.append(replace(engine, line=number))
        elif flags.is_command_line(line):
            if (started := _command(line, label, env, known)) is not None:
                engines.append(replace(started, line=number, beside=label if shell.here(line) and straight else ""))
        elif _RUN.search(line) and (started := _command(line, label, env, known)) is not None:
            engines.append(replace(started, line=number))
        elif line.lstrip().startswith("--") and not engines:
            words = flags.split_line(line)
            engine = flags.parse(words, label, env)
            engine = flags.make(engine.kind or flags.kind_by_flags(words), label, engine.flags, env)
            engines.append(replace(engine, line=number))
    return [*engines, *logs.values()]


def _from_vllm_log(logged: str, label: str, env: Mapping[str, str], version: str | None) -> Engine:
    given = {flags.normal(name): "true" if v == "True" else v.strip("'") for name, v in _ITEM.findall(logged)}
    given["model-path"] = given.pop("model-tag", given.get("model-path", ""))
    transfer = {f"kv_{name}": value for name, value in _KV.findall(logged)}
    if transfer:
        given["kv-transfer-config"] = json.dumps(transfer)
    return flags.make("vllm", label, {name: value for name, value in given.items() if value}, env, version)
