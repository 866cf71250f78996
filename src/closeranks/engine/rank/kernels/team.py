"""Compiled loops on torch's own OpenMP threads.

numba's `parallel=True` would start a second pool of threads that spins against torch's on the same cores. Here a
compiled function is handed to the `GOMP_parallel` of the OpenMP runtime that torch already uses: one pool, one place
that says how many threads there are. A job takes one argument, the address of an int64 array with all it needs.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""No `nnan`, `ninf`: a broken value must stay visible."""

Args = npt.NDArray[np.int64]


@cache
def runtime() -> ctypes.CDLL | None:
    """The GNU-compatible OpenMP runtime that torch has loaded into this process, or None."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "omp" in line and ".so" in line}
    for path in sorted(p for p in paths if "torch" in p) or sorted(paths):
        library = ctypes.CDLL(path)
        if all(hasattr(library, name) for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num")):
            for name in ("GOMP_barrier", "omp_get_thread_num"):
                address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                llvmlite.binding.add_symbol(name, address)
            return library
    return None


barrier = types.ExternalFunction("GOMP_barrier", types.void())
thread_num = types.ExternalFunction("omp_get_thread_num", types.int32())


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """An integer as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` (one dimension, contiguous): a hint, harmless out of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.bitcast(builder.gep(view.data, [args[1]]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *[ir.IntType(32)] * 3])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, near, data = (ir.Constant(ir.IntType(32), n) for n in (0, 3, 1))
        builder.call(function, [place, read, near, data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


def compiled(function: Callable[[int], None]) -> int:
    """Compile `function(address)` (from the on-disk cache if it is there); returns the machine code's address."""
    if runtime() is None:
        raise NumbaError("no GNU-compatible OpenMP runtime in this process")
    job = cfunc(types.void(types.int64), cache=True, fastmath=FAST, error_model="numpy")(function)
    _kept.append(job)
    address: int = job.address
    return address


_kept: list[Any] = []
"""Compiled jobs: their code lives as long as they do."""

_direct = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Job:
    """A compiled function, run by `threads` threads or by the caller alone. The GIL is free meanwhile."""

    def __init__(self, function: Callable[[int], None], threads: int) -> None:
        library = runtime()
        assert library is not None
        self.code = compiled(function)
        self.threads = threads
        self.alone = _direct(self.code)
        self.parallel = library.GOMP_parallel
        self.parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self.parallel.restype = None

    def __call__(self, args: Args, share: bool) -> None:
        """`args[0]` is set to the number of threads that take part; `share`: more than one."""
        if share and self.threads > 1:
            args[0] = self.threads
            self.parallel(self.code, args.ctypes.data, self.threads, 0)
        else:
            args[0] = 1
            self.alone(args.ctypes.data)


__all__ = ["Args", "Job", "barrier", "carray", "pointer", "prefetch", "runtime", "thread_num"]
