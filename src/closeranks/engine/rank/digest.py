"""The running digest of what a rank applied and what came of it; equal on all ranks of an engine, step by step."""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from closeranks.protocol import Row

_HEAD = struct.Struct("<QQQ")
_ROW = struct.Struct("<qqqqq")


class Digest:
    """A chain of xxh3_64 over the steps; `value` after step n stands for all steps up to n. It holds no floats."""

    def __init__(self, epoch: int) -> None:
        self.value: int = xxh3_64(_HEAD.pack(0, epoch, 0)).intdigest()

    def add(
        self,
        n: int,
        rows: Sequence[Row],
        tables: Sequence[npt.ArrayLike],
        tokens: Sequence[int],
        operations: int,
    ) -> int:
        """Add step `n`: its rows with each row's whole page table as held by this rank, then the sampled tokens.

        `operations` is the group's chain: ranks that went through other collectives are not equal either.
        """
        state = xxh3_64(_HEAD.pack(self.value, n, operations))
        for row, table in zip(rows, tables, strict=True):
            pages = np.ascontiguousarray(table, dtype=np.int32)
            state.update(_ROW.pack(row.slot, row.start, row.count, row.sample, pages.size))
            state.update(pages.data)
        state.update(np.asarray(tokens, dtype=np.int64).data)
        self.value = state.intdigest()
        return self.value
