"""Reading a bundle: files, folders, archives and standard input as a flat, bounded list of named byte streams.

Every limit ends in a `note`, never in silence: what was left unread, where, and how to read it.
"""

import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from closeranks.evidence.inputs import Unreadable, printable, read, what

MEMBER_BYTES = 256 << 20  # of one file: its first eighth and its last seven eighths are read
TOTAL_BYTES = 512 << 20  # of everything expanded from archives
MAX_FILES = 5000
MAX_NESTING = 3
_OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    "gzip": lambda f: cast("IO[bytes]", gzip.GzipFile(fileobj=f)),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, ValueError)


@dataclass(frozen=True)
class Item:
    """One file of the bundle. `open()` gives a fresh binary stream; `size` is in bytes, None if not known before."""

    name: str
    open: Callable[[], IO[bytes]]
    size: int | None = None


@dataclass
class Bundle:
    """What was found under the given paths, and what was left out and why."""

    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    total: int = 0

    def add(self, name: str, open_: Callable[[], IO[bytes]], size: int | None) -> None:
        """A file, under a name that can be printed."""
        self.items.append(Item(printable(name), open_, size))

    def note(self, text: str) -> None:
        text = printable(text)
        if text not in self.notes and len(self.notes) < 200:
            self.notes.append(text)


def from_texts(named: Iterable[tuple[str, str | bytes]]) -> Bundle:
    """A bundle of (name, content) pairs already in memory."""
    bundle = Bundle()
    for name, content in named:
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        _add_bytes(bundle, name, data, 0)
    return bundle


def from_paths(paths: Iterable[str | Path]) -> Bundle:
    """A bundle of everything under `paths`; `-` is standard input.

    Raises FileNotFoundError for a missing path, `Unreadable` for a device, a socket, or a pipe that nobody writes.
    """
    bundle = Bundle()
    for given in paths:
        if str(given) == "-":
            if sys.stdin is None:
                raise Unreadable("standard input is closed")
            data = sys.stdin.buffer.read(MEMBER_BYTES + 1)
            if len(data) > MEMBER_BYTES:
                bundle.note(f"standard input: only the first {MEMBER_BYTES >> 20} MiB were read")
            _add_bytes(bundle, "stdin", data[:MEMBER_BYTES], 0)
            continue
        if not str(given):
            raise FileNotFoundError("an empty path names nothing")
        path = Path(given)
        kind = what(path)
        if kind != "folder":
            _add_path(bundle, path.name, path, kind, given=True)
            continue
        for file in _files(path, bundle):
            if len(bundle.items) >= MAX_FILES:
                bundle.note(f"more than {MAX_FILES} files: the rest was left unread")
                break
            name = str(file.relative_to(path))
            try:
                kind = what(file)
            except OSError as e:
                bundle.note(f"{name}: not readable: {e.strerror or type(e).__name__}")
                continue
            _add_path(bundle, name, file, kind)
    return bundle


def _files(path: Path, bundle: Bundle) -> Iterator[Path]:
    """Regular files. Whoever is not one could hold us up, or has no end."""
    for folder, folders, names in os.walk(path, onerror=lambda e: bundle.note(f"not readable: {e.filename}")):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_symlink() and not file.resolve().is_relative_to(path.resolve()):
                continue
            if file.is_file():
                yield file
            elif not file.is_symlink():
                bundle.note(f"{file.relative_to(path)}: a pipe, a device or a socket: not read")


def _add_path(bundle: Bundle, name: str, path: Path, kind: str, given: bool = False) -> None:
    """`given`: on the command line, not found in a folder."""
    try:
        if kind == "pipe":  # can be read once: its content is kept
            data, note = read(path, MEMBER_BYTES)
            if note:
                bundle.note(note)
            _add_bytes(bundle, name, data, 0)
            return
        with path.open("rb") as f:
            head = f.read(512)
        size = path.stat().st_size
    except OSError as e:
        if given and isinstance(e, Unreadable):
            raise
        bundle.note(f"{name}: not readable: {e.strerror or e}")
        return
    if _kind(head):
        if size > TOTAL_BYTES:
            bundle.note(f"{name}: an archive of {size >> 20} MiB, more than {TOTAL_BYTES >> 20}: not read")
            return
        with path.open("rb") as f:
            _expand(bundle, name, f, head, 0)
    else:
        bundle.add(name, lambda: path.open("rb"), size)


def _add_bytes(bundle: Bundle, name: str, data: bytes, depth: int) -> None:
    if _kind(data[:512]):
        _expand(bundle, name, io.BytesIO(data), data[:512], depth)
    else:
        bundle.add(name, lambda: io.BytesIO(data), len(data))


def _kind(head: bytes) -> str:
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "zip"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "bzip2"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    return "tar" if head[257:262] == b"ustar" else ""


def _expand(bundle: Bundle, name: str, stream: IO[bytes], head: bytes, depth: int) -> None:
    if depth >= MAX_NESTING:
        bundle.note(f"{name}: archives nested more than {MAX_NESTING} deep: not read")
        return
    kind = _kind(head)
    try:
        if kind == "zip":
            with zipfile.ZipFile(stream) as z:
                infos = [info for info in z.infolist() if not info.is_dir()]
                for info in infos[:MAX_FILES]:
                    with z.open(info) as member:
                        _member(bundle, f"{name}/{info.filename}", member, depth)
                if len(infos) > MAX_FILES:
                    bundle.note(f"{name}: more than {MAX_FILES} members: {len(infos) - MAX_FILES} were left unread")
        elif kind == "tar":
            _untar(bundle, name, stream, depth)
        else:
            with _OPENERS[kind](stream) as opened:
                inner = name.removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2")
                _member(bundle, inner, opened, depth, packed=True)
    except _DAMAGE as e:
        bundle.note(f"{name}: damaged {kind} archive ({type(e).__name__}): what came before the damage was read")
    except (RuntimeError, NotImplementedError) as e:  # an encrypted member, a compression method of another age
        bundle.note(f"{name}: {kind} archive not readable: {type(e).__name__}")


def _untar(bundle: Bundle, name: str, stream: IO[bytes], depth: int) -> None:
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for count, info in enumerate(tar):
            if count > MAX_FILES or len(bundle.items) > MAX_FILES:
                bundle.note(f"{name}: more than {MAX_FILES} members: the rest was left unread")
                return
            member = tar.extractfile(info) if info.isfile() else None
            if member is not None:
                _member(bundle, f"{name}/{info.name}", member, depth)


def _member(bundle: Bundle, name: str, member: IO[bytes], depth: int, packed: bool = False) -> None:
    """Read one member with a limit: a bomb costs at most what is left of `TOTAL_BYTES`.

    `packed`: the only content of a compressed file. A tar that is compressed counts as one archive.
    """
    limit = min(MEMBER_BYTES, TOTAL_BYTES - bundle.total)
    if limit <= 0 or len(bundle.items) >= MAX_FILES:
        bundle.note(f"{name}: left unread, the archive expands beyond {TOTAL_BYTES >> 20} MiB or {MAX_FILES} files")
        return
    parts: list[bytes] = []
    size = 0
    damage: Exception | None = None
    try:
        while size <= limit and (part := member.read(1 << 20)):
            parts.append(part)
            size += len(part)
    except _DAMAGE as e:
        damage = e
    data = b"".join(parts)
    if size > limit:
        data = data[:limit]
        bundle.note(f"{name}: expands beyond {limit >> 20} MiB: only that much was read")
    bundle.total += len(data)
    if damage is not None:
        bundle.note(f"{name}: damaged or cut ({type(damage).__name__}): the first {len(data)} bytes were read")
    if data or damage is None:
        _add_bytes(bundle, name, data, depth if packed and _kind(data[:512]) == "tar" else depth + 1)
