"""Collectives through torch.distributed: gloo on several hosts, NCCL on GPUs.

gloo takes a message of another size or meaning for the expected one, without a word. So on gloo everything is an
all-gather of frames of one fixed size, head first: small messages fit into the first frame, larger ones follow when the
heads have been compared and all sizes are known. Sums are made locally in rank order.

NCCL sums and sends on the device without frames; what is caught there late, by the operation chain in the digest, is
caught before a token leaves the engine. Its waits are bounded by the group's time-out and the leader's deadline.
"""

import struct
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .base import (
    DTYPES,
    OPS,
    CollectiveBroken,
    CollectiveFault,
    CollectiveTimeout,
    chained,
    described,
    mismatch,
    reduce_into,
    rows_of,
)

FRAME_BYTES = 4096
_HEAD = struct.Struct("@8q")


class Distributed:
    """A group over torch.distributed; `kind` is `gloo` or `nccl`. See `base.Group`.

    Raises:
        CollectiveTimeout: not all ranks came to `rendezvous` (host:port of rank 0, or a folder on one host).
    """

    def __init__(
        self,
        kind: str,
        rendezvous: str,
        rank: int,
        size: int,
        epoch: int,
        instance: int,
        *,
        deadline_s: float,
        join_deadline_s: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self._epoch = epoch
        self._native = kind == "nccl"
        self._sequence = 0
        self._step = 0
        self._ticks = 0
        self._chain = chained(0, epoch)
        self._deadline_s = deadline_s
        if "/" in rendezvous:
            Path(rendezvous).mkdir(mode=0o700, parents=True, exist_ok=True)
            where = f"file://{Path(rendezvous).absolute() / f'group-{epoch}-{instance:x}'}"
        else:
            where = f"tcp://{rendezvous}"
        try:
            dist.init_process_group(
                kind, init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=join_deadline_s)
            )
        except RuntimeError as error:  # torch's DistError and its time-outs are RuntimeErrors
            raise CollectiveTimeout(rank, f"the group of {size} did not meet at {where}: {error}") from error
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s))
        self._mine = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._frames = torch.zeros(size * FRAME_BYTES, dtype=torch.uint8)
        self._room = FRAME_BYTES - _HEAD.size

    @property
    def ticks(self) -> int:
        return self._ticks

    @property
    def chain(self) -> int:
        return self._chain

    def tick(self) -> None:
        self._ticks += 1

    def begin(self, step: int) -> None:
        self._step = step
        self._ticks += 1

    def all_reduce(self, t: torch.Tensor) -> None:
        if self._native:
            self._note("all_reduce", t, 1, t.nbytes)
            dist.all_reduce(t)
            return
        parts = self._exchange("all_reduce", t.view(-1), 1, t.nbytes)
        reduce_into(t.view(-1), parts)

    def broadcast(self, t: torch.Tensor) -> None:
        if self._native:
            self._note("broadcast", t, 1, t.nbytes)
            dist.broadcast(t, 0)
            return
        parts = self._exchange("broadcast", t.view(-1), 1, t.nbytes)
        if self.rank:
            t.view(-1).copy_(parts[0])

    def gather(self, t: torch.Tensor) -> list[torch.Tensor] | None:
        rows = rows_of(t)
        if self._native:
            return self._gather_native(t, rows)
        parts = self._exchange("gather", t.contiguous().view(-1), rows, t.nbytes)
        if self.rank:
            return None
        return [part.view(*t.shape[:-1], part.numel() // rows) for part in parts]

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather_native(self, t: torch.Tensor, rows: int) -> list[torch.Tensor] | None:
        self._note("gather", t, rows, t.nbytes)
        width = torch.tensor([t.shape[-1]], device=t.device)
        widths = [torch.zeros_like(width) for _ in range(self.size)]
        dist.all_gather(widths, width)
        parts = [t.new_empty((*t.shape[:-1], int(w))) for w in widths]
        if self.rank:
            dist.send(t.contiguous(), 0)
            return None
        parts[0] = t
        for other in range(1, self.size):
            dist.recv(parts[other], other)
        return parts

    def _note(self, op: str, t: torch.Tensor, rows: int, size: int) -> tuple[int, ...]:
        self._sequence += 1
        head = (self._epoch, self._step, self._sequence, OPS[op], DTYPES[t.dtype], rows, size)
        self._chain = chained(self._chain, *head[1:6], 0 if op == "gather" else size)
        self._ticks += 1
        return head

    def _exchange(self, op: str, flat: torch.Tensor, rows: int, size: int) -> list[torch.Tensor]:
        """All ranks' messages, by rank, on every rank."""
        head = self._note(op, flat, rows, size)
        data = flat.view(torch.uint8) if size else flat.new_empty(0, dtype=torch.uint8)
        _HEAD.pack_into(self._mine.numpy().data, 0, *head, 0)
        first = min(size, self._room)
        self._mine[_HEAD.size : _HEAD.size + first] = data[:first]
        self._call(head, self._frames, self._mine)
        frames = self._frames.view(self.size, FRAME_BYTES)
        heads = [_HEAD.unpack_from(frames[r].numpy().data)[:7] for r in range(self.size)]
        fault = mismatch(self.rank, heads)
        if fault is not None:
            raise fault
        sizes = [h[6] for h in heads]
        rest = max(sizes) - self._room
        whole = [frames[r, _HEAD.size : _HEAD.size + min(sizes[r], self._room)].clone() for r in range(self.size)]
        if rest > 0:
            mine = torch.zeros(rest, dtype=torch.uint8)
            mine[: max(0, size - self._room)] = data[self._room :]
            others = torch.empty(self.size * rest, dtype=torch.uint8)
            self._call(head, others, mine)
            tails = others.view(self.size, rest)
            whole = [torch.cat((whole[r], tails[r, : max(0, sizes[r] - self._room)])) for r in range(self.size)]
        self._ticks += 1
        return [part.view(flat.dtype) for part in whole]

    def _call(self, head: tuple[int, ...], out: torch.Tensor, mine: torch.Tensor) -> None:
        try:
            dist.all_gather_single(out, mine)
        except RuntimeError as error:
            text = str(error)
            kind: type[CollectiveFault] = CollectiveTimeout if "imed out" in text else CollectiveBroken
            raise kind(self.rank, f"{text}; waited at {described(head)}") from error
