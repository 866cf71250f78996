"""Opening what a path names: once, whole, in bounded time and memory.

A path may be a pipe that nobody writes, a device, a socket, a file of /proc that blocks. None of them may hold a
command up, and what is read from one cannot be read again.
"""

import os
import select
import stat
import time
from pathlib import Path

WRITER_S = 5.0
"""How long somebody may take to open a named pipe for writing."""
QUIET_S = 60.0
"""A writer that has said nothing for so long has said all."""
WHOLE_S = 600.0
"""The longest that a pipe is read."""
_NULL = (1, 3)  # /dev/null


class Unreadable(OSError):
    """A path that is there and cannot be read as evidence: names it and says why."""


def printable(name: str) -> str:
    """A file's name for people and for JSON: bytes that are no UTF-8, and control characters, as `\\xff`, `\\n`."""
    return name if name.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in name)


def _escaped(char: str) -> str:
    byte = ord(char) - 0xDC00  # how Python holds a byte that is no UTF-8
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else char.encode("unicode_escape").decode()


def what(path: Path) -> str:
    """`folder`, `file`, or `pipe`: what has to be read at once, also a file of /proc, which has no size.

    Raises FileNotFoundError, and `Unreadable` for a device or a socket.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as e:
        raise FileNotFoundError(f"no such file or folder: {printable(str(path))}") from e
    except OSError as e:
        raise Unreadable(f"{printable(str(path))}: {e.strerror}") from e
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        return "folder"
    if kind == stat.S_IFREG:
        return "file" if found.st_size else "pipe"
    if kind == stat.S_IFIFO or (os.major(found.st_rdev), os.minor(found.st_rdev)) == _NULL:
        return "pipe"
    names = {stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    raise Unreadable(f"{printable(str(path))}: a {names.get(kind, 'thing of another kind')}, no file that can be read")


def read(path: Path, limit: int) -> tuple[bytes, str]:
    """At most `limit` bytes of a file or a pipe, and a note where that is not all, else "".

    Raises OSError, `Unreadable` for a pipe that nobody writes.
    """
    shown = printable(str(path))
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        parts, why = _parts(fd, limit, stat.S_ISFIFO(os.fstat(fd).st_mode))
    finally:
        os.close(fd)
    if why and not parts:
        raise Unreadable(f"{shown}: {why}")
    return b"".join(parts), f"{shown}: {why}: what had come was read" if why else ""


def _parts(fd: int, limit: int, pipe: bool) -> tuple[list[bytes], str]:
    """What comes, and why that is not all: at a pipe's end nothing comes, and neither before somebody writes it."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    parts: list[bytes] = []
    left, until, written = limit, time.monotonic() + WHOLE_S, not pipe
    while left > 0:
        if time.monotonic() > until:
            return parts, f"not at its end after {WHOLE_S:.0f} s"
        try:
            part = os.read(fd, min(1 << 20, left))
        except BlockingIOError:
            if not pipe:  # a file of the kernel, which would have us wait for its next message
                return parts, ""
            if not poll.poll(1000 * QUIET_S):
                return parts, f"its writer said nothing for {QUIET_S:.0f} s"
            continue
        if part:
            parts.append(part)
            left -= len(part)
            written = True
        elif written:
            return parts, ""
        elif not poll.poll(1000 * WRITER_S):
            return parts, f"a pipe that nobody wrote to in {WRITER_S:.0f} s"
        else:
            written = True
    return parts, f"longer than {limit >> 20} MiB"
