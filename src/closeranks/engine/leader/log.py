"""The step log: every event of an epoch, and a hash of what the core answered. Versioned, framed, bounded on disk.

A segment is a file `NNNNNNNN.crlog`: 8 bytes of magic, then frames `<u32 length><u32 crc32><msgpack>`. The first frame
is a `Header`; frames after it are `Event`s and `Mark`s. A segment is closed at a size and the oldest are deleted, so
the log never holds more than `segments * segment_bytes`. Every segment but the first starts with a snapshot of the
core, hence any segment can be replayed by itself.

A reader stops at the first torn or damaged frame and says so: a crash in the midst of a write costs that frame alone.
A writer whose disk is full counts what it could not write and goes on; the next segment starts clean.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from .events import Config, Event

MAGIC = b"crlog\x00\x00\x02"
VERSION = 4
FRAME = struct.Struct("<II")
PATTERN = "*.crlog"
RETRY_S = 1.0


class Header(msgspec.Struct, frozen=True, array_like=True, tag=101):
    """First record of a segment."""

    version: int
    config: Config
    number: int
    """Segment number within the epoch, from 1."""
    wall_time: float
    """Unix time at `at`, for people."""
    at: float
    snapshot: bytes = b""
    """State of the core before the first event of this segment; empty: newly made."""
    lost: int = 0
    """Bytes of records that could not be written up to here."""


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=102):
    """Hash of the effects of the event before; written only when there were any."""

    digest: bytes


class Words(msgspec.Struct, frozen=True, array_like=True, tag=103):
    """Token ids (only with `log_tokens`): of a submit, or those that left."""

    room: tuple[int, int]
    index: int
    tokens: list[int]


Record = Event | Header | Mark | Words

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Record)


class Writer:
    """Appends records. Never raises for a reason of the disk: it counts, says so in `trouble`, and tries again."""

    def __init__(self, folder: Path, config: Config, segment_bytes: int, segments: int) -> None:
        self.folder = folder
        self.config = config
        self.segment_bytes = max(segment_bytes, 1 << 12)
        self.segments = max(segments, 2)
        self.number = 0
        self.size = 0
        """Bytes of the segment that reached the operating system, without its header."""
        self.fd = -1
        self.buffer = bytearray()
        self.lost = 0
        """Bytes that could not be written."""
        self.trouble = ""
        """Empty: all is well."""
        self.retry_at = -math.inf
        """After a failure no new segment is tried before this clock reading."""

    @property
    def full(self) -> bool:
        """The segment has its size, or there is none: the next event belongs into a new one."""
        return self.fd < 0 or self.size + len(self.buffer) >= self.segment_bytes

    def begin(self, wall_time: float, at: float, snapshot: bytes) -> None:
        """Close the segment, start the next, delete the oldest beyond the bound."""
        self.flush()
        self.close()
        self.retry_at = at + RETRY_S
        header = Header(VERSION, self.config, self.number + 1, wall_time, at, snapshot, self.lost)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            old = sorted(self.folder.glob(PATTERN))
            for path in old[: max(0, len(old) - self.segments + 1)]:
                path.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self.fd = os.open(self.folder / f"{self.number + 1:08d}.crlog", flags, 0o600)
        except OSError as error:
            self.fail(error, 0)
            return
        self.number += 1
        self.buffer += MAGIC
        self.add(_encoder.encode(header))
        self.flush()
        self.size = 0

    def add(self, data: bytes) -> None:
        self.buffer += FRAME.pack(len(data), zlib.crc32(data))
        self.buffer += data

    def write(self, record: Event | Mark | Words) -> None:
        """Append one record; it reaches the operating system with the next `flush`, or when 64 KiB are due."""
        data = _encoder.encode(record)
        if self.fd < 0:
            self.lost += len(data)
            return
        self.add(data)
        if len(self.buffer) > 1 << 16:
            self.flush()

    def flush(self) -> None:
        """Hand the buffer to the operating system."""
        if not self.buffer:
            return
        data, self.buffer = bytes(self.buffer), bytearray()
        try:
            done = 0
            while done < len(data):
                done += os.write(self.fd, data[done:])
        except OSError as error:
            self.fail(error, len(data))
            return
        self.size += len(data)
        self.trouble = ""

    def fail(self, error: OSError, lost: int) -> None:
        """The disk does not take it: this segment ends here; a new one, with a snapshot, is tried a little later."""
        self.lost += lost
        self.buffer.clear()
        self.trouble = f"step log: {error.strerror or error}"
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Damaged(Exception):
    """A file that is not a log segment of a version that this program reads, or is damaged in its midst."""


def read(path: Path, torn: Callable[[str], None] = lambda said: None) -> Iterator[Record]:
    """Records of one segment, in order, up to a torn end, of which `torn` is told. Raises Damaged, OSError."""
    data = path.read_bytes()
    if data[: len(MAGIC)] != MAGIC:
        if MAGIC.startswith(data):
            torn(f"{path.name}: ends before its first record")
            return
        raise Damaged(f"{path}: not a step log of version {VERSION}")
    place = len(MAGIC)
    while place + FRAME.size <= len(data):
        length, crc = FRAME.unpack_from(data, place)
        end = place + FRAME.size + length
        if end > len(data) or not length:
            break
        body = data[place + FRAME.size : end]
        if zlib.crc32(body) != crc:
            if not any(data[end:]):
                break  # the last frame, torn
            raise Damaged(f"{path}: the frame at byte {place} is damaged")
        try:
            yield _decoder.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Damaged(f"{path}: the frame at byte {place}: {error}") from error
        place = end
    if place == len(MAGIC):
        torn(f"{path.name}: ends before its first record")
    elif place < len(data):
        torn(f"{path.name}: torn or cut at byte {place}: {len(data) - place} bytes from there on are no record")


def segments(path: Path) -> list[Path]:
    """The segments of a log folder in order, or the one file named."""
    return sorted(path.glob(PATTERN)) if path.is_dir() else [path]
