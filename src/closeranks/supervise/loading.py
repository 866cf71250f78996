"""What an engine does until it is ready: loading a model takes from seconds to minutes, without another word."""

import time
from collections.abc import Sequence

import structlog

from closeranks.evidence import capture
from closeranks.supervise.child import Child
from closeranks.supervise.standing import cpu_s, read_bytes

EVERY_S = 10.0
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


def _work(pid: int) -> str:
    """`12.1 s of CPU, 310 MB read`: as far as it can be told."""
    used, read = cpu_s(pid), read_bytes(pid)
    said = [f"{used:.1f} s of CPU"] if used is not None else []
    said += [f"{read / 1e6:.0f} MB read"] if read is not None else []
    return ", ".join(said) or "unknown"
