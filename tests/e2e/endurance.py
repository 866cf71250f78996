"""What a long run does beside its load: a rank killed now and then, and the memory of every process written down."""

import os
import random
import signal
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.service import Served, title_of

SAMPLE_S = 2.0
YOUNG_S = 20.0
"""A process that is younger is still loading and warming up."""
WARM_S = 180.0
"""From here on memory is expected to be flat."""
FLAT = 0.05
RESIDENT = ("RssAnon", "RssShmem")
"""What a process has of its own, and the pool of pages; not the libraries' files, which the page cache may drop."""


@dataclass
class Endurance:
    """Runs on a thread of its own from `start` to `stop`. `kill_every`: seconds between kills; 0: none."""

    served: Served
    kill_every: float
    seed: int
    killed: list[str] = field(default_factory=list)
    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Title -> (seconds since the start, pid, bytes)."""

    def start(self) -> None:
        self._over = threading.Event()
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="endurance")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        draw = random.Random(self.seed)
        next_kill = self._begin + self.kill_every
        while not self._over.wait(SAMPLE_S):
            self._sample()
            if self.kill_every and time.monotonic() >= next_kill:
                next_kill += self.kill_every
                self._kill(draw)

    def _kill(self, draw: random.Random) -> None:
        ranks = [pid for pid in self.served.descendants() if title_of(pid).startswith("closeranks::rank ")]
        if not ranks:
            return
        victim = draw.choice(sorted(ranks))
        self.killed.append(title_of(victim))
        os.kill(victim, signal.SIGKILL)

    def _sample(self) -> None:
        now = time.monotonic() - self._begin
        for pid in self.served.descendants():
            title = title_of(pid)
            try:
                text = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if "spare" in title or not title:
                continue
            name = title if title.startswith("closeranks::") else "supervisor"
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            size = sum(int(fields[key].split()[0]) << 10 for key in RESIDENT if key in fields)
            self.samples[name].append((now, pid, size))

    def growth(self) -> dict[str, tuple[int, int, float]]:
        """Title -> bytes once warm, bytes at the end (medians over a sixth of the time), growth as a fraction.

        Whoever took a killed process's place goes on in its series, once it is no longer young.
        """
        found = {}
        end = time.monotonic() - self._begin
        warm = min(WARM_S, end / 3)
        span = (end - warm) / 6
        for title, series in sorted(self.samples.items()):
            born: dict[int, float] = {}
            for at, pid, _ in series:
                born.setdefault(pid, at)
            grown = [(at, size) for at, pid, size in series if at - born[pid] >= YOUNG_S]
            first = [size for at, size in grown if warm <= at < warm + span]
            last = [size for at, size in grown if at >= end - span]
            if first and last:
                a, b = int(statistics.median(first)), int(statistics.median(last))
                found[title] = (a, b, b / a - 1)
        return found
