"""Collectives of one host through shared memory: one synchronisation for each, whatever its kind.

Every rank owns a head and two slots in one shared segment. Operation number s uses slot s % 2: a rank writes its bytes
and its message head there, publishes s, and waits until all others have published s. It may overwrite that slot at
s + 2, because by then it has seen everybody publish s + 1, which they do after they have read s. A message larger than
a slot goes in pieces, each a full operation with its own number.

Waiting spins for some microseconds (yielding the core), then sleeps on the awaited rank's published number (futex).
It ends in a fault when the awaited rank's progress word has stood still for the deadline; a slow rank that advances is
waited for. Order of stores as seen by other cores is that of x86.
"""

import ctypes
import mmap
import os
import struct
import time

import torch

from . import futex
from .base import DTYPES, OPS, CollectiveTimeout, chained, described, mismatch, reduce_into, rows_of

HEAD_WORDS = 64
"""64-bit words of a rank's head: 0 published number, 1 progress; from 16 on one message head of 8 words per slot."""
_PUBLISHED, _PROGRESS, _MESSAGES, _MESSAGE_WORDS = 0, 1, 16, 8
_HEAD = struct.Struct("@7q")
_HEAD_OFFSETS = tuple((_MESSAGES + slot * _MESSAGE_WORDS) * 8 for slot in range(2))
SLOT_BYTES = 8 << 20
SPLIT_BYTES = 128 << 10
"""From this size on, three or more ranks sum a part each."""
SPIN_S = 40e-6
_SLICE_S = 0.2


def segment_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of the shared segment of a group."""
    return size * (HEAD_WORDS * 8 + 2 * slot_bytes)


class Shm:
    """A group of `size` ranks over the shared segment `fd` (see `rendezvous`), which all of them map.

    Raises:
        OSError: the segment cannot be mapped.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        epoch: int,
        deadline_s: float,
        slot_bytes: int = SLOT_BYTES,
        spin_s: float | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._spin_s = (
            spin_s if spin_s is not None else (SPIN_S if size <= len(os.sched_getaffinity(0)) else SPIN_S / 4)
        )
        self._slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, segment_bytes(size, slot_bytes))
        heads_bytes = size * HEAD_WORDS * 8
        whole = memoryview(self._map)
        self._heads = [whole[r * HEAD_WORDS * 8 : (r + 1) * HEAD_WORDS * 8].cast("q") for r in range(size)]
        raw = torch.frombuffer(self._map, dtype=torch.uint8)[heads_bytes:].view(size, 2, slot_bytes)
        self._slots = {dtype: raw.view(dtype) for dtype in DTYPES}
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._starts = [r * HEAD_WORDS * 8 for r in range(size)]
        self._words = [base + r * HEAD_WORDS * 8 + _PUBLISHED * 8 for r in range(size)]
        self._wake = futex.Waker(self._words[rank])
        self._own = self._heads[rank]
        self._others = [r for r in range(size) if r != rank]
        self._sequence = 0
        self._step = 0
        self._chain = chained(0, epoch)

    @property
    def ticks(self) -> int:
        return self._own[_PROGRESS]

    @property
    def chain(self) -> int:
        return self._chain

    def tick(self) -> None:
        self._own[_PROGRESS] += 1

    def begin(self, step: int) -> None:
        self._step = step
        self.tick()

    def all_reduce(self, t: torch.Tensor) -> None:
        flat = t.view(-1)
        for start, count in self._pieces(flat):
            piece = flat[start : start + count]
            slot, _ = self._exchange("all_reduce", t.dtype, piece, 1, t.nbytes)
            whole = self._slots[t.dtype]
            if self.size > 2 and piece.nbytes >= SPLIT_BYTES:
                self._reduce_split(piece, whole, slot, t.nbytes)
            else:
                reduce_into(piece, [whole[r, slot, :count] for r in range(self.size)])

    def _reduce_split(self, piece: torch.Tensor, whole: torch.Tensor, slot: int, size: int) -> None:
        """Each rank sums one part of what all have published and publishes that: fewer bytes for one more wait."""
        cuts = [r * piece.numel() // self.size for r in range(self.size + 1)]
        low, high = cuts[self.rank], cuts[self.rank + 1]
        # The other slot is free: everybody published `slot` after having read what lay there.
        reduce_into(whole[self.rank, 1 - slot, low:high], [whole[r, slot, low:high] for r in range(self.size)])
        self._exchange("all_reduce", piece.dtype, None, 1, size)
        for r in range(self.size):
            piece[cuts[r] : cuts[r + 1]].copy_(whole[r, 1 - slot, cuts[r] : cuts[r + 1]])

    def broadcast(self, t: torch.Tensor) -> None:
        flat = t.view(-1)
        for start, count in self._pieces(flat):
            piece = flat[start : start + count]
            slot, _ = self._exchange("broadcast", t.dtype, piece if self.rank == 0 else None, 1, t.nbytes)
            if self.rank:
                piece.copy_(self._slots[t.dtype][0, slot, :count])

    def gather(self, t: torch.Tensor) -> list[torch.Tensor] | None:
        flat = t.contiguous().view(-1)
        rows = rows_of(t)
        limit = self._slot_bytes // t.element_size()
        parts: list[torch.Tensor] = []
        counts: list[int] = []
        done = 0
        while not counts or done < max(counts):
            piece = flat[done : done + limit]
            slot, heads = self._exchange("gather", t.dtype, piece if self.rank else None, rows, flat.nbytes)
            if not counts:
                counts = [head[6] // t.element_size() for head in heads]
                if self.rank == 0:
                    parts = [flat, *(torch.empty(count, dtype=t.dtype) for count in counts[1:])]
            if self.rank == 0:
                for r, part in enumerate(parts[1:], start=1):
                    here = max(0, min(limit, counts[r] - done))
                    part[done : done + here].copy_(self._slots[t.dtype][r, slot, :here])
            done += limit
        if self.rank:
            return None
        return [part.view(*t.shape[:-1], part.numel() // rows) for part in parts]

    def close(self) -> None:
        """Leave. The mapping goes with the process: views of it may still be held."""

    def _pieces(self, flat: torch.Tensor) -> list[tuple[int, int]]:
        """(first element, count) of each message; one empty message for an empty tensor."""
        limit = self._slot_bytes // flat.element_size()
        total = flat.numel()
        if total <= limit:
            return [(0, total)]
        return [(start, min(limit, total - start)) for start in range(0, total, limit)]

    def _exchange(
        self, op: str, dtype: torch.dtype, piece: torch.Tensor | None, rows: int, size: int
    ) -> tuple[int, list[tuple[int, ...]]]:
        """Publish one message, wait for all others' and compare the heads. Returns the slot and the heads by rank.

        `size` is that of the whole tensor, also where `piece` is a part of it.
        """
        sequence = self._sequence + 1
        self._sequence = sequence
        slot = sequence % 2
        if piece is not None and piece.numel():
            self._slots[dtype][self.rank, slot, : piece.numel()].copy_(piece)
        at = _HEAD_OFFSETS[slot]
        mine = (self._epoch, self._step, sequence, OPS[op], DTYPES[dtype], rows, size)
        _HEAD.pack_into(self._map, self._starts[self.rank] + at, *mine)
        own = self._own
        own[_PUBLISHED] = sequence
        self._wake()
        for other in self._others:
            self._await(other, sequence, mine)
        heads = [_HEAD.unpack_from(self._map, start + at) for start in self._starts]
        fault = mismatch(self.rank, heads)
        if fault is not None:
            raise fault
        self._chain = chained(self._chain, *mine[1:6], 0 if op == "gather" else size)
        own[_PROGRESS] += 1
        return slot, heads

    def _await(self, other: int, sequence: int, mine: tuple[int, ...]) -> None:
        """Return when `other` has published `sequence`.

        Raises:
            CollectiveTimeout: its progress stood still for the deadline.
        """
        head = self._heads[other]
        if head[_PUBLISHED] >= sequence:
            return
        now = time.monotonic()
        spin_until = now + self._spin_s
        while head[_PUBLISHED] < sequence and time.monotonic() < spin_until:
            os.sched_yield()
        progress, since = head[_PROGRESS], now
        while (published := head[_PUBLISHED]) < sequence:
            futex.wait(self._words[other], published, _SLICE_S)
            now = time.monotonic()
            if head[_PROGRESS] != progress:
                progress, since = head[_PROGRESS], now
            elif now - since > self._deadline_s and head[_PUBLISHED] < sequence:
                raise CollectiveTimeout(
                    self.rank,
                    f"rank {other} did not advance for {now - since:.1f} s (it published #{published}); "
                    f"waited at {described(mine)}",
                )
