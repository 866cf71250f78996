"""closeranks' own engines: the step and work counters that their gateway shows, and what its `/health` says.

Every epoch steps at least once a second, also without work, so a step counter that stands is a sign by itself.
"""

import math
import re
import time
from collections.abc import Sequence

from closeranks.watch.signals import Readings
from closeranks.watch.signals.counters import CountersSignal
from closeranks.watch.signals.fetch import Answer, Client
from closeranks.watch.snapshot import Blind, EngineSeen
from closeranks.watch.snapshot import Signal as SignalName

_LINE = re.compile(rb'^closeranks_(\w+)\{engine="([^"]+)"\} (\S+)', re.MULTILINE)
_FIELDS = {
    "steps_total": "steps",
    "prefill_tokens_total": "prefilled",
    "decode_tokens_total": "tokens",
    "transfers_total": "transfers",
    "failed_transfers_total": "refused",
    "running_requests": "running",
    "waiting_requests": "waiting",
    "engine_up": "up",
    "epoch": "epoch",
}


def parse(body: bytes) -> dict[str, dict[str, float]]:
    """Engine → values, of a gateway's `/metrics`."""
    found: dict[str, dict[str, float]] = {}
    for name, engine, value in _LINE.findall(body):
        field = _FIELDS.get(name.decode(errors="replace"))
        try:
            number = float(value)
        except ValueError:
            continue
        if field is not None and math.isfinite(number):
            found.setdefault(engine.decode(errors="replace"), {})[field] = number
    return found


class StepsSignal:
    """Key: engine. One gateway answers for several engines and is asked once."""

    name: SignalName = "steps"
    every_s = 2.0
    limit_s = 8.0

    def __init__(self, client: Client, pages: CountersSignal) -> None:
        self._client = client
        self._pages = pages

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """closeranks engines only."""
        found: Readings = {}
        ours = [e for e in engines if e.kind == "closeranks"]
        for url in sorted({e.url for e in ours if e.url}):
            page = await self._client.poll(f"{url}/metrics")
            health = await self._client.get(f"{url}/health")
            at = time.monotonic()
            values = parse(page.body)
            for engine in ours:
                if engine.url != url:
                    continue
                self._pages.answers[engine.name] = (at, page)
                own = values.get(engine.own_name)
                if not page.ok or own is None:
                    found[engine.name] = Blind(f"gateway /metrics: {page.said if not page.ok else 'no such engine'}")
                    continue
                self._pages.keep(engine.name, page.body)
                found[engine.name] = {
                    **own,
                    "at": at,
                    "unhealthy": _reasons(health) if health.status == 503 else "",
                }
        for engine in ours:
            if engine.url is None:
                found[engine.name] = Blind("its gateway's address is not known: no socket of its own can be seen")
        return found


def _reasons(health: Answer) -> str:
    """What a 503 of `/health` says."""
    answer = health.json()
    reasons = answer.get("reasons") if isinstance(answer, dict) else None
    return "; ".join(str(r) for r in reasons[:3])[:300] if isinstance(reasons, list) and reasons else "it says 503"
