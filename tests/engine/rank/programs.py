"""What the members of a group do in the tests of the collectives."""

import os
import signal
import time
from typing import Any

import torch

from closeranks.engine.rank.collectives import Group


def seeded(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The tensor that `rank` brings along, computable by everybody."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.randn(shape, generator=generator) * 10 ** (rank % 3)).to(dtype)


def sums(group: Group, shapes: list[tuple[int, ...]], dtype: str) -> list[bytes]:
    """The bytes of every reduced tensor."""
    kind = getattr(torch, dtype)
    found = []
    for salt, shape in enumerate(shapes):
        t = seeded(group.rank, shape, kind, salt)
        group.all_reduce(t)
        found.append(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found


def uneven(group: Group, rows: int, width: int) -> Any:
    """Gather [rows, width + rank] and broadcast what rank 0 got."""
    own = seeded(group.rank, (rows, width + group.rank), torch.float32)
    parts = group.gather(own)
    total = torch.zeros(1, dtype=torch.int64)
    if parts is not None:
        for r, part in enumerate(parts):
            if not torch.equal(part, seeded(r, (rows, width + r), torch.float32)):
                return f"part {r} differs"
        total[0] = sum(part.numel() for part in parts)
    group.broadcast(total)
    return int(total), group.chain


def mixed(group: Group, rounds: int) -> int:
    """Many small operations of all kinds in one order; the chain of all of them."""
    for step in range(rounds):
        group.begin(step)
        t = torch.full((1 + step % 7, 8), float(group.rank + step))
        group.all_reduce(t)
        assert (t == sum(range(group.size)) + group.size * step).all()
        parts = group.gather(torch.full((2, 3), group.rank))
        assert parts is None or [int(p[0, 0]) for p in parts] == list(range(group.size))
        ids = torch.tensor([step, step + 1]) if group.rank == 0 else torch.zeros(2, dtype=torch.int64)
        group.broadcast(ids)
        assert ids.tolist() == [step, step + 1]
    return group.chain


def odd_one(group: Group, how: str) -> str:
    """After two good operations the last rank does something else than the others."""
    odd = group.rank == group.size - 1
    t = torch.ones(4, 16)
    group.all_reduce(t)
    group.broadcast(t)
    group.begin(7)
    if how == "size":
        group.all_reduce(torch.ones(2, 16) if odd else torch.ones(4, 16))
    elif how == "type":
        group.all_reduce(torch.ones(4, 16, dtype=torch.float64) if odd else torch.ones(4, 32))
    elif how == "kind":
        group.broadcast(t) if odd else group.all_reduce(t)
    elif how == "skip":
        if not odd:
            group.all_reduce(torch.ones(4, 16))
        group.all_reduce(torch.ones(4, 16))
        group.begin(8)
        group.all_reduce(torch.ones(4, 16))
    elif how == "step":
        group.begin(8 if odd else 7)
        group.all_reduce(torch.ones(4, 16))
    elif how == "rows":
        group.gather(torch.ones(3, 4) if odd else torch.ones(4, 3))
    elif how == "large":
        group.all_reduce(torch.ones(4, 1 << 20) if odd else torch.ones(3, 1 << 20))
    return "went on"


def missing(group: Group, how: str) -> str:
    """The last rank is not there for the second operation."""
    t = torch.ones(8)
    group.all_reduce(t)
    if group.rank == group.size - 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            return "left"
    group.all_reduce(t)
    return "went on"


def slow(group: Group, seconds: float) -> int:
    """The last rank takes longer than the deadline, but shows progress all the while."""
    if group.rank == group.size - 1:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            group.tick()
    t = torch.ones(8)
    group.all_reduce(t)
    return int(t[0])


def cpu_while_waiting(group: Group, seconds: float) -> float:
    """CPU seconds that a rank spends while it waits for another for `seconds`."""
    t = torch.ones(8)
    group.all_reduce(t)
    if group.rank == 0:
        time.sleep(seconds)
    before = time.process_time()
    group.all_reduce(t)
    return time.process_time() - before
