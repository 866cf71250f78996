"""/proc of every process of an engine: state, context switches and CPU of its main thread, its wait channel."""

import asyncio
import time
from collections.abc import Sequence

from closeranks.watch import procfs
from closeranks.watch.signals import Readings
from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Values
from closeranks.watch.snapshot import Signal as SignalName


class ProcSignal:
    """Key: `engine/label`. Of engines under suspicion also the switches of all other threads."""

    name: SignalName = "proc"
    every_s = 1.0
    limit_s = 8.0

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """In a thread: reading /proc of a process in trouble may hang."""
        return await asyncio.to_thread(self.read_now, engines, urgent)

    def read_now(self, engines: Sequence[EngineSeen], urgent: frozenset[str] = frozenset()) -> Readings:
        """The reading itself; blocking."""
        found: Readings = {}
        for engine in engines:
            for proc in (p for p in engine.procs if p.role != "helper"):
                found[f"{engine.name}/{proc.label}"] = one(proc, engine.name in urgent)
        return found


def one(proc: Proc, deep: bool = False) -> Values | Blind:
    """Values of one process: `at, pid, start, state, switches, ticks, all_ticks, threads, wchan, frozen` (and `others`
    if `deep`). State `X`: it is gone, or its pid is somebody else's by now."""
    at = time.monotonic()
    main = procfs.main_thread(proc.pid)
    if main is None or main.start_time != proc.start_time:
        return {"at": at, "pid": float(proc.pid), "start": float(proc.start_time), "state": "X"}
    values: dict[str, float | str | bool] = {
        "at": at,
        "pid": float(main.pid),
        "start": float(main.start_time),
        "state": main.state,
        "switches": float(main.switches),
        "ticks": float(main.ticks),
        "all_ticks": float(main.all_ticks),
        "threads": float(main.threads),
        "wchan": main.wchan,
        "frozen": main.frozen,
    }
    if deep and main.state not in "ZX":
        others = procfs.other_threads(proc.pid)
        if others is not None:
            values["others"] = float(others)
    return values
