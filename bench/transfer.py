#!/usr/bin/env python3
"""Hand-over of pages between two processes of this host: both backends beside bare NIXL with the same descriptors.

    python bench/transfer.py [--sizes 1 16 64 256] [--repeats 7] [--rounds 3] [--transport tcp]

`nixl` and `shm` are the transfer thread as a rank runs it: from handing over a `Send` to its `Sent`, share checksums
included. `bare nixl` is an agent as it comes (with its progress thread), from making the request to DONE; `bare polled`
the same without that thread. Pages are those of SmolLM2-135M in fp32 (16 tokens, 3 shares, 720 KiB), scattered, so that
each page is a descriptor. Each round starts new pairs of processes in turn. The last line printed is JSON.
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec
import numpy as np
import torch

from closeranks.engine.rank.planes import PageLayout, Pool
from closeranks.engine.rank.transfer import TransferThread, make
from closeranks.engine.rank.transfer.plan import pieces, routes
from closeranks.protocol import Memory, Peer, RoomId, Send, Sent, Step

LAYOUT = PageLayout(("k", "v"), 30, 3, 64, torch.float32)
PAGE_SIZE = 16
PAGE_BYTES = LAYOUT.share_bytes(PAGE_SIZE) * 3
KINDS = ["bare nixl", "bare polled", "nixl", "shm"]


class Bare:
    """NIXL with nothing around it."""

    def __init__(self, pool: Pool, name: str, thread: bool) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.pool, self.name, self.thread = pool, name, thread
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=thread, backends=["UCX"]))
        self.agent.register_memory([(pool.base, pool.nbytes, 0, "")], "DRAM")

    def memory(self) -> Memory:
        address = msgspec.msgpack.encode([self.name, self.agent.get_agent_metadata(), self.pool.base])
        return self.pool.memory("bare", address)

    def meet(self, memory: Memory) -> None:
        self.remote, metadata, self.base = msgspec.msgpack.decode(memory.address)
        self.agent.add_remote_agent(metadata)

    def write(self, peer: Peer, pages: list[tuple[int, int]]) -> float:
        plan = pieces(routes(self.pool.shares, self.pool.share_bytes, peer, "bare")[0], self.pool.page_bytes, pages)
        own = np.array([(self.pool.base + p.own, p.length, 0) for p in plan], dtype=np.uint64)
        theirs = np.array([(self.base + p.theirs, p.length, 0) for p in plan], dtype=np.uint64)
        agent = self.agent
        begun = time.perf_counter()
        request = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), self.remote
        )
        state = agent.transfer(request)
        while state == "PROC":
            called = time.perf_counter()
            state = agent.check_xfer_state(request)
            if state == "PROC" and time.perf_counter() - called < 50e-6:
                time.sleep(0.0003)
        taken = time.perf_counter() - begun
        agent.release_xfer_handle(request)
        if state != "DONE":
            raise RuntimeError(f"bare write ended as {state}")
        return taken

    def serve(self) -> None:
        while True:
            called = time.perf_counter()
            self.agent.get_new_notifs()
            if self.thread:
                time.sleep(1)
            elif time.perf_counter() - called < 50e-6:
                time.sleep(0.0003)


class Ours:
    """A rank's transfer thread."""

    def __init__(self, pool: Pool, name: str, kind: str) -> None:
        self.pool = pool
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.backend = make(kind, pool, name, "")
        self.thread = TransferThread(self.backend, pool, 1, self.notices.put, self.notices.put)
        self.thread.start()
        self.count = 0

    def memory(self) -> Memory:
        return self.pool.memory(self.backend.name, self.backend.address)

    def meet(self, memory: Memory) -> None:
        self.thread.meet([Peer("other", 1, [memory])])

    def write(self, peer: Peer, pages: list[tuple[int, int]]) -> float:
        self.count += 1
        begun = time.perf_counter()
        self.thread.submit(Step(1, 1, sends=[Send(self.count, RoomId(1, 1), 1, pages)]))
        sent = self.notices.get(timeout=120)
        taken = time.perf_counter() - begun
        if not isinstance(sent, Sent) or sent.error:
            raise RuntimeError(f"write ended as {sent}")
        return taken

    def serve(self) -> None:
        time.sleep(3600)


def side(kind: str, name: str, num_pages: int) -> Bare | Ours:
    pool = Pool(LAYOUT, num_pages, PAGE_SIZE)
    pool.tensor.fill_(1.0)
    return Bare(pool, name, kind == "bare nixl") if kind.startswith("bare") else Ours(pool, name, kind)


def child(kind: str, num_pages: int) -> None:
    """The target: prints its memory, takes the writer's, receives."""
    target = side(kind, "target", num_pages)
    sys.stdout.write(msgspec.msgpack.encode(target.memory()).hex() + "\n")
    sys.stdout.flush()
    target.meet(msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Memory))
    print("met", flush=True)
    target.serve()


def measure(kind: str, sizes: list[int], repeats: int) -> dict[int, list[float]]:
    """Seconds per write for each size in MiB."""
    num_pages = (max(sizes) << 20) // PAGE_BYTES + 1
    command = [sys.executable, __file__, "--target", kind, "--pages", str(num_pages)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            writer = side(kind, "writer", num_pages)
            memory = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=Memory)
            process.stdin.write(msgspec.msgpack.encode(writer.memory()).hex() + "\n")
            process.stdin.flush()
            process.stdout.readline()
            writer.meet(memory)
            peer = Peer("other", 1, [memory])
            order = list(range(num_pages))
            random.Random(1).shuffle(order)
            places = dict(enumerate(order))
            found: dict[int, list[float]] = {}
            for size in sizes:
                count = max(1, round((size << 20) / PAGE_BYTES))
                pages = [(2 * p % num_pages, places[p]) for p in range(count)]
                writer.write(peer, pages)
                found[size] = [writer.write(peer, pages) for _ in range(repeats)]
            return found
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256], help="MiB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", default="tcp", help="UCX_TLS; empty: UCX's choice")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    torch.set_num_threads(1)
    if args.target:
        child(args.target, args.pages)
    if args.measure:  # a process of its own, which leaves without NIXL's crash at exit
        print(json.dumps(measure(args.measure, args.sizes, args.repeats)), flush=True)
        os._exit(0)
    if args.transport:
        os.environ["UCX_TLS"] = args.transport
    taken: dict[str, dict[int, list[float]]] = {kind: {size: [] for size in args.sizes} for kind in args.kinds}
    for _ in range(args.rounds):
        for kind in args.kinds:
            command = [sys.executable, __file__, "--measure", kind, "--repeats", str(args.repeats), "--sizes"]
            done = subprocess.run([*command, *map(str, args.sizes)], stdout=subprocess.PIPE, text=True, check=True)
            for size, values in json.loads(done.stdout.splitlines()[-1]).items():
                taken[kind][int(size)] += values
    rows = []
    print(f"{'MiB':>5} {'descriptors':>11} " + " ".join(f"{kind:>20}" for kind in args.kinds) + "   ms, GB/s, of bare")
    for size in args.sizes:
        count = max(1, round((size << 20) / PAGE_BYTES))
        middle = {kind: statistics.median(taken[kind][size]) for kind in args.kinds}
        bare = min((middle[kind] for kind in args.kinds if kind.startswith("bare")), default=0.0)
        cells = [f"{v * 1e3:7.1f} {count * PAGE_BYTES / v / 1e9:5.2f} {bare / v:6.0%}" for v in middle.values()]
        print(f"{size:>5} {count:>11} " + " ".join(f"{cell:>20}" for cell in cells))
        rows.append({"mib": size, "descriptors": count, "seconds": middle})
    print(json.dumps({"schema": 1, "transport": args.transport, "rows": rows}))


if __name__ == "__main__":
    main()
