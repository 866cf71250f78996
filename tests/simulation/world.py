"""Clock, event queue and unreliable delivery of a simulated deployment. Everything random comes from one seed."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.weather import FAIR, Weather

STORM = 200_000
"""So many events at a stretch are a storm of messages, after the load has ended."""


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """Runs callbacks in the order of simulated time; remembers the last deliveries for the trace."""

    def __init__(self, seed: int, calm: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 100.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = 0
        self.events = 0
        self.said: deque[tuple[float, str, object]] = deque(maxlen=30_000)
        """(time, where, what happened there), newest last."""
        self.calm = calm
        """No loss, doubling, partition, damage or fault."""
        self.weather: Weather = FAIR
        self.partitions: dict[tuple[str, str], float] = {}
        """(engine, engine) -> time until which nothing passes between them."""
        self.last: dict[object, float] = {}
        self.chosen: Callable[[str], bool] = lambda what: True
        """Asked before something drawn is carried out (see `Run.skip`)."""

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
        begun = self.events
        while self.heap and self.heap[0][0] <= at:
            self.step()
            if self.events - begun > STORM:
                raise Violation(f"{STORM} events by {self.now:.1f} s: words call forth words without end")
        self.now = max(self.now, at)

    def note(self, where: str, what: object) -> None:
        self.said.append((self.now, where, what))

    def trace(self, last: int = 40) -> list[str]:
        """The last deliveries, as text."""
        return [f"{at:9.3f} {where:10} {what!s:.300}" for at, where, what in list(self.said)[-last:]]

    def cut(self, a: str, b: str) -> bool:
        """Is the link between two engines down?"""
        return bool(self.partitions) and self.partitions.get((a, b), 0.0) > self.now

    def delay(self) -> float:
        """Mostly a millisecond, sometimes much more: messages overtake each other."""
        draw = self.random.random()
        if draw > self.weather.slow:
            return draw * 0.003
        return self.random.random() ** 2 * 0.5

    def unreliable(self, ends: tuple[str, str], call: Callable[..., None], *args: Any) -> None:
        """Lose, double, delay and reorder."""
        if self.cut(*ends):
            return
        if self.calm:
            self.after(0.001, call, *args)
            return
        draw = self.random.random()
        if draw < self.weather.loss:
            return
        if draw > 1 - self.weather.double:
            self.after(self.delay(), call, *args)
        self.after(self.delay(), call, *args)
