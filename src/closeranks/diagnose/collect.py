"""Collecting: a bundle → facts. Each file is read once, in bounded time and memory, and never stops the others."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

from closeranks.diagnose import wrappers
from closeranks.diagnose.documents import MAX_TEXT, documents, unwrap_all
from closeranks.diagnose.facts import Fact, Src
from closeranks.diagnose.readers import DocumentReader, document_readers, line_readers
from closeranks.diagnose.scan import Prefilter, Scanner, lines_of, prefilter
from closeranks.evidence.bundle import Bundle, Item
from closeranks.evidence.safe_pickle import UnsafePickle, load_plain

READ_BYTES = 256 << 20  # of one file
READ_TOTAL = 768 << 20  # of all files
NOT_READ = "left unread, reading it failed"
FOREIGN = 2000  # JSON documents of no known format in a row, after which no more are looked for


@dataclass
class Collected:
    """Facts in order of file and line, the files read, and what went unread and why."""

    facts: list[Fact] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect(bundle: Bundle) -> Collected:
    """All facts of `bundle`."""
    out = Collected(notes=list(bundle.notes))
    pattern = _prefilter()
    readers = document_readers()
    budget = READ_TOTAL
    for item in bundle.items:
        out.files.append(item.name)
        if budget <= 0:
            out.notes.append(f"{item.name}: left unread: the bundle holds more than {READ_TOTAL >> 20} MiB")
            continue
        try:
            facts, used = _one(item, pattern, readers, out.notes, min(READ_BYTES, budget))
        except OSError as e:
            out.notes.append(f"{item.name}: not readable: {e.strerror or type(e).__name__}")
            continue
        except Exception as e:  # noqa: BLE001 - said in the notes: what is wrong with one file costs no other
            out.notes.append(f"{item.name}: {NOT_READ} ({type(e).__name__})")
            continue
        budget -= used
        out.facts += sorted(facts, key=lambda f: f.src)
    return out


@cache
def _prefilter() -> Prefilter:
    """The same for every bundle of a process; building it takes longer than to read a short one."""
    return prefilter(line_readers())


def _one(
    item: Item, pattern: Prefilter, readers: list[DocumentReader], notes: list[str], limit: int
) -> tuple[list[Fact], int]:
    with item.open() as stream:
        head = stream.read(4096)
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        with item.open() as stream:
            data = stream.read(limit)
        return list(_pickle(data, item.name, readers, notes)), len(data)
    if b"\0" in head[:1024] and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        notes.append(f"{item.name}: binary, not read")
        return [], 0
    size = item.size if item.size is not None else MAX_TEXT + 1
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) and size <= MAX_TEXT:
        with item.open() as stream:
            return _text(item.name, stream.read().decode("utf-16", "replace"), pattern, readers, notes), size
    if size <= MAX_TEXT:
        with item.open() as stream:
            return _text(item.name, stream.read(MAX_TEXT).decode("utf-8", "replace"), pattern, readers, notes), size
    skip_from = skip_to = -1
    if size > limit:
        skip_from, skip_to = limit // 8, size - limit * 7 // 8
        notes.append(f"{item.name}: {size >> 20} MiB; its first {limit >> 23} and last {limit * 7 >> 23} MiB were read")
    scanner = Scanner(item.name, line_readers(), pattern, _noting(item.name, notes))
    strip = wrappers.stripper(head.decode("utf-8", "replace"))
    with item.open() as stream:
        blocks = lines_of(stream, skip_from, skip_to)
        if strip is not None:
            blocks = ((strip(block) if read else block, read) for block, read in blocks)
        return list(scanner.facts(blocks)), min(size, limit)


def _noting(name: str, notes: list[str]) -> Callable[[str, Exception], None]:
    """Says once per reader that it failed on this file, and how. Not what the exception says: that quotes evidence."""

    def note(reader: str, error: Exception) -> None:
        said = f"{name}: {NOT_READ} as {reader} ({type(error).__name__})"
        if said not in notes:
            notes.append(said)

    return note


def _text(name: str, text: str, pattern: Prefilter, readers: list[DocumentReader], notes: list[str]) -> list[Fact]:
    """Facts of a text that fits in memory: its JSON documents, then its lines."""
    facts: list[Fact] = []
    failed = _noting(name, notes)
    text = wrappers.strip(text)
    if "{" in text:
        whole = unwrap_all(text)
        read: list[tuple[int, int]] = []
        foreign = 0
        for found in documents(whole):
            if foreign > FOREIGN:  # a log in JSON lines: its lines are read as lines
                break
            got = _document(found.value, Src(name, found.line), readers, failed)
            if got is not None:
                facts += got
                read.append((found.start, found.end))
            foreign = 0 if got is not None else foreign + 1
        if read:
            text = _blanked(whole, read)
    scanner = Scanner(name, line_readers(), pattern, failed)
    facts += scanner.facts(lines_of(io.BytesIO(text.encode("utf-8", "replace"))))
    return facts


def _document(
    found: object, src: Src, readers: list[DocumentReader], failed: Callable[[str, Exception], None]
) -> list[Fact] | None:
    """Facts of the first reader that knows the object, none where it failed on it; None if it is of no known format."""
    for reader in readers:
        try:
            got = reader.document(found, src)
            if got is not None:
                return list(got)
        except Exception as e:  # noqa: BLE001 - said in the notes
            failed(reader.NAME, e)
            return []
    return None


def _blanked(text: str, regions: list[tuple[int, int]]) -> str:
    """`text` with its documents emptied, lines kept: what a document quotes must not be read as a log line."""
    parts, pos = [], 0
    for start, end in regions:
        parts += [text[pos:start], "\n" * text.count("\n", start, end)]
        pos = end
    return "".join([*parts, text[pos:]])


def _pickle(data: bytes, name: str, readers: list[DocumentReader], notes: list[str]) -> Iterator[Fact]:
    try:
        found = load_plain(data)
    except UnsafePickle as e:
        notes.append(f"{name}: pickle not loaded: {e}")
        return
    got = _document(found, Src(name, 1), readers, _noting(name, notes))
    if got is not None:
        yield from got
        return
    notes.append(f"{name}: a pickle of another format than the flight recorder's")
