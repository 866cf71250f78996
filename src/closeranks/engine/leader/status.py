"""An engine's state of work, as gateways and the watch see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Status
from . import rooms as r

if TYPE_CHECKING:
    from .core import Leader


def status(leader: Leader, at: float, detail: str) -> Status:
    """The `Status` of now. `at`: clock reading of the same clock as the events'."""
    pool, steps, scheduler = leader.pool, leader.steps, leader.scheduler
    waiting = [room for room in leader.rooms.open.values() if room.state in (r.WAITING, r.QUEUED)]
    oldest = min((room.waiting_since for room in waiting), default=at)
    counters = dict(leader.counters)
    counters["evicted_pages"] = pool.cache.evicted
    for what, count in leader.stales.items():
        counters[f"stale_{what}"] = count
    return Status(
        leader.config.engine,
        leader.config.role,
        leader.config.epoch,
        leader.config.instance,
        leader.state,
        leader.config.tp_size,
        leader.page_size,
        leader.context_length,
        leader.max_request_tokens,
        leader.fingerprint,
        pool.total,
        len(pool.free),
        len(pool.cache.idle),
        pool.owned,
        len(pool.quarantined),
        len(waiting),
        len(scheduler.decoding) + len(scheduler.prefilling),
        len(leader.rooms.open),
        max(0.0, at - oldest),
        max(0.0, at - steps.agreed_at),
        steps.slowest(),
        counters,
        detail,
    )
