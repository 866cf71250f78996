"""Files of an incident bundle: bounded, redacted, in memory first, so that a full disk costs the copy and no verdict.

What users sent never belongs into a bundle. Log lines that show a request are cut where it begins; everything else
passes through `redact`; of the environment only variables that steer the engine are taken.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from closeranks.evidence import capture
from closeranks.evidence.redact import MASK, redact, without_logged

FILE_BYTES = 2 << 20
BINARY_BYTES = 8 << 20
LOG_BYTES = 512 << 10
TOTAL_BYTES = 64 << 20
KEPT = 20
"""Bundles that are kept in a folder; the oldest go first."""
LEFT_S = 600.0
"""A bundle that is not whole after so long is nobody's any more."""
_NAME = re.compile(r"^\d{8}T\d{6}Z-\d{6}-[\w.:-]+$")
# From here to the end of the line it is what a user sent, or what was answered. Lines of request logging (SGLang's
# --log-requests, vLLM's --enable-log-requests) and anything that looks like the fields of a request.
_REQUEST = re.compile(
    r"(?P<head>\b(?:GenerateReqInput|EmbeddingReqInput|ChatCompletionRequest|CompletionRequest|TokenizedGenerateReqInput"
    r"|SamplingParams)\(|\b(?:Receive|Finish): obj=|\bReceived request [\w.:-]+: |\bGenerated response [\w.:-]+:"
    r"|[\"']?\b\w*(?:text|content|prompt|input|inputs|output|outputs|response|messages|arguments|query|documents)[\"']?\s*[:=]"
    r"\s*(?=[\"'\[{])).*"
)
_STEERS = re.compile(
    r"^(SGLANG|SGL|VLLM|NCCL|UCX|NIXL|MC|MOONCAKE|GLOO|TORCH|TORCHINDUCTOR|CUDA|OMP|TRTLLM|DYN|PYTHON)_"
)
_SECRET = re.compile(r"(?i)key|token|secret|passw|credential|auth|cookie")


def without_request(line: str) -> str:
    """A log line up to where what a client sent, or was sent, begins."""
    return _REQUEST.sub(lambda m: m["head"], without_logged(line, ""))


def scrub(text: str) -> str:
    """`text` without secrets and without what requests carried. Linear."""
    return redact(_REQUEST.sub(lambda m: m["head"] + MASK, text))


_USERS = re.compile(r"(?i)text|prompt|content|message|input|output|response|argument|quer|document")


def settings(body: bytes) -> str:
    """A server's JSON about itself, with what may hold something of a user left out, by the names of its fields."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return "not JSON\n"
    return json.dumps(_plain(found, 0), indent=1) + "\n"


def _plain(value: object, depth: int) -> object:
    if isinstance(value, dict) and depth < 5:
        kept = {str(k): v for k, v in list(value.items())[:500] if not (_USERS.search(str(k)) and not _number(v))}
        return {k: MASK if _SECRET.search(k) and not _number(v) else _plain(v, depth + 1) for k, v in kept.items()}
    if isinstance(value, list) and depth < 5:
        return [_plain(v, depth + 1) for v in value[:100]]
    if isinstance(value, str):
        return scrub(value[:300])
    return value if _number(value) else None


def _number(value: object) -> bool:
    return value is None or isinstance(value, int | float)


class Files:
    """Named contents with a bound on each and on all. What did not fit is said in `notes`."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.notes: list[str] = []
        self._total = 0

    def add(self, name: str, content: str | bytes, *, clean: bool = True) -> None:
        """Add a file, redacted unless its text is our own (`clean=False`); its last part if it is too long."""
        data = content.encode(errors="replace") if isinstance(content, str) else content
        if len(data) > FILE_BYTES:
            self.notes.append(f"{name}: the last {FILE_BYTES >> 20} MiB of {len(data)} bytes")
            data = data[-FILE_BYTES:].partition(b"\n")[2]
        if clean:
            data = scrub(data.decode(errors="replace")).encode()
        self._put(name, data)

    def keep(self, name: str, data: bytes) -> None:
        """Add bytes as they are, or not at all: a part of a pickle is none."""
        if len(data) > BINARY_BYTES:
            self.notes.append(f"{name}: left out, it is larger than {BINARY_BYTES >> 20} MiB")
        else:
            self._put(name, data)

    def _put(self, name: str, data: bytes) -> None:
        if self._total + len(data) > TOTAL_BYTES:
            self.notes.append(f"{name}: left out, the bundle would be larger than {TOTAL_BYTES >> 20} MiB")
            return
        self._total += len(data) - len(self.contents.get(name, b""))
        self.contents[name] = data


def environment(pid: int) -> str:
    """`NAME=value` of the variables that steer an engine, none that by its name holds a secret."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError as error:
        return f"unreadable: {error.strerror}\n"
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0"))
    lines = [f"{name}={value}" for name, _, value in pairs if _STEERS.match(name) and not _SECRET.search(name)]
    return "\n".join(sorted(lines)) + "\n"


def log_tail(path: Path, limit: int = LOG_BYTES) -> bytes:
    """The end of a log, from a line's beginning."""
    data = capture.tail(path, limit)
    return data.partition(b"\n")[2] if len(data) == limit else data


def store(files: Files, parent: Path, label: str, facts: Mapping[str, object]) -> Path:
    """Write the files and a manifest with checksums into a new folder under `parent`; only its owner may read it.

    The folder has its name only when its manifest is in it; what the disk did not take is named there (`missing`).
    Raises OSError when it does not take even that; nothing is left then. The oldest go first, so that their number is
    bounded, and there is room for the newest, also on a disk that is full.
    """
    parent.mkdir(parents=True, exist_ok=True)
    prune(parent, KEPT - 1)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{time.time_ns() % 10**9 // 1000:06d}"
    name = f"{stamp}-{re.sub(r'[^A-Za-z0-9_.-]', '_', label)[:60]}"
    partial = parent / f".{name}.partial"
    partial.mkdir(mode=0o700)
    try:
        missing = capture.write_files(partial, files.contents)
        said = {**facts, "notes": files.notes, **({"missing": missing} if missing else {})}
        capture.write_manifest(partial, said)
        os.replace(partial, parent / name)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return parent / name


def extend(folder: Path, files: Mapping[str, str], facts: Mapping[str, object]) -> None:
    """Add files to a stored bundle and renew its manifest. Raises OSError when the disk does not take the manifest; the
    old one stays then."""
    missing = capture.write_files(folder, {name: text.encode(errors="replace") for name, text in files.items()})
    old = json.loads((folder / "manifest.json").read_text())
    old.pop("files", None)
    if missing := old.pop("missing", {}) | missing:
        old["missing"] = missing
    capture.write_manifest(folder, {**old, **facts})


def prune(parent: Path, number: int = KEPT) -> None:
    """Remove the oldest bundles beyond `number`, and what a watch that was killed left half-written; whatever else lies
    in the folder stays."""
    for partial in parent.iterdir():
        if partial.name.startswith(".") and _NAME.match(partial.name[1:].removesuffix(".partial")):
            with contextlib.suppress(OSError):  # it has its name by now, or is gone: another watch's
                if abs(time.time() - partial.stat().st_mtime) > LEFT_S:
                    shutil.rmtree(partial, ignore_errors=True)
    bundles = capture.oldest_first(p for p in parent.iterdir() if p.is_dir() and _NAME.match(p.name))
    for folder in bundles[: max(0, len(bundles) - number)]:
        shutil.rmtree(folder, ignore_errors=True)
