"""Loading a pickle that a stranger wrote: plain containers and scalars only, bounded in size, depth and count.

The flight recorder of torch writes pickles. `pickle.load` on one runs whatever its author chose. This loader refuses
every opcode that could name a class or call something before the first byte is interpreted as an object.
"""

import io
import pickle
import pickletools

MAX_BYTES = 256 << 20
MAX_OPS = 20_000_000
# Opcodes that build None, bools, numbers, strings, bytes, lists, tuples, dicts and sets, and move them about.
_ALLOWED = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "DUP",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "EMPTY_LIST",
        "APPEND",
        "APPENDS",
        "LIST",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_SET",
        "ADDITEMS",
        "FROZENSET",
        "PUT",
        "BINPUT",
        "LONG_BINPUT",
        "GET",
        "BINGET",
        "LONG_BINGET",
        "MEMOIZE",
    ]
)


class UnsafePickle(ValueError):
    """The pickle is damaged, too large, or holds more than plain data. The message says which."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        raise UnsafePickle(f"refused: the pickle names {module_name}.{global_name}; plain data only")

    def persistent_load(self, pid: object) -> object:
        raise UnsafePickle("refused: the pickle holds a persistent reference")


def load_plain(data: bytes) -> object:
    """The plain object in `data`. Raises `UnsafePickle` for anything else; never runs code of the pickle's author."""
    if len(data) > MAX_BYTES:
        raise UnsafePickle(f"refused: {len(data)} bytes, more than {MAX_BYTES}")
    try:
        for count, (opcode, _arg, _pos) in enumerate(pickletools.genops(data)):
            if opcode.name not in _ALLOWED:
                raise UnsafePickle(f"refused: opcode {opcode.name} is not plain data")
            if count > MAX_OPS:
                raise UnsafePickle(f"refused: more than {MAX_OPS} opcodes")
    except UnsafePickle:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, EOFError, RecursionError) as e:
        raise UnsafePickle(f"damaged or cut pickle: {type(e).__name__}") from e
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except UnsafePickle:
        raise
    except (pickle.UnpicklingError, ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError) as e:
        raise UnsafePickle(f"damaged or cut pickle: {type(e).__name__}") from e
    except (MemoryError, OverflowError, RecursionError) as e:
        raise UnsafePickle(f"refused: {type(e).__name__} while loading") from e
