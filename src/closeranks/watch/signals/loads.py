"""SGLang's `/v1/loads`. Only `loads[].timestamp` is the scheduler's heartbeat; the outer one is the answer's time.

Both are of the same clock, so their difference is an age without using ours. A healthy saturated pair shows ages up
to the publishing interval (15 s).
"""

import asyncio
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from closeranks.watch.signals import NO_ADDRESS, Readings
from closeranks.watch.signals.counters import CountersSignal
from closeranks.watch.signals.fetch import Client
from closeranks.watch.snapshot import Blind, EngineSeen, Values
from closeranks.watch.snapshot import Signal as SignalName

_QUEUES = {
    "prefill_bootstrap_queue_reqs": "bootstrap",
    "prefill_inflight_queue_reqs": "inflight",
    "decode_prealloc_queue_reqs": "prealloc",
    "decode_transfer_queue_reqs": "transfer",
}


SELDOM_S = 10.0
"""Between two questions to an engine whose counters tell the same."""


def parse(answer: Any) -> dict[str, float] | None:
    """Values of a decoded answer: `heartbeat` and `age` of the oldest scheduler in seconds, requests and queues summed.

    None when it is no such answer.
    """
    try:
        loads = answer["loads"]
        beats = [float(load["timestamp"]) for load in loads]
        found = {"heartbeat": min(beats), "age": _seconds(answer["timestamp"]) - min(beats)}
        found["running"] = sum(float(load.get("num_running_reqs", 0)) for load in loads)
        found["waiting"] = sum(float(load.get("num_waiting_reqs", 0)) for load in loads)
        for name, field in _QUEUES.items():
            queues = [load.get("disaggregation") or {} for load in loads]
            if any(name in queue for queue in queues):
                found[field] = sum(float(queue.get(name, 0)) for queue in queues)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return found if all(map(math.isfinite, found.values())) else None


def _seconds(said: object) -> float:
    """Epoch seconds of a number or, as SGLang 0.5.23 writes it, an ISO 8601 time (without a zone: UTC)."""
    if not isinstance(said, str):
        return float(said)  # type: ignore[arg-type]  # a TypeError is the caller's "not the known form"
    found = datetime.fromisoformat(said)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


class LoadsSignal:
    """Key: engine."""

    name: SignalName = "loads"
    every_s = 3.0
    limit_s = 8.0

    def __init__(self, client: Client, counters: CountersSignal | None = None) -> None:
        self._client, self._counters = client, counters
        self.bodies: dict[str, bytes] = {}
        self._last: dict[str, tuple[float, Values | Blind]] = {}
        """Engine → when it was asked last, and what came."""

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """SGLang engines only. One that is not under suspicion and whose loops are seen to turn by its counters, which
        tell more and sooner, is asked less often; in between its last answer stands, with its time."""
        now, found = time.monotonic(), Readings()
        asked = []
        for engine in (e for e in engines if e.kind == "sglang"):
            when, last = self._last.get(engine.name, (-1e9, NO_ADDRESS))
            turns = self._counters is not None and self._counters.turns(engine.name)
            if turns and engine.name not in urgent and now - when < SELDOM_S and not isinstance(last, Blind):
                found[engine.name] = last
            else:
                asked.append(engine)
        for name, values in await asyncio.gather(*(self._one(engine) for engine in asked)):
            self._last[name] = (now, values)
            found[name] = values
        return found

    async def _one(self, engine: EngineSeen) -> tuple[str, Values | Blind]:
        if engine.url is None:
            return engine.name, NO_ADDRESS
        answer = await self._client.poll(f"{engine.url}/v1/loads")
        values = parse(answer.json()) if answer.ok else None
        if values is None:
            return engine.name, Blind(f"/v1/loads: {answer.said if not answer.ok else 'not the known form'}")
        self.bodies[engine.name] = answer.body
        return engine.name, {**values, "at": time.monotonic()}
