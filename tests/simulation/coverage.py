"""Which (state, event) pairs of the room, page, epoch and resume tables a simulation has met, and how often.

A pair that cannot come up is named with the reason; should it come up all the same, the table says so.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.pages import Pool
from closeranks.engine.leader.radix import Cache
from closeranks.gateway.resume import Requests
from closeranks.protocol import Abort, Arrived, Checked, End, Grant, Send, Sent, Submit
from tests.simulation import impossible
from tests.simulation.attempts import attempt_events

BY_MESSAGE: dict[type, str] = {
    Submit: r.SUBMIT,
    Abort: r.ABORT,
    Grant: r.GRANT,
    Arrived: r.ARRIVED,
    End: r.PEER_END,
}


class Coverage:
    """Counts of one simulation, over all its runs."""

    def __init__(self) -> None:
        self.room: Counter[tuple[str, str]] = Counter()
        self.page: Counter[tuple[str, str]] = Counter()
        self.epoch: Counter[tuple[str, str]] = Counter()
        self.resume: Counter[tuple[str, str]] = Counter()

    def add(self, other: "Coverage") -> None:
        for name in ("room", "page", "epoch", "resume"):
            getattr(self, name).update(getattr(other, name))

    # what the simulation reports

    def leader(self, leader: Leader, args: tuple[Any, ...]) -> None:
        """A message is about to reach a leader; no arguments: a tick."""
        if not args:
            self.epoch[leader.state, "tick"] += 1
            return
        message = args[-1]
        kind = type(message)
        self.epoch[leader.state, kind.__name__.lower()] += 1
        if leader.state == "faulted":
            return
        happening = BY_MESSAGE.get(kind)
        if happening is not None:
            self.room[leader.rooms.state_of(message.room), happening] += 1
        elif kind is Checked:
            self.room[leader.rooms.state_of(message.room), r.BAD if message.bad else r.CHECKED] += 1
        elif kind is Sent:
            transfer = leader.handover.transfers.get(message.transfer)
            if transfer is not None:
                self.room[transfer.room.state, r.BAD if message.error else r.SETTLED] += 1

    def moves(self, leader: Leader) -> None:
        """A leader's life is over: what its own decisions and its clock have met."""
        by_message = (*BY_MESSAGE.values(), r.CHECKED, r.SETTLED, r.BAD)
        for (state, happening), count in leader.rooms.met.items():
            if happening not in by_message or (state, happening) not in self.room or happening == r.PEER_END:
                self.room[state, happening] += count

    def written(self, leader: Leader, send: Send) -> None:
        for _, page in send.pages:
            self.page["quarantined" if page in leader.pool.quarantined else "owned", "write"] += 1

    def gateway(self, table: Requests, what: str, args: tuple[Any, ...]) -> None:
        self.resume.update(attempt_events(table, what, args))

    # what is printed

    def tables(self) -> list[tuple[str, list[tuple[str, str, int, str]]]]:
        """Per table: (state, event, times met, why it cannot come up or "")."""
        found = []
        for name, states, events, why in impossible.TABLES:
            met: Counter[tuple[str, str]] = getattr(self, name)
            rows = [(s, e, met[s, e], why(s, e)) for s in states for e in events]
            extra = [(s, e, n, "") for (s, e), n in met.items() if s not in states or e not in events]
            found.append((name, rows + extra))
        return found

    def report(self, least: int) -> list[str]:
        """The tables as text, then what is short of `least`, and what was called impossible and came up."""
        lines, wrong = [], []
        for name, rows in self.tables():
            lines.append(
                f"\n{name}: {sum(not why for *_, why in rows)} pairs, {sum(bool(why) for *_, why in rows)} impossible"
            )
            for state, event, count, why in rows:
                lines.append(f"  {state:12} {event:24} {count:9}  {'impossible: ' + why if why else ''}".rstrip())
                if why and count:
                    wrong.append(f"{name}: {state} x {event} was met {count} times and called impossible")
                elif not why and count < least:
                    wrong.append(f"{name}: {state} x {event} was met {count} times only")
        return [*lines, "", *(wrong or [f"every possible pair was met at least {least} times"])]

    def markdown(self) -> list[str]:
        """The tables as Markdown: a row per event, a column per state; a letter where a pair cannot come up."""
        lines = []
        for name, rows in self.tables():
            states, events = list(dict.fromkeys(x[0] for x in rows)), list(dict.fromkeys(x[1] for x in rows))
            reasons = list(dict.fromkeys(why for *_, why in rows if why))
            marks = {why: chr(ord("a") + number) for number, why in enumerate(reasons)}
            cells = {(s, e): f"*{marks[why]}*" if why else f"{count:,}" for s, e, count, why in rows}
            lines += ["", f"| {name} | {' | '.join(states)} |", "|---" * (len(states) + 1) + "|"]
            lines += [f"| {e} | {' | '.join(cells.get((s, e), '') for s in states)} |" for e in events]
            lines += ["", "; ".join(f"*{mark}*: {why}" for why, mark in marks.items()) + "."]
        return lines


@contextmanager
def watching_pages(coverage: Coverage) -> Iterator[None]:
    """Counts what becomes of pages, in every pool."""
    page, saved = coverage.page, []

    def wrap(cls: type, name: str, count: Callable[..., None]) -> None:
        function = getattr(cls, name)
        saved.append((cls, name, function))

        def counted(self: Any, *args: Any) -> Any:
            count(self, *args)
            return function(self, *args)

        setattr(cls, name, counted)

    def take(pool: Pool, count: int) -> None:
        if count <= pool.available:
            page["free", "take"] += count

    def take_one(pool: Pool) -> None:
        page["free", "take"] += pool.available > 0

    def share(pool: Pool, pages: list[int]) -> None:
        for x in pages:
            page["owned" if pool.refs[x] else "cached", "share"] += 1

    def retire(pool: Pool, pages: list[int], hashes: list[bytes], valid: int) -> None:
        for number, x in enumerate(pages):
            if pool.refs[x] > 1:
                page["owned", "left by one of its users"] += 1
            else:
                whole = x in pool.cache.hash_of or (number < valid and hashes[number] not in pool.cache.page_of)
                page["owned", "left whole" if whole else "left unfinished"] += 1

    def publish(pool: Pool, pages: list[int], hashes: list[bytes], valid: int) -> None:
        page["owned", "publish"] += valid

    def quarantine(pool: Pool, pages: list[int]) -> None:
        page["owned", "quarantine"] += len(pages)

    def lift(pool: Pool, pages: list[int]) -> None:
        page["quarantined", "proof"] += len(pages)

    def evict(cache: Cache, count: int) -> None:
        page["cached", "evict"] += count

    for count in (take, take_one, share, retire, publish, quarantine, lift):
        wrap(Pool, count.__name__, count)
    wrap(Cache, "evict", evict)
    try:
        yield
    finally:
        for cls, name, function in saved:
            setattr(cls, name, function)
