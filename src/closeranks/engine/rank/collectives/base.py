"""What the ranks of a group do together, and the faults of doing it. `Solo` is the group of one.

The operations of a step follow from the step alone; which ones run, in which order and size, is the same on every
rank. Each message says what it is (epoch, step, sequence number, operation, type, size) and each rank compares all of
them before it uses a byte: ranks that disagree fail, all of them, and never take one message for another.
"""

import math
from typing import Protocol

import torch


class CollectiveFault(Exception):
    """Base of the faults below; `rank` is the one that raised it. Any of them ends the epoch."""

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(f"rank {rank}: {detail}")
        self.rank = rank


class CollectiveTimeout(CollectiveFault):
    """A rank was waited for and did not advance within the deadline."""


class CollectiveMismatch(CollectiveFault):
    """Ranks are not at the same operation, or not of the same size, type, step or epoch."""


class CollectiveBroken(CollectiveFault):
    """The connection to a rank failed."""


class Group(Protocol):
    """The ranks of one engine. Not thread-safe: the step loop's thread only (`ticks` may be read from any thread)."""

    rank: int
    size: int

    @property
    def ticks(self) -> int:
        """Progress of this rank: layers and collectives done. It only grows."""
        ...

    @property
    def chain(self) -> int:
        """63-bit hash over all operations so far (epoch, step, order, kind, type, size): equal on ranks in step."""
        ...

    def tick(self) -> None:
        """Note progress outside of a collective (a layer computed), so that nobody takes this rank for stuck."""
        ...

    def begin(self, step: int) -> None:
        """The operations that follow belong to this step."""
        ...

    def all_reduce(self, t: torch.Tensor) -> None:
        """Sum over the ranks, in place, added in rank order: the same bits on every rank. `t` is contiguous."""
        ...

    def gather(self, t: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's `t` in rank order on rank 0, None elsewhere. `t` is [rows.., width]; widths may differ."""
        ...

    def broadcast(self, t: torch.Tensor) -> None:
        """Overwrite `t` (contiguous) with rank 0's."""
        ...

    def close(self) -> None:
        """Leave the group. Never waits."""
        ...


OPS = {"all_reduce": 1, "gather": 2, "broadcast": 3}
OP_NAMES = {number: name for name, number in OPS.items()}
DTYPES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
    torch.float64: 7,
}
DTYPE_NAMES = {number: str(dtype).removeprefix("torch.") for dtype, number in DTYPES.items()}

_MASK = (1 << 63) - 1


def chained(chain: int, *words: int) -> int:
    """Next value of an operation chain (FNV-1a by words, 63 bit)."""
    for word in words:
        chain = ((chain ^ word) * 0x100000001B3) & _MASK
    return chain


def described(head: tuple[int, ...]) -> str:
    """A message head (epoch, step, sequence, operation, type, rows, bytes) in words."""
    epoch, step, sequence, op, dtype, rows, size = head
    return (
        f"epoch {epoch} step {step} #{sequence} {OP_NAMES.get(op, f'operation {op}')} of {size} B "
        f"({rows} rows {DTYPE_NAMES.get(dtype, f'type {dtype}')})"
    )


def mismatch(rank: int, heads: list[tuple[int, ...]]) -> CollectiveMismatch | None:
    """Compare the heads of one exchange, by rank; None if they agree. Only a gather's bytes may differ."""
    gather = OPS["gather"]
    first = heads[0]
    for other, head in enumerate(heads):
        alike = head == first or (head[3] == gather and head[:6] == first[:6])
        if not alike:
            told = "; ".join(f"rank {r} is at {described(h)}" for r, h in enumerate(heads) if r in (0, other, rank))
            return CollectiveMismatch(rank, f"ranks are not at the same operation: {told}")
    return None


def rows_of(t: torch.Tensor) -> int:
    """Product of all dimensions but the last.

    Raises:
        ValueError: there is no row, so the others' widths could not be told.
    """
    rows = math.prod(t.shape[:-1])
    if t.dim() < 2 or rows < 1:
        raise ValueError(f"a tensor of shape {tuple(t.shape)} cannot be gathered: it has no rows")
    return rows


def reduce_into(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Sum of equally shaped parts, added in order; half-precision types are added in float32 and rounded once."""
    if out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total)
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


class Solo:
    """A group of one: every operation is done before it begins."""

    def __init__(self, epoch: int = 0) -> None:
        self.rank = 0
        self.size = 1
        self._ticks = 0
        self._chain = chained(0, epoch)

    @property
    def ticks(self) -> int:
        return self._ticks

    @property
    def chain(self) -> int:
        return self._chain

    def tick(self) -> None:
        self._ticks += 1

    def begin(self, step: int) -> None:
        self._chain = chained(self._chain, step)
        self._ticks += 1

    def all_reduce(self, t: torch.Tensor) -> None:
        self._ticks += 1

    def gather(self, t: torch.Tensor) -> list[torch.Tensor] | None:
        self._ticks += 1
        return [t]

    def broadcast(self, t: torch.Tensor) -> None:
        self._ticks += 1

    def close(self) -> None:
        """Nothing to leave."""
