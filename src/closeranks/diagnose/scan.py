"""Scanning: one pass over a byte stream that hands readers the lines they could use, in bounded time and memory.

Engines log gigabytes of which a few lines matter. One compiled expression over whole blocks finds the lines with a
token of some reader; the others cost no Python at all. Lines of one token beyond `KEEP` are kept as the first and the
last `KEEP`, so a flood of one message cannot push out another.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import IO, Protocol

from closeranks.diagnose.facts import Fact, Src
from closeranks.diagnose.lines import MAX_LINE, Line, parse

BLOCK = 4 << 20
KEEP = 3000
MAX_FACTS = 300_000  # of one file


class LineReader(Protocol):
    """Reads lines of one format. One instance per file; `open` asks for the following lines whatever they hold."""

    NAME: str
    ABOUT: str
    TOKENS: tuple[str, ...]
    open: bool

    def line(self, line: Line) -> Iterable[Fact]:
        """Facts of one line."""

    def end(self) -> Iterable[Fact]:
        """Facts that were waiting for more lines when the file ended."""


def prefilter(readers: Iterable[LineReader]) -> re.Pattern[bytes]:
    """One expression that finds any token of any reader."""
    tokens = sorted({t for r in readers for t in r.TOKENS})
    return re.compile(b"|".join(re.escape(t.encode()) for t in tokens))


def lines_of(stream: IO[bytes], skip_from: int = -1, skip_to: int = -1) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole lines, and whether each is read (False: only its line breaks count).

    A line longer than a block is cut: its rest is passed as unread. Bytes from `skip_from` to `skip_to` are unread.
    """
    carry = b""
    offset = 0
    inside_long_line = False
    while block := stream.read(BLOCK):
        start = offset
        offset += len(block)
        if skip_from <= start and offset <= skip_to:
            yield block, False  # the line that was carried over ends in here and goes unread with it
            carry = b""
            inside_long_line = not block.endswith(b"\n")
            continue
        if inside_long_line:
            cut = block.find(b"\n")
            if cut < 0:
                continue
            block, inside_long_line = block[cut + 1 :], False
        end = block.rfind(b"\n") + 1
        if not end:
            yield (carry + block)[: MAX_LINE * 4], True
            carry, inside_long_line = b"", True
            continue
        yield carry + block[:end], True
        carry = block[end:]
    if carry:
        yield carry, True


class Scanner:
    """One file's pass. `facts(...)` yields everything its readers found."""

    def __init__(self, name: str, readers: list[LineReader], pattern: re.Pattern[bytes]) -> None:
        self.name = name
        self.readers = readers
        self.pattern = pattern
        self.number = 0
        self.found = 0
        self.hits: dict[bytes, int] = {}
        self.late: dict[bytes, deque[tuple[int, str]]] = {}
        self.dropped = 0
        self.clock: tuple[int, float | None] = (0, None)

    def facts(self, blocks: Iterable[tuple[bytes, bool]]) -> Iterator[Fact]:
        """Facts of the blocks, then of what readers still held at the end."""
        for block, read in blocks:
            if read:
                yield from self._block(block)
            else:
                self.number += block.count(b"\n")
        for reader in self.readers:
            yield from reader.end()
            reader.open = False
        for ring in self.late.values():
            for number, text in ring:
                yield from self._line(number, text, late=True)

    def _block(self, block: bytes) -> Iterator[Fact]:
        pos, size = 0, len(block)
        while pos < size and self.found < MAX_FACTS:
            token = b""
            start = pos
            if not any(r.open for r in self.readers):
                m = self.pattern.search(block, pos)
                if m is None:
                    break
                start = block.rfind(b"\n", pos, m.start()) + 1 or pos
                self.number += block.count(b"\n", pos, start)
                token = m[0] if m.start() - start <= MAX_LINE else b"\n"
            stop = block.find(b"\n", start)
            stop = size if stop < 0 else stop
            self.number += 1
            pos = stop + 1
            if token == b"\n":
                continue
            text = block[start : min(stop, start + MAX_LINE)].decode("utf-8", "replace")
            seen = self.hits[token] = self.hits.get(token, 0) + 1
            if token and seen > KEEP and not any(r.open for r in self.readers):
                ring = self.late.setdefault(token, deque(maxlen=KEEP))
                self.dropped += len(ring) == KEEP
                ring.append((self.number, text))
                continue
            yield from self._line(self.number, text)
        if pos < size:
            self.number += block.count(b"\n", pos)

    def _line(self, number: int, raw: str, late: bool = False) -> Iterator[Fact]:
        for piece in raw.split("\r"):  # progress bars overwrite themselves
            if not piece.strip() and not any(r.open for r in self.readers):
                continue
            line = parse(piece, Src(self.name, number))
            if line.time is not None and not line.stamped:
                self.clock = (number, line.time)
            elif self.clock[1] is not None and number - self.clock[0] <= 200 and not late:
                line.time = self.clock[1]  # a continuation: not before the record above it
            for reader in self.readers:
                if (reader.open and not late) or any(t in line.text for t in reader.TOKENS):
                    for fact in reader.line(line):
                        self.found += 1
                        yield fact
