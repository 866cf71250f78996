"""What the processes of one specimen share: the event pipe, the fault plan and a board of numbers.

The launcher makes a `Stage` before it forks; children inherit it. The board is shared memory that only a rank's own
loop writes, and the launcher's HTTP side reads: a loop that stands leaves its last numbers there for ever, which is
how the gauges of real engines behave.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from closeranks.lab.specimens.directions import STRUCK, Directions

FIELDS = (
    "running",
    "queued",
    "bootstrap",
    "inflight",
    "prealloc",
    "transfer",
    "paused",
    "generated",
    "prompted",
    "finished",
    "loop_seconds",
    "idle_seconds",
    "heartbeat",
    "iteration",
)
STRIKE_AT = 25
"""Loop iteration at which a fault strikes, counted from ready: far enough for a first log line and a first scrape."""

AFTER_THE_LOAD = 4 * STRIKE_AT
"""Iteration by which the client has stopped and its requests have run."""

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, so that no specimen outlives its test; 0: it has none."""
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class Board:
    """One row of numbers per rank, in shared memory (float64, `FIELDS` wide)."""

    def __init__(self, world: int) -> None:
        self._cells = multiprocessing.RawArray("d", world * len(FIELDS))

    def put(self, rank: int, **values: float) -> None:
        for name, value in values.items():
            self._cells[rank * len(FIELDS) + FIELDS.index(name)] = value

    def add(self, rank: int, name: str, value: float) -> None:
        self._cells[rank * len(FIELDS) + FIELDS.index(name)] += value

    def get(self, rank: int, name: str) -> float:
        return float(self._cells[rank * len(FIELDS) + FIELDS.index(name)])


class Stage:
    """Shared by every process of one running specimen."""

    def __init__(self, world: int, directions: Directions) -> None:
        self.specimen = directions.specimen()
        self.world = world
        self.folder = directions.folder
        self.fabric = Path(directions.fabric or directions.folder)
        self.port = directions.port
        self.board = Board(world)
        self._event_fd = directions.event_fd
        self._struck: set[str] = set()
        context = multiprocessing.get_context("fork")
        self.dump_flight_recorder: Event = context.Event()

    def tell(self, event: str, rank: int | None = None, **detail: object) -> None:
        """Tell the harness that something happened: one JSON line, short enough for one atomic pipe write."""
        record = {"event": event, "rank": rank, "pid": os.getpid(), "t": time.time(), **detail}
        if event == "onset":
            (self.folder / STRUCK).touch()
        if self._event_fd >= 0:
            os.write(self._event_fd, json.dumps(record).encode() + b"\n")

    def strikes(self, fault: str, rank: int, at: int = STRIKE_AT) -> bool:
        """Whether this fault is to strike here and now. True once per process; announces the onset."""
        plan = self.specimen
        if fault != plan.fault or fault in self._struck or rank not in plan.ranks(plan.strikes, self.world):
            return False
        if self.board.get(rank, "iteration") < at:
            return False
        self._struck.add(fault)
        self.tell("onset", rank, fault=fault)
        return True


class LogFormat(logging.Formatter):
    """SGLang's prefix: `[YYYY-mm-dd HH:MM:SS TP0] message`."""

    def __init__(self, rank_prefix: str) -> None:
        super().__init__(f"[%(asctime)s{rank_prefix}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")


def log_to_stderr(formatter: logging.Formatter) -> logging.Logger:
    """The process's logger in the engine's own format; all processes share the launcher's stderr, as in real life."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logger = logging.getLogger("specimen")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger
