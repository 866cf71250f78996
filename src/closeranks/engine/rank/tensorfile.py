"""The safetensors format, read by mapping and written tensor by tensor; needs numpy only.

A file is: 8 bytes little-endian header size, a JSON header `{name: {dtype, shape, data_offsets}}`, the raw values.
bfloat16, which numpy lacks, travels as uint16.
"""

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
}
HEADER_LIMIT = 100 << 20


class TensorFile:
    """A mapped file. `read(name)` is a view of the mapping: bytes come from disk when touched, shared by processes.

    Raises:
        ValueError: not a sound safetensors file; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            head = int.from_bytes(file.read(8), "little")
            if not 2 <= head <= min(size - 8, HEADER_LIMIT):
                raise ValueError(f"{path}: not a safetensors file (header of {head} bytes in a file of {size})")
            try:
                header: dict[str, Any] = json.loads(file.read(head))
                header.pop("__metadata__", None)
                entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {
                    name: (
                        str(e["dtype"]),
                        tuple(int(n) for n in e["shape"]),
                        int(e["data_offsets"][0]),
                        int(e["data_offsets"][1]),
                    )
                    for name, e in header.items()
                }
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
                raise ValueError(f"{path}: damaged safetensors header: {error}") from error
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._base = 8 + head
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for name, (dtype, shape, start, stop) in entries.items():
            if dtype not in DTYPES:
                raise ValueError(f"{path}: tensor {name} has dtype {dtype}; readable are {', '.join(DTYPES)}")
            if stop - start != math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize:
                raise ValueError(f"{path}: tensor {name}: size and shape disagree")
            if not 0 <= start <= stop <= size - self._base:
                raise ValueError(f"{path}: tensor {name} lies beyond the end: the file is cut short")
            self._entries[name] = (dtype, shape, start, stop)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def dtype(self, name: str) -> str:
        """The file's name of a tensor's type, e.g. `BF16`."""
        return self._entries[name][0]

    def read(self, name: str) -> Array:
        """A tensor as an array over the mapping (copy on write); `KeyError` if there is none of this name."""
        dtype, shape, start, _ = self._entries[name]
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(self._map, dtype=DTYPES[dtype], count=count, offset=self._base + start)
        return flat.reshape(shape)


class TensorWriter:
    """Writes tensors whose names, types and shapes are known beforehand, in that order, without holding them all."""

    def __init__(self, file: BinaryIO, entries: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {}
        at = 0
        for name, (dtype, shape) in entries.items():
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(DTYPES[dtype]).itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)  # values start aligned
        self._file = file
        self._due = list(entries.items())[::-1]
        file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: Array) -> None:
        """The next tensor; `ValueError` if another one is due."""
        due, (dtype, shape) = self._due.pop()
        if (name, values.shape, values.dtype) != (due, shape, np.dtype(DTYPES[dtype])):
            raise ValueError(f"tensor {name} {values.shape} {values.dtype} written where {due} {shape} {dtype} is due")
        self._file.write(raw(values))


def raw(values: Array) -> memoryview:
    """The bytes of an array in C order."""
    return np.ascontiguousarray(values).data.cast("B")


def to_float32(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Widen a stored tensor (`dtype` as in the file) to float32, exactly."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Array:
    """Narrow to `F32`, `F16` or `BF16` (round to nearest even)."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return values.astype(DTYPES[dtype], copy=False)
