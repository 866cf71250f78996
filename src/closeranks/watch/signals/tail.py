"""A log file, read on from where it was left, also when its name becomes another file's.

The file is held open: a process goes on writing to the file that it opened, whatever that is called after a rotation.
A file that lies under the name since then takes its place once something was written to it, and what the old one still
held is read first. A file that was cut in place (copytruncate) is told by its size, or by other bytes where we were.
"""

import contextlib
import os
from typing import BinaryIO

FIRST_BYTES = 1 << 20
LOOK_BYTES = 4 << 20
"""Read at most so much at a look; what a flood wrote beyond it is skipped and said."""
MARK_BYTES = 64
REST_BYTES = 64 << 10
"""Of a line that has not ended yet its last part is kept."""


class Tail:
    """One file by its name."""

    def __init__(self, path: str) -> None:
        self.path = self.where = path
        """`where`: what the file that is read is called now."""
        self.skipped = 0
        self._file: BinaryIO | None = None
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._mark = self._rest = b""

    def read(self) -> list[bytes]:
        """The whole lines that are new; at first those of the last mebibyte. OSError when there is no such file, and
        none that was."""
        file = self._file or self._open()
        replaced = self._replaced(file)  # asked before what is left is read: nothing comes after it
        lines = self._new(file)
        if replaced:
            self.close()
            lines += self._new(self._open())
        return lines

    def close(self) -> None:
        """Let go of the file. A later `read` goes on where this one was, if the name is still the file's."""
        if self._file is not None:
            self._file.close()
            self._file, self.where = None, self.path

    def _open(self) -> BinaryIO:
        file = open(self.path, "rb")  # noqa: SIM115 - held
        info = os.fstat(file.fileno())
        identity = (info.st_dev, info.st_ino)
        if identity != self._identity:
            self._at = max(0, info.st_size - FIRST_BYTES) if self._identity is None else 0
            self._mark = self._rest = b""
        self._file, self._identity = file, identity
        return file

    def _replaced(self, file: BinaryIO) -> bool:
        """Whether another file lies under the name, and is written to."""
        info = None
        with contextlib.suppress(FileNotFoundError):  # renamed or removed, and nothing in its place
            info = os.stat(self.path)
        if info is not None and (info.st_dev, info.st_ino) == self._identity:
            self.where = self.path
            return False
        self.where = os.readlink(f"/proc/self/fd/{file.fileno()}")
        return info is not None and info.st_size > 0

    def _new(self, file: BinaryIO) -> list[bytes]:
        size = os.fstat(file.fileno()).st_size
        if size < self._at or os.pread(file.fileno(), len(self._mark), self._at - len(self._mark)) != self._mark:
            self._at, self._mark, self._rest = 0, b"", b""  # cut
        if size - self._at > LOOK_BYTES:
            self.skipped += size - self._at - LOOK_BYTES
            self._at, self._mark = size - LOOK_BYTES, b""
        data = os.pread(file.fileno(), LOOK_BYTES, self._at)
        self._at += len(data)
        self._mark = (self._mark + data)[-MARK_BYTES:]
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-REST_BYTES:]
        return lines
