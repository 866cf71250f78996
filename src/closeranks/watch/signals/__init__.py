"""Signals: each file reads one kind of evidence of the engines, and says so when it cannot.

A signal has `name`, `every_s` (how often it is worth reading) and `read(engines, urgent)`; `urgent` are the names of
engines under suspicion, of which more may be read. It returns values per engine, or per `engine/label`, or `Blind`.
`Reader` runs it in a task of its own, with a deadline: a signal that hangs becomes blind and holds nobody up.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from closeranks.watch.snapshot import Blind, EngineSeen, Values
from closeranks.watch.snapshot import Signal as SignalName

Readings = dict[str, Values | Blind]
NO_ADDRESS = Blind("its address is not known: no --port among its flags, and no socket of its own can be seen")
log = structlog.get_logger()


class Signal(Protocol):
    """One kind of evidence."""

    name: SignalName
    every_s: float
    limit_s: float
    """A reading that takes longer is given up."""

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """One reading. Every key whose source gave nothing is `Blind`; OSError and ValueError make the whole blind."""
        ...


class Reader:
    """Keeps the newest readings of one signal. `look` never waits for the signal."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.latest: Mapping[str, Values | Blind] = {}
        self._task: asyncio.Task[Readings] | None = None
        self._began = -1e9
        self._hung = False

    def look(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> None:
        """Collect a finished reading, give up a late one, begin the next when it is due."""
        now = time.monotonic()
        if self._task is not None and self._task.done():
            self._collect()
        if self._task is not None and now - self._began > self.signal.limit_s and not self._hung:
            self._hung = True
            self._task.cancel()
            self._blind(engines, f"no answer within {self.signal.limit_s:.0f} s")
        due = now - self._began >= (min(1.0, self.signal.every_s) if urgent else self.signal.every_s) - 0.05
        if self._task is None and due:
            self._began, self._hung = now, False
            self._engines = engines
            self._task = asyncio.create_task(self.signal.read(engines, urgent), name=f"signal {self.signal.name}")

    def _collect(self) -> None:
        task, self._task = self._task, None
        assert task is not None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            if not self._hung:
                self.latest = task.result()
            return
        if not isinstance(error, OSError | ValueError):
            log.error("signal failed", signal=self.signal.name, error=f"{type(error).__name__}: {error}")
        self._blind(self._engines, f"{type(error).__name__}: {error}"[:200])

    def _blind(self, engines: Sequence[EngineSeen], reason: str) -> None:
        self.latest = {engine.name: Blind(reason) for engine in engines}

    async def close(self) -> None:
        """Give up a reading in progress."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
