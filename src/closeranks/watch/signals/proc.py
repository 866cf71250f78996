"""/proc of every process of an engine: state, context switches and CPU of its main thread, its wait channel."""

import time
from collections.abc import Sequence

from closeranks.watch import procfs
from closeranks.watch.aside import Aside
from closeranks.watch.signals import Readings
from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Values
from closeranks.watch.snapshot import Signal as SignalName


class ProcSignal:
    """Key: `engine/label`."""

    name: SignalName = "proc"
    every_s = 1.0
    limit_s = 8.0

    def __init__(self) -> None:
        self._aside = Aside("proc")

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """In a thread: reading /proc of a process in trouble may hang."""
        return await self._aside.run(lambda: self.read_now(engines))

    def read_now(self, engines: Sequence[EngineSeen]) -> Readings:
        """The reading itself; blocking."""
        found: Readings = {}
        for engine in engines:
            for proc in engine.parts:
                found[f"{engine.name}/{proc.label}"] = one(proc)
        return found


def one(proc: Proc) -> Values | Blind:
    """Values of one process: `at, pid, start, state, switches, ticks, all_ticks, threads, wchan, frozen`.
    State `X`: it is gone, or its pid is somebody else's by now."""
    at = time.monotonic()
    main = procfs.main_thread(proc.pid)
    if main is None or main.start_time != proc.start_time:
        return {"at": at, "pid": float(proc.pid), "start": float(proc.start_time), "state": "X"}
    return {
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
