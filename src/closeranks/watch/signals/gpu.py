"""Utilisation and power of the GPUs that the engines' processes use, by nvidia-smi. Asked only under suspicion.

A rank that hangs on the device spins: its GPU shows 100 % at low power. Starting nvidia-smi costs tens of
milliseconds of CPU, so a healthy service is not asked.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence

from closeranks.evidence import capture
from closeranks.watch.signals import Readings
from closeranks.watch.snapshot import Blind, EngineSeen
from closeranks.watch.snapshot import Signal as SignalName

GPUS = "index,uuid,utilization.gpu,utilization.memory,power.draw,power.limit,memory.used,memory.total"
APPS = "pid,gpu_uuid"
LOW_POWER = 0.45
"""A GPU that computes draws more of its limit than this; one that spins in a wait draws less."""


def parse(gpus: str, apps: str) -> dict[int, dict[str, float]]:
    """pid → `util` (%), `power` (share of the limit) of its GPU, from the two csv answers (without units)."""
    cards: dict[str, dict[str, float]] = {}
    for line in gpus.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            cards[cells[1]] = {"util": float(cells[2]), "power": float(cells[4]) / float(cells[5])}
        except (IndexError, ValueError, ZeroDivisionError):  # the header, or a card that does not tell
            continue
    found: dict[int, dict[str, float]] = {}
    for line in apps.splitlines():
        pid, _, uuid = (part.strip() for part in line.partition(","))
        if pid.isdecimal() and uuid in cards:
            found[int(pid)] = cards[uuid]
    return found


class GpuSignal:
    """Key: engine, with `busy` (GPUs at 90 % and more), `idle`, `spinning` (busy at low power) and `cards`."""

    name: SignalName = "gpu"
    every_s = 5.0
    limit_s = 12.0

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._left: list[asyncio.subprocess.Process] = []
        """Those that did not answer: the driver may hold them for good. No others are started beside them."""
        self.page = ""
        """The last answer, for a bundle."""

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """Engines under suspicion only; of others nothing is said."""
        if self._program is None:
            return {e.name: Blind("no nvidia-smi here") for e in engines}
        suspects = [e for e in engines if e.name in urgent]
        if not suspects:
            return {}
        self._left = [process for process in self._left if await capture.stays(process)]
        if self._left:
            said = f"nvidia-smi (pid {self._left[0].pid}) hangs in the driver, SIGKILL does not end it"
            return {e.name: Blind(said) for e in suspects}
        gpus, apps = await asyncio.gather(self._ask("--query-gpu=" + GPUS), self._ask("--query-compute-apps=" + APPS))
        self.page = gpus
        cards = parse(gpus, apps)
        found: Readings = {}
        for engine in suspects:
            own = [cards[p.pid] for p in engine.procs if p.pid in cards]
            if not own:
                found[engine.name] = Blind("none of its processes is listed by nvidia-smi")
                continue
            busy = [c for c in own if c["util"] >= 90]
            found[engine.name] = {
                "at": time.monotonic(),
                "cards": float(len(own)),
                "busy": float(len(busy)),
                "idle": float(sum(c["util"] <= 5 for c in own)),
                "spinning": float(sum(c["power"] < LOW_POWER for c in busy)),
            }
        return found

    async def _ask(self, query: str) -> str:
        assert self._program is not None
        process = await asyncio.create_subprocess_exec(
            self._program,
            query,
            "--format=csv,nounits",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:  # cancelled: it hangs in the driver
                process.kill()
                self._left.append(process)
        return out.decode(errors="replace")
