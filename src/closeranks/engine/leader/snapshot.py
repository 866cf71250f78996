"""The core's whole state as bytes and back: first record of a log segment, so that each can be replayed by itself.

Only plain values, the frozen structs of the wire, and the core's own classes named here are written or made: reading a
snapshot from somebody else's incident folder runs no code of theirs.
"""

from collections import deque
from typing import Any

import msgspec

from ... import protocol
from .admission import Admission
from .core import Leader
from .events import Config
from .fences import Fences
from .handover import Handover, Transfer
from .link import Gone, Link
from .pages import Pool
from .peers import Peers
from .radix import Cache
from .reach import Reach
from .rooms import Room, Rooms
from .scheduler import Scheduler
from .steps import OpenStep, Steps

PARTS = (Leader, Admission, Rooms, Steps, Scheduler, Handover, Fences, Reach, Peers, Pool, Cache)
RECORDS = (Room, OpenStep, Transfer, Link, Gone)
CLASSES: dict[str, type] = {cls.__name__: cls for cls in (*PARTS, *RECORDS)}
STRUCTS: dict[str, type] = {
    cls.__name__: cls for cls in (protocol.Row, protocol.Peer, protocol.Memory, protocol.Fingerprint, protocol.Joined)
}
PLAIN = frozenset({int, bytes, str, float, type(None)})
"""Types that msgpack gives back as they were: lists and dicts of nothing else go as they are."""
LEFT_OUT = {"handlers", "config", "out"}
"""Attributes of `Leader` that follow from its config."""

_encode = msgspec.msgpack.Encoder().encode


class BadSnapshot(ValueError):
    """Bytes that are not a snapshot of this version's core."""


def attributes(thing: Any) -> list[str]:
    names = list(type(thing).__slots__) if hasattr(type(thing), "__slots__") else list(vars(thing))
    return [name for name in names if not (isinstance(thing, Leader) and name in LEFT_OUT)]


def take(leader: Leader) -> bytes:
    """Snapshot between two events. Values: plain ones as they are; others as [kind, ...]; objects by number."""
    numbers: dict[int, int] = {id(leader): 0}
    todo: list[Any] = [leader]
    table: list[Any] = []

    def pack(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            return value
        if isinstance(value, protocol.RoomId):
            return ["r", value.id, value.generation]
        if isinstance(value, list):
            if PLAIN.issuperset(map(type, value)):
                return ["p", value]
            return ["l", [pack(x) for x in value]]
        if isinstance(value, tuple):
            return ["t", [pack(x) for x in value]]
        if isinstance(value, dict):
            if PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
                return ["m", list(value), list(value.values())]
            return ["d", [pack(x) for x in value], [pack(x) for x in value.values()]]
        if isinstance(value, deque):
            return ["q", [pack(x) for x in value]]
        name = type(value).__name__
        if isinstance(value, msgspec.Struct):
            if name not in STRUCTS:
                raise TypeError(f"a snapshot cannot hold {name}")
            return ["s", name, _encode(value)]
        if name not in CLASSES:
            raise TypeError(f"a snapshot cannot hold {name}")
        number = numbers.get(id(value))
        if number is None:
            number = numbers[id(value)] = len(todo)
            todo.append(value)
        return ["o", number]

    done = 0
    while done < len(todo):
        thing = todo[done]
        done += 1
        table.append([type(thing).__name__, {name: pack(getattr(thing, name)) for name in attributes(thing)}])
    return _encode(table)


def restore(config: Config, data: bytes) -> Leader:
    """A leader in the state of the snapshot. Raises BadSnapshot."""
    try:
        table = msgspec.msgpack.decode(data)
        things: list[Any] = []
        for number, (name, _) in enumerate(table):
            cls = CLASSES[name]
            things.append(Leader(config) if number == 0 and cls is Leader else object.__new__(cls))

        def unpack(value: Any) -> Any:
            if not isinstance(value, list):
                return value
            kind = value[0]
            if kind == "r":
                return protocol.RoomId(value[1], value[2])
            if kind == "p":
                return list(value[1])
            if kind == "m":
                return dict(zip(value[1], value[2], strict=True))
            if kind == "l":
                return [unpack(x) for x in value[1]]
            if kind == "t":
                return tuple(unpack(x) for x in value[1])
            if kind == "d":
                return dict(zip([unpack(x) for x in value[1]], [unpack(x) for x in value[2]]))
            if kind == "q":
                return deque(unpack(x) for x in value[1])
            if kind == "s":
                return msgspec.msgpack.decode(value[2], type=STRUCTS[value[1]])
            return things[value[1]]

        for thing, (_, values) in zip(things, table):
            for name, value in values.items():
                if name in LEFT_OUT:
                    raise BadSnapshot(f"attribute {name} is not part of a snapshot")
                setattr(thing, name, unpack(value))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadSnapshot(f"not a snapshot of this version: {error}") from error
    leader = things[0] if things else None
    if not isinstance(leader, Leader):
        raise BadSnapshot("a snapshot starts with the leader")
    return leader
