"""Control cost of a step: leader with stand-in ranks over real ipc sockets, beside ZeroMQ alone with the same bytes.

    python bench/leader_cost.py [--steps 300] [--rounds 3]

Per TP size and number of decode rows: CPU time of the leader's process per step (event, log, core, book, encode, send
to ranks and gateway), the round trip from the issue of a step to its agreement (all reports in, digests equal, rooms
advanced), the cycle from one issue to the next (without overlap: planning and encoding the next step included), and the
round trip of bare ZeroMQ: a ROUTER that sends the same step bytes to the same number of DEALER processes, each of which
answers with the same report bytes. Rounds of the two are interleaved; the figures are medians over rounds. Ranks are
processes that only decode the step and answer, so that no model stands between.
"""

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog
import zmq

from closeranks.engine.leader.settings import Settings
from closeranks.engine.leader.shell import Shell
from closeranks.engine.leader.steps import OpenStep
from closeranks.protocol import (
    Attach,
    Fingerprint,
    Joined,
    Memory,
    Output,
    Report,
    RoomId,
    Sampling,
    Step,
    Stop,
    Submit,
    Welcome,
    decode_from_engine,
    decode_to_rank,
    encode,
)

PAGE = 16
FINGERPRINT = Fingerprint(1, "w", "float32", "16", "t", "xxh3_64")


def rank_process(endpoint: str, rank: int) -> None:
    """Answers each step at once."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.identity = f"step:{rank}".encode()
    sock.connect(endpoint)
    memory = Memory("shm", rank, [rank], 60000, 4096, b"")
    sock.send(encode(Joined(1, rank, os.getpid(), FINGERPRINT, memory, 60000, PAGE, 100_000)))
    while True:
        message = decode_to_rank.decode(sock.recv())
        if isinstance(message, Step):
            tokens = [7] * sum(row.sample for row in message.rows) if rank == 0 else []
            sock.send(encode(Report(1, rank, message.n, message.n * 7919, tokens)))
        elif isinstance(message, Stop):
            return


def echo_process(endpoint: str, rank: int, reply: bytes) -> None:
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.identity = f"step:{rank}".encode()
    sock.connect(endpoint)
    sock.send(b"ready")
    while True:
        if sock.recv() == b"stop":
            return
        sock.send(reply)


class Measured(Shell):
    """A shell that notes when steps are issued and what its loop costs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.issued = 0.0
        self.trips: list[float] = []
        self.cycles: list[float] = []
        self.step_bytes = b""
        settle = self.leader.settle

        def measured(step: OpenStep) -> None:
            settle(step)
            if self.issued and step.rows:
                self.trips.append(time.perf_counter() - self.issued)

        self.leader.settle = measured  # type: ignore[method-assign]

    def to_ranks(self, message: Step | Welcome) -> None:
        if isinstance(message, Step) and message.rows:
            now = time.perf_counter()
            if self.issued:
                self.cycles.append(now - self.issued)
            self.issued = now
            if all(row.begin is None for row in message.rows):
                self.step_bytes = encode(message)
        super().to_ranks(message)


SPARE = 2000
"""Steps that a request can take beside the measured ones, while the others come and before the measure begins."""


def leader_round(folder: Path, tp_size: int, rows: int, steps: int) -> dict[str, Any]:
    """One leader with `rows` running requests for `steps` steps, without overlap so that trips are comparable."""
    settings = Settings(
        run_dir=str(folder),
        engine="both",
        role="both",
        epoch=1,
        instance=1,
        endpoint=f"ipc://{folder}/api.sock",
        ranks_endpoint=f"ipc://{folder}/ranks.sock",
        tp_size=tp_size,
        max_running=rows,
        chunk=1 << 20,
        overlap=False,
        lease_s=60.0,
    )
    shell = Measured(settings)
    ranks = [
        multiprocessing.Process(target=rank_process, args=(settings.ranks_endpoint, rank), daemon=True)
        for rank in range(tp_size)
    ]
    for process in ranks:
        process.start()
    gateway = shell.context.socket(zmq.DEALER)
    gateway.identity = b"bench"
    gateway.linger = 0
    gateway.connect(settings.endpoint)
    gateway.send(encode(Attach("bench")))

    def turn() -> None:
        ready = dict(shell.poller.poll(100))
        if shell.ranks in ready:
            shell.take(shell.ranks, shell.from_rank)
        if shell.public in ready:
            shell.take(shell.public, shell.from_public)

    while shell.leader.state != "ready":
        turn()
    for number in range(rows):
        tokens = [(number * 31 + k) % 500 for k in range(200)]
        submit = Submit(RoomId(number + 1, 1), "r", tokens, 200, steps + SPARE, Sampling(), [2], 600.0, "")
        gateway.send(encode(submit))
    while shell.leader.occupied() < rows or shell.leader.scheduler.prefilling:
        turn()
    begin = shell.leader.steps.last + 20
    while shell.leader.steps.last < begin:
        turn()
    shell.trips.clear()
    shell.cycles.clear()
    shell.issued = 0.0
    done = shell.leader.steps.last
    cpu, wall = time.thread_time(), time.perf_counter()
    while shell.leader.steps.last < done + steps:
        turn()
        assert shell.leader.occupied() == rows, "a request ended before its steps were measured"
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    steps = shell.leader.steps.last - done  # a turn that finds answers waiting makes several
    tokens = 0
    while gateway.poll(0):
        output = decode_from_engine.decode(gateway.recv())
        tokens += len(output.tokens) if isinstance(output, Output) else 0
    assert tokens >= rows * steps
    for name in shell.step_ids:
        shell.ranks.send_multipart([name, encode(Stop(1))])
    for process in ranks:
        process.join(10)
    gateway.close()
    step = shell.step_bytes
    shell.close()
    return {
        "cpu_us": cpu / steps * 1e6,
        "trip_us": statistics.median(shell.trips) * 1e6,
        "cycle_us": statistics.median(shell.cycles) * 1e6,
        "step": step,
        "wall": wall,
    }


def bare_round(folder: Path, tp_size: int, step: bytes, rows: int, steps: int) -> dict[str, float]:
    """The same bytes without a decision: one ROUTER, `tp_size` DEALERs in processes."""
    endpoint = f"ipc://{folder}/echo.sock"
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.bind(endpoint)
    replies = [encode(Report(1, rank, 5, 5 * 7919, [7] * rows if rank == 0 else [])) for rank in range(tp_size)]
    ranks = [
        multiprocessing.Process(target=echo_process, args=(endpoint, rank, replies[rank]), daemon=True)
        for rank in range(tp_size)
    ]
    for process in ranks:
        process.start()
    names = [sock.recv_multipart()[0] for _ in ranks]
    trips = []
    cpu = time.thread_time()
    for _ in range(steps):
        started = time.perf_counter()
        for name in names:
            sock.send_multipart([name, step])
        for _ in names:
            sock.recv_multipart()
        trips.append(time.perf_counter() - started)
    cpu = time.thread_time() - cpu
    for name in names:
        sock.send_multipart([name, b"stop"])
    for process in ranks:
        process.join(10)
    sock.close()
    context.term()
    return {"cpu_us": cpu / steps * 1e6, "trip_us": statistics.median(trips) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    table = []
    for tp_size in args.tp:
        for rows in args.rows:
            ours, bare = [], []
            for _ in range(args.rounds):
                with tempfile.TemporaryDirectory() as name:
                    ours.append(leader_round(Path(name), tp_size, rows, args.steps))
                    bare.append(bare_round(Path(name), tp_size, ours[-1]["step"], rows, args.steps))
            middle = statistics.median
            table.append(
                {
                    "tp": tp_size,
                    "rows": rows,
                    "step_bytes": len(ours[-1]["step"]),
                    "leader_cpu_us": round(middle(x["cpu_us"] for x in ours)),
                    "round_trip_us": round(middle(x["trip_us"] for x in ours)),
                    "cycle_us": round(middle(x["cycle_us"] for x in ours)),
                    "bare_cpu_us": round(middle(x["cpu_us"] for x in bare)),
                    "bare_round_trip_us": round(middle(x["trip_us"] for x in bare)),
                }
            )
            if not args.json:
                if len(table) == 1:
                    print(
                        "| TP | rows | step bytes | leader CPU µs | round trip µs | cycle µs "
                        "| bare ZMQ CPU µs | bare ZMQ round trip µs |"
                    )
                    print("|---|---|---|---|---|---|---|---|")
                print("| " + " | ".join(str(x) for x in table[-1].values()) + " |", flush=True)
    if args.json:
        print(json.dumps({"schema": 1, "rows": table}))


if __name__ == "__main__":
    main()
