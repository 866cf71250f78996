"""Scanning: one pass over a byte stream that hands readers the lines they could use, in bounded time and memory.

Engines log gigabytes of which a few lines matter. One compiled expression, searched over whole blocks, finds the lines
that may hold a token of some reader; another finds the token, and lines that differ in numbers only are searched once.
Lines of one token beyond `KEEP` are kept as the first and the last `KEEP`, so a flood of one message cannot push out
another.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

from closeranks.diagnose import quotes
from closeranks.diagnose.facts import Fact, Src
from closeranks.diagnose.lines import MAX_LINE, Line, parse

BLOCK = 4 << 20
KEEP = 3000
MAX_SHAPES = 50_000
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


@dataclass(frozen=True)
class Prefilter:
    """`token` finds any token of any reader in a line. `anchor` finds in a block, much faster, where one may be."""

    token: re.Pattern[bytes]
    anchor: re.Pattern[bytes]


def prefilter(readers: Iterable[LineReader]) -> Prefilter:
    """The expressions for the tokens of `readers`."""
    tokens = {t for r in readers for t in r.TOKENS} | set(quotes.TOKENS)
    return Prefilter(_tree(tokens), _tree(_anchors(tokens)))


def _tree(tokens: Iterable[str]) -> re.Pattern[bytes]:
    """One expression that finds any of `tokens`, as a tree of prefixes: a row of them costs five times more."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for char in token:
            node = node.setdefault(char, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        if "" in node:
            return ""  # a shorter token ends here; longer ones add nothing
        parts = [re.escape(char) + expression(node[char]) for char in sorted(node)]
        return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

    return re.compile(expression(tree).encode())


# How common a character is in logs and prose, roughly, in percent. Others (capitals, punctuation) are rarer.
_COMMON = {" ": 15.0} | {
    char: percent
    for percent, chars in ((8.0, "eta"), (6.0, "oinsr"), (4.0, "hldcum"), (2.0, "fpgwybv"), (1.0, "kxjqz"))
    for char in chars
}


def _anchors(tokens: Iterable[str]) -> set[str]:
    """A part of each token that starts with a character of a small set of rare ones.

    An expression is tried at every place where one of its first characters stands. Starting all parts with a few rare
    ones leaves few places; any line that holds a token holds its part.
    """
    left, starts = set(tokens), set[str]()
    while left:
        gain: dict[str, int] = {}
        for token in left:
            for char in set(_starts(token)):
                gain[char] = gain.get(char, 0) + 1
        best = max(sorted(gain), key=lambda c: gain[c] / _COMMON.get(c, 0.7))
        starts.add(best)
        left = {t for t in left if best not in _starts(t)}
    out = set()
    for token in tokens:
        at = [i for i, char in enumerate(_starts(token)) if char in starts]
        out.add(token[min(at, key=lambda i: (_COMMON.get(token[i], 0.7), i)) :])
    return out


def _starts(token: str) -> str:
    """The characters at which its part may start: four are left of a token that has them, as fewer find too much."""
    return token[: max(1, len(token) - 3)]


def lines_of(stream: IO[bytes], skip_from: int = -1, skip_to: int = -1) -> Iterator[tuple[bytes, bool]]:
    """Blocks of whole lines, and whether each is read (False: only its line breaks count).

    A line longer than a block is cut: its rest is passed as unread. Bytes from `skip_from` to `skip_to` are unread.
    """
    carry = b""
    offset = 0
    inside_long_line = after_gap = False
    while block := stream.read(BLOCK):
        start = offset
        offset += len(block)
        if skip_from <= start and offset <= skip_to:
            yield block, False  # the line that was carried over ends in here and goes unread with it
            carry = b""
            inside_long_line = after_gap = not block.endswith(b"\n")
            continue
        if inside_long_line:
            cut = block.find(b"\n")
            if cut < 0:
                continue
            if after_gap:  # the line that began in the gap: not counted yet, unlike the head of a long line
                yield b"\n", False
            block, inside_long_line, after_gap = block[cut + 1 :], False, False
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

    def __init__(
        self, name: str, readers: list[LineReader], find: Prefilter, failed: Callable[[str, Exception], None]
    ) -> None:
        """`failed` is told of a reader that raised, by name; that one reads no further in this file."""
        self.name = name
        self.failed = failed
        self.readers = readers
        self.pattern, self.anchor = find.token, find.anchor
        self.number = 0
        self.found = 0
        self.hits: dict[bytes, int] = {}
        self.late: dict[bytes, deque[tuple[int, bytes]]] = {}
        self.readers_tokens = [(r, r.TOKENS) for r in readers]
        self.shapes: dict[bytes, tuple[bytes, bool]] = {}
        self.quotes = quotes.Quotes()
        self.open = False  # some reader wants the following lines whatever they hold
        self.clock: tuple[int, float | None] = (0, None)

    def facts(self, blocks: Iterable[tuple[bytes, bool]]) -> Iterator[Fact]:
        """Facts of the blocks, then of what readers still held at the end."""
        for block, read in blocks:
            self.quotes.block(read)
            if read:
                yield from self._block(block)
            else:
                self.number += block.count(b"\n")
        for reader in self.readers:
            try:
                left = list(reader.end())
            except Exception as e:  # noqa: BLE001 - told; what the others found stands
                left = []
                self.failed(reader.NAME, e)
            yield from left
            reader.open = False
        for ring in self.late.values():
            for number, raw in ring:
                yield from self._line(number, raw.decode("utf-8", "replace"), late=True)

    def _block(self, block: bytes) -> Iterator[Fact]:
        """Facts of whole lines: those with a token, and those that a reader asked for."""
        at, size = 0, len(block)
        while at < size:
            if not self.open:
                hit = self.anchor.search(block, at)
                start = block.rfind(b"\n", at, hit.start()) + 1 if hit else size
                start = max(start, at)
                self.number += block.count(b"\n", at, start)
                if hit is None:
                    self.number += not block.endswith(b"\n")
                    return
                at = start
            end = block.find(b"\n", at)
            end = size if end < 0 else end
            self.number += 1
            raw = block[at:end]
            token, prints = self._token(raw)
            if (self.open or token) and not self.quotes.holds(block, at, end, prints):
                yield from self._one(raw, token)
            at = end + 1

    def _one(self, raw: bytes, token: bytes) -> Iterator[Fact]:
        if not self.open:
            seen = self.hits[token] = self.hits.get(token, 0) + 1
            if seen > KEEP:  # a flood: kept as bytes, read at the end
                ring = self.late.get(token)
                if ring is None:
                    ring = self.late[token] = deque(maxlen=KEEP)
                ring.append((self.number, raw[:MAX_LINE]))
                return
        if self.found < MAX_FACTS:
            yield from self._line(self.number, raw[:MAX_LINE].decode("utf-8", "replace"))

    def _token(self, raw: bytes) -> tuple[bytes, bool]:
        """The first token in a line, and whether it prints a request. Lines that differ in numbers and hex digits only
        are searched once."""
        if len(raw) > MAX_LINE:
            raw = raw[:MAX_LINE]
        shape = raw.translate(None, b"0123456789abcdef")
        found = self.shapes.get(shape)
        if found is None:
            m = self.pattern.search(raw)
            found = (m[0], quotes.BEGINS.search(raw) is not None) if m else (b"", False)
            if len(self.shapes) < MAX_SHAPES:
                self.shapes[shape] = found
        return found

    def _line(self, number: int, raw: str, late: bool = False) -> Iterator[Fact]:
        for piece in raw.split("\r"):  # progress bars overwrite themselves
            if not self.open and not piece.strip():
                continue
            line = parse(piece, Src(self.name, number))
            if line.time is not None and not line.stamped:
                self.clock = (number, line.time)
            elif self.clock[1] is not None and number - self.clock[0] <= 200 and not late:
                line.time, line.stamped = self.clock[1], False  # a continuation: not before the record above it
            for reader, tokens in self.readers_tokens:
                if (reader.open and not late) or any(t in line.text for t in tokens):
                    try:
                        found = list(reader.line(line))
                    except Exception as e:  # noqa: BLE001 - told; the others read on
                        self._give_up(reader, e)
                        continue
                    self.found += len(found)
                    yield from found
            self.open = any(r.open for r in self.readers)

    def _give_up(self, reader: LineReader, error: Exception) -> None:
        self.failed(reader.NAME, error)
        reader.open = False
        self.readers = [r for r in self.readers if r is not reader]
        self.readers_tokens = [(r, tokens) for r, tokens in self.readers_tokens if r is not reader]
