"""What an engine does until it is ready: loading a model takes from seconds to minutes, without another word."""

import time
from collections.abc import Sequence

import structlog

from closeranks.evidence import capture
from closeranks.supervise.child import Child
from closeranks.supervise.standing import cpu_s, read_bytes

EVERY_S = 10.0
LOOK_S = 5.0
IDLE = 0.01
"""A process that waits may use so much of a core."""
STILL_S = 120.0
"""Ranks that load, and for so long use no CPU and read nothing, do not come any more."""
RANK_READY = b"rank ready"
"""A rank says so in its log when it has loaded, and then joins."""

log = structlog.get_logger()


class Progress:
    """Says every `EVERY_S` which ranks have loaded and what the others did so far."""

    def __init__(self, engine: str, children: Sequence[Child]) -> None:
        self._engine = engine
        self._children = children
        self._begun = self._next = time.monotonic()
        self._loaded: set[str] = set()
        self._looked = self._begun
        self._did: dict[str, tuple[float, int]] = {}
        """CPU seconds and bytes read by each rank at the last look."""
        self._still_s = 0.0

    def say(self) -> None:
        now = time.monotonic()
        if now - self._next < EVERY_S:
            return
        self._next = now
        ranks = self._children[1:]
        self._loaded |= {c.name for c in ranks if c.name not in self._loaded and RANK_READY in capture.tail(c.log)}
        log.info(
            "engine loads",
            engine=self._engine,
            after_s=round(now - self._begun),
            loaded=sorted(self._loaded),
            **{c.name: _work(c.pid) for c in ranks if c.name not in self._loaded},
        )

    def fault(self) -> str:
        """What is wrong; empty: nothing. Time in which nobody looked (this process was stopped) does not count."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return ""
        took, self._looked = min(now - self._looked, 2 * LOOK_S), now
        did = {c.name: (cpu_s(c.pid) or 0.0, read_bytes(c.pid) or 0) for c in self._children[1:]}
        old = self._did
        if any(n not in old or cpu - old[n][0] > IDLE * took or read > old[n][1] for n, (cpu, read) in did.items()):
            self._did, self._still_s = did, 0.0
            return ""
        self._did, self._still_s = did, self._still_s + took
        if self._still_s < STILL_S:
            return ""
        return f"{', '.join(did)} did not load: for {self._still_s:.0f} s they have used no CPU and read nothing"


def _work(pid: int) -> str:
    """`12.1 s of CPU, 310 MB read`: as far as it can be told."""
    used, read = cpu_s(pid), read_bytes(pid)
    said = [f"{used:.1f} s of CPU"] if used is not None else []
    said += [f"{read / 1e6:.0f} MB read"] if read is not None else []
    return ", ".join(said) or "unknown"
