"""Shell files and lines as words: commands, scripts within them, variables and arrays, `docker run`."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from closeranks.diagnose.audit.model import Engine
from closeranks.diagnose.audit.sources import flags

_SHELLS = ("sh", "bash", "dash", "zsh", "ash", "ksh", "busybox")
_REDIRECTION = re.compile(r"\d?[<>]{1,2}&?\S*|&>{1,2}\S*")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))")
_ASSIGNED = re.compile(r"\s*(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)*([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELSEWHERE = re.compile(
    r"\b(?:ssh|pdsh|srun|mpirun|docker|podman|nerdctl|kubectl|enroot|apptainer|singularity|ip\s+netns)\b"
)
_RUNNERS = ("docker", "podman", "nerdctl", "nvidia-docker")
_ALONE = {
    *("--rm", "--detach", "--privileged", "--init", "--read-only", "--interactive", "--tty", "--publish-all"),
    *("--no-healthcheck", "--oom-kill-disable", "--quiet", "-q"),
}
IMAGE_TAG = re.compile(r"(sglang|vllm)[^:/\s]*:v?(\d+\.\d+[^\s\"']*)")


def joined(text: str, comments: str) -> list[tuple[int, str]]:
    """Lines with those that they go on in behind a backslash, each with the number of its first, without comments."""
    lines: list[tuple[int, str]] = []
    going_on = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(tuple(comments)):
            continue
        if going_on:
            first, before = lines[-1]
            lines[-1] = first, f"{before} {line.strip()}"
        else:
            lines.append((number, line))
        going_on = lines[-1][1].rstrip().endswith("\\")
        if going_on:
            lines[-1] = lines[-1][0], lines[-1][1].rstrip()[:-1].rstrip()
    return lines


def _words(line: str) -> list[str]:
    """Words, with each `;` as one of its own; split at blanks where a quote is unbalanced."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:
        return line.replace(";", " ; ").split()


def commands(line: str) -> list[list[str]]:
    """The commands of a shell's line, each as its words: without comments, redirections, and `exec`, `nohup` and such
    in front."""
    found: list[list[str]] = [[]]
    for word in _words(line):
        if word.startswith("#"):
            break
        if word in ("&&", "||", ";", ";;", "|", "&"):
            found.append([])
        elif not _REDIRECTION.fullmatch(word):
            found[-1].append(word)
    return [words for words in found if words]


def shell_script(words: Sequence[str]) -> str | None:
    """What a shell among the words is told to run: `bash -lc SCRIPT`, `/bin/sh -ec SCRIPT`, `tini -- sh -c SCRIPT`."""
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] not in _SHELLS:
            continue
        for n, option in enumerate(words[at + 1 :], at + 1):
            if not option.startswith(("-", "+")):
                break
            if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", option) and n + 1 < len(words):
                return words[n + 1]
    return None


def here(line: str) -> bool:
    """Whether a shell's line starts something on its own host and goes on to the next line while that runs."""
    return re.search(r"(?<!&)&\s*$", line) is not None and _ELSEWHERE.search(line) is None


def expanded(word: str, known: Mapping[str, list[str]]) -> list[str]:
    """A word with the variables that the same file sets: `"${ARGS[@]}"`, `$ARGS` (its words), `--port=$PORT`."""
    whole = _VARIABLE.fullmatch(word)
    if whole and (whole[1] or whole[2]) in known:
        return known[whole[1] or whole[2]]
    return [_VARIABLE.sub(lambda m: " ".join(known.get(m[1] or m[2], [m[0]])), word)]


def arrays(lines: Sequence[tuple[int, str]], known: dict[str, list[str]]) -> Iterator[tuple[int, str]]:
    """The lines of a shell file without those of `ARGS=( ... )`, whose words go to `known` as they come by."""
    name, words = "", list[str]()
    for number, line in lines:
        rest = line
        if not name:
            match = _ASSIGNED.fullmatch(line)
            if match is None or not match[3].startswith("("):
                yield number, line
                continue
            name, rest = match[1], match[3][1:]
            words = known.get(name, []) if match[2] else []
        try:
            found = shlex.split(rest, comments=True)
        except ValueError:
            found = rest.split()
        ended = bool(found) and found[-1].endswith(")")
        found = [*found[:-1], found[-1][:-1]] if ended else found
        words = [*words, *(word for one in found if one for word in expanded(one, known))]
        known[name] = words
        name = "" if ended else name


def remember(line: str, known: dict[str, list[str]]) -> None:
    """Keeps what a line of a shell file assigns, but for secrets: their names would be lost where they are used."""
    match = _ASSIGNED.fullmatch(line)
    if match is None or match[2] or flags.hide(match[1], "x") == flags.HIDDEN:
        return
    try:
        words = shlex.split(match[3], comments=True)
    except ValueError:
        return
    if len(words) == 1 and "`" not in words[0] and "$(" not in words[0]:
        value = " ".join(expanded(words[0], known))
        known[match[1]] = flags.split_line(value) if value.startswith("-") else [value]


def container_run(words: Sequence[str], label: str, env: Mapping[str, str]) -> Engine | None:
    """The engine of `docker run ... IMAGE --model ...`, where the image itself starts the server."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    at = next((n for n in range(1, len(words)) if names[n] == "run" and names[n - 1] in _RUNNERS), None)
    if at is None:
        return None
    environment, image = dict(env), at + 1
    while image < len(words) and words[image].startswith("-"):
        name, given, value = words[image].partition("=")
        alone = bool(given) or name in _ALONE or re.fullmatch(r"-[ditP]+", name) is not None
        if name in ("-e", "--env"):
            key, _, content = (value if given else "".join(words[image + 1 : image + 2])).partition("=")
            environment[key] = content
        image += 1 if alone else 2
    kind = flags.image_kind(words[image]) if image < len(words) else ""
    rest = list(words[image + 1 :])
    if not kind or not any(word.startswith("--") for word in rest) or not by_image(rest):
        return None
    engine = flags.parse(served(kind, rest), label, environment)
    tag = IMAGE_TAG.search(words[image])
    return replace(engine, version=engine.version or (tag[2].split("-")[0] if tag else None))


def by_image(words: Sequence[str]) -> bool:
    """Whether these words are left to the program that the image starts, rather than naming another one."""
    if "-m" in words or words[:1] in (["vllm"], ["sglang"]):
        return False
    script = next((word for word in words if not word.startswith("-")), "")
    return re.search(r"bench|router|client|proxy", script.rsplit("/", 1)[-1]) is None or words[0].startswith("-")


def served(kind: str, words: Sequence[str]) -> list[str]:
    """The words as the image's own program gets them: vLLM's may begin with the model."""
    return ["vllm", "serve", *words] if kind == "vllm" else list(words)
