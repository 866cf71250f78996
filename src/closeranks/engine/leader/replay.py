"""Re-run the core from its step log, without ranks: does it decide the same again, and what was a request's life?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...protocol import RoomId
from . import snapshot
from .core import Leader
from .desk import digest
from .events import Effect, Event, Plan, Release, Submitted
from .log import VERSION, Damaged, Header, Mark, Words, read, segments


class Difference(msgspec.Struct, frozen=True):
    """The first event to which the core gave another answer than the log says."""

    segment: str
    number: int
    """Number of the event, from 1, over all segments read."""
    at: float
    event: Any
    effects: Any
    expected: str
    found: str


class Replay(msgspec.Struct):
    """What a replay found."""

    schema: int = 1
    segments: int = 0
    events: int = 0
    marks: int = 0
    steps: int = 0
    engine: str = ""
    epoch: int = 0
    wall_time: float = 0.0
    """Unix time of the first event."""
    difference: Difference | None = None
    notes: list[str] = []


Watcher = Callable[[Leader, Event, list[Effect]], None]
"""Called after each event."""


def replay(path: Path, watch: Watcher | None = None) -> Replay:
    """Re-run a log folder or one segment up to its end or the first difference. Raises Damaged, OSError."""
    found = Replay(notes=[])
    leader: Leader | None = None
    before: Header | None = None
    torn: list[str] = []
    for segment in segments(path):
        event: Event | None = None
        effects: list[Effect] = []
        begun = False
        lost = bool(torn)  # the segment before this one ends early
        torn.clear()
        for record in read(segment, torn.append):
            if isinstance(record, Header):
                if record.version != VERSION:
                    raise Damaged(f"{segment}: version {record.version}, this program reads {VERSION}")
                if leader is None:
                    found.engine, found.epoch, found.wall_time = (
                        record.config.engine,
                        record.config.epoch,
                        record.wall_time,
                    )
                try:
                    if leader is None or before is None or lost or not follows(before, record):
                        if leader is not None:
                            found.notes.append(f"{segment.name}: records before it are lost; goes on from its snapshot")
                        leader = start(record)
                    elif record.snapshot != snapshot.take(leader):
                        where = "the state at the segment's start"
                        found.difference = Difference(segment.name, found.events, record.at, where, [], "", "")
                        return found
                except snapshot.BadSnapshot as error:
                    raise Damaged(f"{segment}: {error}") from error
                before, begun = record, True
                found.segments += 1
                continue
            if not begun or leader is None:
                raise Damaged(f"{segment}: no header")
            if isinstance(record, Words):
                continue
            if isinstance(record, Mark):
                found.marks += 1
                mine = digest(effects) if effects else b""
                if event is not None and mine != record.digest:
                    found.difference = difference(segment, found.events, event, effects, record.digest, mine)
                    return found
                event = None
                continue
            if event is not None and effects:
                found.difference = difference(segment, found.events, event, effects, b"", digest(effects))
                return found
            event = record
            try:
                effects = leader.handle(record)
            except Exception as error:
                raise Damaged(f"{segment}: event {found.events + 1} makes the core raise {error!r}") from error
            found.events += 1
            found.steps += sum(isinstance(effect, Plan) for effect in effects)
            if watch is not None:
                watch(leader, record, effects)
        found.notes += torn
    return found


def follows(before: Header, header: Header) -> bool:
    """No record between the two segments is missing."""
    return header.number == before.number + 1 and header.lost == before.lost


def start(header: Header) -> Leader:
    """The leader as it was at a segment's start. Raises BadSnapshot."""
    return snapshot.restore(header.config, header.snapshot) if header.snapshot else Leader(header.config)


def difference(
    segment: Path, number: int, event: Event, effects: list[Effect], expected: bytes, found: bytes
) -> Difference:
    plain = msgspec.to_builtins
    return Difference(
        segment.name,
        number,
        event.at,
        [type(event).__name__, plain(event, builtin_types=(bytes,))],
        [[type(effect).__name__, plain(effect, builtin_types=(bytes,))] for effect in effects],
        expected.hex() or "no effects",
        found.hex() or "no effects",
    )


class Moment(msgspec.Struct, frozen=True):
    """One line of a request's life."""

    after_s: float
    """Seconds since the request was first seen."""
    room: str
    state: str
    """State of the room after the event."""
    what: str


class Life:
    """Watches a replay for everything that concerns one request: named by its request id or its room (hex or decimal,
    with or without `.generation`).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rooms: dict[RoomId, None] = {}
        self.moments: list[Moment] = []
        self.since: float | None = None
        self.rows: dict[RoomId, list[int]] = {}
        """First and last step of a run of steps with a row of the room."""

    def is_meant(self, room: RoomId) -> bool:
        if room in self.rooms:
            return True
        name, _, generation = self.name.partition(".")
        ids = {f"{room.id:016x}", f"{room.id:x}", str(room.id)}
        if name in ids and (not generation or generation == str(room.generation)):
            self.rooms[room] = None
            return True
        return False

    def __call__(self, leader: Leader, event: Event, effects: list[Effect]) -> None:
        if isinstance(event, Submitted) and (event.rid == self.name or self.is_meant(event.room)):
            self.rooms[event.room] = None
        for room in rooms_of(event):
            if self.is_meant(room):
                self.say(leader, event.at, room, f"event {describe(event)}")
        for effect in effects:
            if isinstance(effect, Plan):
                for room in {x.id: None for x in leader.steps.open[-1].rooms} if leader.steps.open else {}:
                    if room in self.rooms:
                        self.row(leader, event.at, room, effect.n)
            elif not isinstance(effect, Release):
                for room in rooms_of(effect):
                    if self.is_meant(room):
                        self.flush(leader, event.at, room)
                        self.say(leader, event.at, room, f"effect {describe(effect)}")

    def row(self, leader: Leader, at: float, room: RoomId, n: int) -> None:
        run = self.rows.get(room)
        if run is not None and run[1] == n - 1:
            run[1] = n
            return
        self.flush(leader, at, room)
        self.rows[room] = [n, n]

    def flush(self, leader: Leader, at: float, room: RoomId) -> None:
        run = self.rows.pop(room, None)
        if run is not None:
            self.say(leader, at, room, f"rows in steps {run[0]} to {run[1]}")

    def say(self, leader: Leader, at: float, room: RoomId, what: str) -> None:
        if self.since is None:
            self.since = at
        self.moments.append(Moment(at - self.since, str(room), leader.rooms.state_of(room), what))

    def close(self, leader: Leader | None = None) -> list[Moment]:
        for room, run in self.rows.items():
            last = self.moments[-1] if self.moments else None
            self.moments.append(
                Moment(last.after_s if last else 0.0, str(room), "", f"rows in steps {run[0]} to {run[1]}")
            )
        return self.moments


def rooms_of(thing: Any) -> list[RoomId]:
    """Rooms that an event or effect names."""
    found = []
    for holder in (thing, getattr(thing, "message", None), getattr(thing, "ended", None)):
        room = getattr(holder, "room", None)
        if isinstance(room, RoomId):
            found.append(room)
    return found


def describe(thing: Any) -> str:
    """One line: the struct's name and its fields, page hashes left out."""
    message = getattr(thing, "message", None) or getattr(thing, "ended", None)
    if message is not None:
        return f"{type(thing).__name__} {describe(message)}"
    parts = []
    for name in thing.__struct_fields__:
        value = getattr(thing, name)
        if name in ("at", "room", "hashes") or value in ("", [], 0, b""):
            continue
        parts.append(f"{name}={value.hex() if isinstance(value, bytes) else value}")
    return f"{type(thing).__name__} {' '.join(parts)}".strip()
