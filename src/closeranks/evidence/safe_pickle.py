"""Loading a pickle that a stranger wrote: plain containers and scalars only, bounded in size, depth and count.

The flight recorder of torch writes pickles. `pickle.load` on one runs whatever its author chose. This loader is a
machine of its own for the opcodes that build plain data; it knows no other, so nothing can name a class or call
something. What it returns is a tree of bounded size, also where objects are shared: `str` of it, or a walk, ends.
"""

import pickletools
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 256 << 20
MAX_OPS = 20_000_000
MAX_NODES = 20_000_000
"""Containers and scalars, a shared one counted at every place where it stands."""
MAX_DEPTH = 100
_KEYS = (str, int, float, bool, bytes, type(None))  # the hash of nested tuples that are shared takes for ever
_PUSHED = frozenset(
    [
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    ]
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class UnsafePickle(ValueError):
    """The pickle is damaged, too large, or holds more than plain data. The message says which."""


def load_plain(data: bytes) -> object:
    """The plain object in `data`. Raises `UnsafePickle` for anything else; never runs code of the pickle's author."""
    if len(data) > MAX_BYTES:
        raise UnsafePickle(f"refused: {len(data)} bytes, more than {MAX_BYTES}")
    try:
        found = _Machine().run(data)
        _check_size(found)
    except UnsafePickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError) as e:
        raise UnsafePickle(f"damaged or cut pickle: {type(e).__name__}") from e
    except (MemoryError, OverflowError, RecursionError) as e:
        raise UnsafePickle(f"refused: {type(e).__name__} while loading") from e
    return found


class _Machine:
    """The stack machine of pickle: `stack` is what stands above the last mark, `below` what stands under the others."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        for count, (opcode, arg, _) in enumerate(pickletools.genops(data)):
            if count > MAX_OPS:
                raise UnsafePickle(f"refused: more than {MAX_OPS} opcodes")
            name = opcode.name
            if name in _PUSHED:
                self.stack.append(arg)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name == "STOP":
                return self.stack.pop()
            elif (do := _DOES.get(name)) is not None:
                do(self, arg)
            else:
                raise UnsafePickle(f"refused: opcode {name} is not plain data")
        raise UnsafePickle("damaged or cut pickle: no end")

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def push(self, found: Any) -> None:
        self.stack.append(found)

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def put(self, at: Any) -> None:
        self.memo[at] = self.stack[-1]

    def tuple_of(self, n: int) -> None:
        if len(self.stack) < n:
            raise UnsafePickle("damaged or cut pickle: too short a stack")
        self.stack[-n:] = [tuple(self.stack[-n:])]

    def append(self, items: list[Any]) -> None:
        _of(list, self.stack[-1]).extend(items)

    def set_items(self, items: list[Any]) -> None:
        _of(dict, self.stack[-1]).update(_pairs(items))

    def last(self, n: int) -> list[Any]:
        items = self.stack[-n:]
        del self.stack[-n:]
        return items


def _of(kind: type, found: Any) -> Any:
    if type(found) is not kind:
        raise UnsafePickle(f"damaged or cut pickle: no {kind.__name__} where one is filled")
    return found


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(items) % 2:
        raise UnsafePickle("damaged or cut pickle: a key without a value")
    for key in items[::2]:
        if type(key) not in _KEYS:
            raise UnsafePickle("refused: a key that is no plain value")
    return zip(items[::2], items[1::2], strict=True)


_DOES: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": lambda m, _: m.since_mark().clear(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "LIST": lambda m, _: m.push(m.since_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "DICT": lambda m, _: m.push(dict(_pairs(m.since_mark()))),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "APPEND": lambda m, _: m.append(m.last(1)),
    "APPENDS": lambda m, _: m.append(m.since_mark()),
    "SETITEM": lambda m, _: m.set_items(m.last(2)),
    "SETITEMS": lambda m, _: m.set_items(m.since_mark()),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GET": lambda m, at: m.push(m.memo[at]),
    "BINGET": lambda m, at: m.push(m.memo[at]),
    "LONG_BINGET": lambda m, at: m.push(m.memo[at]),
}


def _check_size(root: object) -> None:
    """Refuse what is deeper than `MAX_DEPTH`, holds itself, or has more than `MAX_NODES` where sharing is undone."""
    sizes: dict[int, int] = {}  # of containers that are done
    open_ones: set[int] = set()
    path: list[tuple[object, Iterator[object]]] = []

    def enter(found: object) -> None:
        if len(path) >= MAX_DEPTH:
            raise UnsafePickle(f"refused: nested more than {MAX_DEPTH} deep")
        sizes[id(found)] = 1
        open_ones.add(id(found))
        path.append((found, iter(found.values() if isinstance(found, dict) else found)))  # type: ignore[call-overload]

    if isinstance(root, dict | list | tuple):
        enter(root)
    while path:
        here, rest = path[-1]
        for child in rest:
            if not isinstance(child, dict | list | tuple):
                sizes[id(here)] += 1
            elif id(child) in open_ones:
                raise UnsafePickle("refused: a container that holds itself")
            elif id(child) in sizes:
                sizes[id(here)] += sizes[id(child)]
            else:
                enter(child)
                break
        else:
            path.pop()
            open_ones.discard(id(here))
            if path:
                sizes[id(path[-1][0])] += sizes[id(here)]
        if sizes[id(here)] > MAX_NODES:
            raise UnsafePickle(f"refused: more than {MAX_NODES} values where shared ones are counted at every place")
