"""The journal of recovery: one line per event, on disk before and after each step is done.

A line is a checksum (crc32, hexadecimal), a blank and JSON. Cut anywhere, the file reads as the lines before the cut:
a torn last line is dropped. A damaged line with sound ones after it is no torn write: then nobody knows what was done,
and the journal refuses to be read until an operator has moved it away.

Ages are taken from a clock that no operator sets (CLOCK_BOOTTIME) while the boot is the same, else from the wall clock;
an event in the future counts as just now, so that a clock that jumps back makes recovery wait, never act twice.
"""

import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from closeranks.watch.recover_state import Action, Plan, Restart, Result, lying

KEPT = 2000
"""Lines that are kept when a journal is opened; older ones go, but for what an open plan needs."""


class JournalDamaged(RuntimeError):
    """A line in the middle of the journal does not match its checksum. The text names the file and the line."""


class Now(msgspec.Struct, frozen=True):
    """A moment: epoch seconds, seconds since boot (suspended time included), and which boot."""

    wall: float
    up: float
    boot: str

    @classmethod
    def read(cls) -> "Now":
        """The present one."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = ""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), boot)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a plan."""

    at: Now
    plan: str
    event: Literal["planned", "begin", "done", "failed", "over"]
    step: int = -1
    action: Action | None = None
    took_s: float = 0.0
    says: str = ""
    ladder: Plan | None = None
    """The whole plan, with `planned`."""

    def age_s(self, now: Now) -> float:
        """Seconds since, never negative."""
        same = bool(now.boot) and now.boot == self.at.boot
        return max(0.0, now.up - self.at.up if same else now.wall - self.at.wall)


class Open(msgspec.Struct, frozen=True):
    """A plan that has not come to its end, and how its steps went."""

    plan: str
    ladder: Plan
    results: dict[int, Result]
    planned: Entry
    last: Entry
    """The newest word on it."""
    begun: frozenset[int] = frozenset()
    """Steps that were begun, whatever became of them."""

    @property
    def down(self) -> str:
        """As the function of that name, of what is written down."""
        return down(self.ladder, self.results)


class Journal:
    """Appends durably. Use under recovery's lock; reading alone needs none (`read`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self._length = 0
        self._fd = -1

    def open(self) -> None:
        """Read what is there, drop a torn tail, shorten a long file. Raises JournalDamaged, OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = _sound(self.path)
        if len(lines) > KEPT:
            lines = _kept(lines)
            self._rewrite([line for line, _ in lines])
        self.entries = [entry for _, entry in lines]
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._length = sum(len(line) for line, _ in lines)  # as they stand there: another version encodes otherwise
        os.ftruncate(self._fd, self._length)
        _sync_folder(self.path.parent)

    def append(self, entry: Entry) -> None:
        """On disk when this returns. Raises OSError when the disk does not take it; the file is then as before."""
        line = _line(entry)
        try:
            written = os.pwrite(self._fd, line, self._length)
            if written < len(line):
                raise OSError(28, "No space left on device", str(self.path))
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._length)
            raise
        self._length += len(line)
        self.entries.append(entry)

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rewrite(self, lines: list[bytes]) -> None:
        new = self.path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)


def read(path: Path) -> list[Entry]:
    """The events of a journal, oldest first; none if there is no file. Raises JournalDamaged."""
    return [entry for _, entry in _sound(path)]


def _kept(lines: list[tuple[bytes, Entry]]) -> list[tuple[bytes, Entry]]:
    """The newest, and of a plan that is open all that `unfinished` reads: what it has ended may be tried to be started
    for days, and the plan itself and its ends stand at the beginning of that."""
    newest = set(range(len(lines) - KEPT, len(lines)))
    if (left := unfinished([entry for _, entry in lines])) is not None:
        own = {(entry.event, entry.step): n for n, (_, entry) in enumerate(lines) if entry.plan == left.plan}
        newest |= set(own.values())
    return [lines[n] for n in sorted(newest)]


def _sound(path: Path) -> list[tuple[bytes, Entry]]:
    """The lines up to a torn last one, as they stand in the file and as they read. Raises JournalDamaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found: list[tuple[bytes, Entry]] = []
    *lines, _ = data.split(b"\n")  # the last part has no end of line: empty, or torn
    for number, line in enumerate(lines):
        if (body := _body(line)) is None:
            if any(_body(later) is not None for later in lines[number + 1 :]):
                raise JournalDamaged(
                    f"{path}, line {number + 1}: damaged, with sound lines after it. What was done is not known; look "
                    "at the engines, then move the file away"
                )
            break
        try:
            found.append((line + b"\n", msgspec.json.decode(body, type=Entry)))
        except msgspec.DecodeError as error:
            raise JournalDamaged(
                f"{path}, line {number + 1}: whole, but of another version ({error}). Act with that, or look at the "
                "engines, then move the file away"
            ) from None
    return found


def restarts(entries: Sequence[Entry], now: Now) -> list[Restart]:
    """Every engine that recovery began to end, and how long ago. A step that was begun twice counts once."""
    seen: dict[tuple[str, int], Restart] = {}
    for entry in entries:
        if entry.event == "begin" and entry.action is not None and entry.action.kind == "end":
            seen[entry.plan, entry.step] = Restart(entry.action.engine, entry.age_s(now))
    return list(seen.values())


def unfinished(entries: Sequence[Entry]) -> Open | None:
    """The last plan, if it has not come to its end."""
    planned = next((e for e in reversed(entries) if e.event == "planned"), None)
    if planned is None or planned.ladder is None:
        return None
    own = [e for e in entries if e.plan == planned.plan]
    if any(e.event == "over" for e in own):
        return None
    results: dict[int, Result] = {e.step: e.event for e in own if e.event == "done" or e.event == "failed"}
    begun = frozenset(e.step for e in own if e.event == "begin")
    return Open(planned.plan, planned.ladder, results, planned, own[-1], begun)


def down(ladder: Plan, results: Mapping[int, Result]) -> str:
    """What a plan leaves lying, in words; empty if nothing."""
    engines = ", ".join(lying(ladder, results))
    return f"; ended and not started: {engines}" if engines else ""


def episodes(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Events plan by plan, oldest first."""
    plans: dict[str, list[Entry]] = {}
    for entry in entries:
        plans.setdefault(entry.plan, []).append(entry)
    yield from plans.items()


def _line(entry: Entry) -> bytes:
    body = msgspec.json.encode(entry)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _body(line: bytes) -> bytes | None:
    """The JSON of a line; None where its checksum does not fit."""
    sum_, _, body = line.partition(b" ")
    try:
        return body if len(sum_) == 8 and int(sum_, 16) == zlib.crc32(body) else None
    except ValueError:
        return None


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
