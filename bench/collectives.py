#!/usr/bin/env python3
"""Collectives of a step on one host: shared memory beside gloo, checked (ours) and bare.

    python bench/collectives.py [--worlds 2 4] [--repeats 200]

`shm` and `gloo` are the groups that ranks use: every message carries its head and is compared. `bare gloo` is
torch.distributed alone. Sizes are those of SmolLM2-135M: the hidden states of 1, 64 and 512 tokens (all_reduce), the
logits of 64 rows (gather), 64 token ids (broadcast). Times are rank 0's medians. The last line printed is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from closeranks.engine.rank.collectives import join

KINDS = ["shm", "gloo", "bare gloo"]
OPS = ["all_reduce 1x576", "all_reduce 64x576", "all_reduce 512x576", "gather 64x49152", "broadcast 64"]


class Bare:
    """torch.distributed with nothing around it."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/bare", rank=rank, world_size=world)
        self.rank, self.world = rank, world

    def all_reduce(self, t: torch.Tensor) -> None:
        dist.all_reduce(t)

    def broadcast(self, t: torch.Tensor) -> None:
        dist.broadcast(t, 0)

    def gather(self, t: torch.Tensor) -> None:
        dist.gather(t, [torch.empty_like(t) for _ in range(self.world)] if self.rank == 0 else None, 0)


def work(group: Any, world: int, op: str) -> Callable[[], Any]:
    name, _, shape = op.partition(" ")
    sizes = [int(n) for n in shape.split("x")]
    if name == "gather":
        t = torch.ones(sizes[0], sizes[1] // world)
        return lambda: group.gather(t)
    if name == "broadcast":
        ids = torch.zeros(sizes, dtype=torch.int64)
        return lambda: group.broadcast(ids)
    t = torch.zeros(sizes)
    return lambda: group.all_reduce(t)


def member(kind: str, rank: int, world: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    if kind == "bare gloo":
        group: Any = Bare(folder, rank, world)
    else:
        group = join(kind, "cpu", folder, rank, world, 1, 1, deadline_s=60, join_deadline_s=60)
    found = {}
    for op in OPS:
        call = work(group, world, op)
        times = []
        for i in range(repeats + 5):
            begun = time.perf_counter()
            call()
            if i >= 5:
                times.append(time.perf_counter() - begun)
        times.sort()
        found[op] = (statistics.median(times), times[int(len(times) * 0.99)])
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        kind, rank, world, folder = args.member
        member(kind, int(rank), int(world), folder, args.repeats)
    rows = []
    for world in args.worlds:
        found: dict[str, dict[str, list[float]]] = {}
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--repeats", str(args.repeats), "--member", kind]
                members = [
                    subprocess.Popen([*command, str(rank), str(world), folder], stdout=subprocess.PIPE, text=True)
                    for rank in range(world)
                ]
                said = [process.communicate(timeout=300)[0] for process in members]
            found[kind] = json.loads(said[0])
        print(f"world {world}: p50 / p99 µs")
        for op in OPS:
            cells = [f"{found[kind][op][0] * 1e6:9.0f} / {found[kind][op][1] * 1e6:7.0f}" for kind in KINDS]
            print(f"  {op:<20}" + "".join(f"{kind:>11} {cell}" for kind, cell in zip(KINDS, cells, strict=True)))
            rows.append({"world": world, "op": op} | {kind: found[kind][op][0] for kind in KINDS})
    print(json.dumps({"schema": 1, "rows": rows}))


if __name__ == "__main__":
    main()
