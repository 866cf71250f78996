"""Clock, event queue and network of a simulated deployment. Everything random comes from one seed."""

import heapq
import random
from collections.abc import Callable
from typing import Any


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """Runs callbacks in the order of simulated time; keeps a short trace of what was delivered."""

    def __init__(self, seed: int, calm: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 100.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.events = 0
        self.trace: list[str] = []
        self.calm = calm
        """No loss, doubling, partition or damage from here on."""
        self.loss = self.double = self.damage = self.failing = 0.0
        self.partitions: dict[tuple[str, str], float] = {}
        """(engine, engine) -> time until which nothing passes between them."""
        self.last: dict[object, float] = {}
        self.fifo_heap = 0

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.number += 1
        heapq.heappush(self.heap, (self.now + delay, self.number, call, args))

    def fifo(self, channel: object, delay: float, call: Callable[..., None], *args: Any) -> None:
        """As `after`, but never before what was sent earlier on the same channel."""
        at = max(self.last.get(channel, 0.0), self.now + delay)
        self.last[channel] = at
        self.number += 1
        heapq.heappush(self.heap, (at, self.number, call, args))

    def step(self) -> bool:
        if not self.heap:
            return False
        self.now, _, call, args = heapq.heappop(self.heap)
        self.events += 1
        call(*args)
        return True

    def run_until(self, at: float) -> None:
        while self.heap and self.heap[0][0] <= at:
            self.step()
        self.now = max(self.now, at)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:9.3f} {text}")
        if len(self.trace) > 400:
            del self.trace[:200]

    # ------------------------------------------------------------------------------------------------------- network

    def delay(self) -> float:
        """Mostly a millisecond, sometimes much more: messages overtake each other."""
        draw = self.random.random()
        if draw < 0.95:
            return draw * 0.003
        return (draw - 0.95) * 20 * self.random.random() * 0.4

    def unreliable(self, ends: tuple[str, str], call: Callable[..., None], *args: Any) -> None:
        """Lose, double, delay and reorder."""
        if self.partitions and self.partitions.get(ends, 0.0) > self.now:
            return
        if self.calm:
            self.after(0.001, call, *args)
            return
        draw = self.random.random()
        if draw < self.loss:
            return
        if draw > 1 - self.double:
            self.after(self.delay(), call, *args)
        self.after(self.delay(), call, *args)
