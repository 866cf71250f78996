"""A leader for tests: starts real rank processes, gives them steps, collects what they say. It decides nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from closeranks.protocol import (
    FromRank,
    Joined,
    Peer,
    Progress,
    RankFault,
    Report,
    Step,
    Stop,
    Welcome,
    decode_from_rank,
    encode,
)

REPO = Path(__file__).parents[3]
T = TypeVar("T")


class Engine:
    """One engine of `tp_size` ranks. `wait` and `wait_all` take what was said, in any order, bounded in time."""

    def __init__(
        self, folder: Path, name: str, tp_size: int, model: Path, cache: Path, epoch: int = 1, **settings: Any
    ) -> None:
        self.name, self.tp_size, self.epoch = name, tp_size, epoch
        self.instance = int.from_bytes(os.urandom(7), "big")
        self.said: list[FromRank] = []
        self.progress: list[Progress] = []
        self.n = 0
        run = folder / f"{name}-{epoch}"
        run.mkdir(mode=0o700, parents=True)
        self.run_dir = run
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        endpoint = f"ipc://{run}/ranks.sock"
        self.socket.bind(endpoint)
        self.ranks = [
            self._start(rank, endpoint, model, cache, {"num_pages": 32, "chunk": 64} | settings)
            for rank in range(tp_size)
        ]
        self.joined: list[Joined] = []

    def _start(self, rank: int, endpoint: str, model: Path, cache: Path, extra: dict[str, Any]) -> Any:
        settings = {
            "run_dir": str(self.run_dir),
            "engine": self.name,
            "epoch": self.epoch,
            "instance": self.instance,
            "tp_size": self.tp_size,
            "rank": rank,
            "model_path": str(model),
            "cache_dir": str(cache),
            "threads": 1,
            "ranks_endpoint": endpoint,
            "rendezvous": f"{self.run_dir}/group",
            "collective_deadline_s": 30.0,
        } | extra
        path = self.run_dir / f"rank{rank}.json"
        path.write_text(json.dumps(settings))
        environment = os.environ | {"PYTHONHASHSEED": str(1000 + 17 * rank), "OMP_NUM_THREADS": "1"}
        with (self.run_dir / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "closeranks.engine.rank", str(path)], cwd=REPO, env=environment, stderr=log
            )

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGCONT)
                rank.kill()
            rank.wait()
        self.context.destroy(linger=0)

    def log(self, rank: int) -> str:
        """What a rank wrote to stderr."""
        return (self.run_dir / f"rank{rank}.log").read_text()

    def listen(self, until: float) -> bool:
        """Take one message; False at the end of the time."""
        if not self.socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            return False
        _, body = self.socket.recv_multipart()
        message = decode_from_rank.decode(body)
        if isinstance(message, Progress):
            self.progress.append(message)
        else:
            self.said.append(message)
        return True

    def wait(self, kind: type[T], match: Callable[[T], bool] = lambda _: True, timeout_s: float = 120.0) -> T:
        """The first message of a kind that matches, removed; anything else stays."""
        until = time.monotonic() + timeout_s
        while True:
            for message in self.said:
                if isinstance(message, kind) and match(message):
                    self.said.remove(message)
                    return message
            for message in self.said:
                if isinstance(message, RankFault):
                    raise AssertionError(f"{message.name}: {message.detail}")
            if not self.listen(until):
                logs = "\n".join(self.log(r)[-2000:] for r in range(self.tp_size))
                raise AssertionError(f"no {kind.__name__} within {timeout_s} s, but {self.said}\n{logs}")

    def wait_all(self, kind: type[T], match: Callable[[T], bool] = lambda _: True, timeout_s: float = 120.0) -> list[T]:
        """One matching message of every rank, by rank."""
        return [
            self.wait(kind, lambda m, r=rank: m.rank == r and match(m), timeout_s)  # type: ignore[misc]
            for rank in range(self.tp_size)
        ]

    def join(self, timeout_s: float = 300.0) -> "Engine":
        """Wait for all ranks and welcome them."""
        self.joined = self.wait_all(Joined, timeout_s=timeout_s)
        self.tell(Welcome(self.epoch))
        return self

    def tell(self, message: Any) -> None:
        """Send to every rank."""
        for rank in range(self.tp_size):
            self.socket.send_multipart([f"step:{rank}".encode(), encode(message)])

    def send_step(self, **fields: Any) -> int:
        """Issue the next step; returns its number."""
        self.n += 1
        self.tell(Step(self.epoch, self.n, **fields))
        return self.n

    def step(self, **fields: Any) -> Report:
        """Issue the next step, take all reports, compare their digests; rank 0's report."""
        n = self.send_step(**fields)
        reports = self.wait_all(Report, lambda r: r.n == n)
        assert len({r.digest for r in reports}) == 1, reports
        return reports[0]

    def peer(self) -> Peer:
        """This engine, as it is introduced to another."""
        return Peer(self.name, self.instance, [j.memory for j in self.joined])

    def stop(self) -> list[int]:
        """Stop the epoch; the exit codes."""
        self.tell(Stop(self.epoch))
        return [rank.wait(60) for rank in self.ranks]
