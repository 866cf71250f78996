"""Many seeds, in this process or in several, and the sum of what came of them."""

import argparse
import contextlib
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.coverage import Coverage, watching_pages
from tests.simulation.run import Run
from tests.simulation.shorten import fails


@dataclass
class Result:
    """What came of one seed, or of several."""

    seed: int = 0
    seeds: int = 0
    events: int = 0
    cpu: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    coverage: Coverage | None = None
    error: str = ""

    def add(self, other: "Result") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.cpu += other.cpu
        self.requests += other.requests
        self.faults += other.faults
        if other.coverage is not None:
            self.coverage = self.coverage or Coverage()
            self.coverage.add(other.coverage)


def one(args: argparse.Namespace, seed: int) -> Result:
    """Run a seed."""
    cpu, coverage = time.process_time(), Coverage() if args.coverage else None
    run = Run(seed, args.events, args.calm, coverage)
    with watching_pages(coverage) if coverage else contextlib.nullcontext():
        error = fails(run)
    if coverage is not None:
        for life in run.network.lives.values():
            coverage.moves(life.leader)
    told = "" if error is None else f"{type(error).__name__}: {error}"
    cpu = time.process_time() - cpu
    return Result(seed, 1, run.world.events, cpu, run.outcome(), run.faults(), coverage, told)


@contextlib.contextmanager
def pool(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map` in this process, or over several."""
    if jobs < 2:
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as processes:
        yield processes.imap
