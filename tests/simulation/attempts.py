"""How an open request of the gateway stands, and what an event is to it: the resume table, for counting."""

from collections.abc import Iterator
from typing import Any

from closeranks.gateway.resume import SETTLED_S, Request, Requests
from closeranks.protocol import Ended, RoomId

STATES = ["waiting", "placed", "spoke", "gap", "complete", "gone"]
EVENTS = [
    "next token",
    "known token",
    "token beyond a gap",
    "of another attempt",
    "late charge",
    "done, by decode",
    "done, by prefill",
    "retryable",
    "charged",
    "busy",
    "abort, not asked for",
    "ended otherwise",
    "new instance",
    "link lost",
    "silence",
    "fewer rooms",
    "missing too long",
    "deadline",
    "client leaves",
]


def state_of(request: Request | None) -> str:
    if request is None:
        return "gone"
    if request.pair is None:
        return "waiting"
    if request.complete:
        return "complete"
    if request.early or request.held is not None:
        return "gap"
    return "spoke" if request.spoke else "placed"


def attempt_events(table: Requests, what: str, args: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    """(state, event) pairs of a call of `Requests.<what>(*args)` that is about to be made."""
    if what == "on_output":
        endpoint, output, _ = args
        for row in output.tokens:
            request = table.open.get(row.room.id)
            event = "of another attempt"
            if is_current(request, row.room, endpoint):
                assert request is not None
                known = len(request.tokens)
                event = "token beyond a gap" if row.index > known else "next token"
                if row.index < known:
                    event = "known token"
            yield state_of(request), event
        for ended in output.ended:
            request = table.open.get(ended.room.id)
            yield state_of(request), end_event(request, ended, endpoint)
    elif what == "on_status":
        endpoint, status, now = args
        known = table.router.engines[endpoint].status
        reborn = known is not None and known.instance != status.instance
        old = [r for r in table.open.values() if r.pair and r.pair.decode == endpoint and r.began < now - SETTLED_S]
        for request in table.open.values():
            if request.pair and reborn and endpoint in request.pair.endpoints:
                yield state_of(request), "new instance"
        if not reborn and status.state == "ready" and len(old) > status.rooms_open:
            for request in old:
                yield state_of(request), "fewer rooms"
    elif what == "on_link_lost":
        for request in table.open.values():
            if request.pair and args[0] in request.pair.endpoints:
                yield state_of(request), "link lost"
    elif what == "on_time":
        now = args[0]
        silent = {e for e in table.router.engines if table.router.is_silent(e, now)}
        for request in table.open.values():
            if now >= request.deadline:
                yield state_of(request), "deadline"
            elif request.pair and silent.intersection(request.pair.endpoints):
                yield state_of(request), "silence"
            elif request.pair and now - request.stuck_since > 1.0:
                yield state_of(request), "missing too long"
    elif what == "abort":
        yield state_of(table.open.get(args[0])), "client leaves"


def is_current(request: Request | None, room: RoomId, endpoint: str) -> bool:
    pair = request.pair if request is not None else None
    return (
        pair is not None
        and request is not None
        and room.generation == request.generation
        and endpoint in pair.endpoints
    )


def end_event(request: Request | None, ended: Ended, endpoint: str) -> str:
    if not is_current(request, ended.room, endpoint):
        return "late charge" if ended.charged else "of another attempt"
    assert request is not None
    assert request.pair is not None
    if ended.reason in ("stop", "length") and not ended.retryable:
        return "done, by decode" if endpoint == request.pair.decode else "done, by prefill"
    if ended.charged:
        return "charged"
    if ended.reason in ("busy", "abort"):
        return "busy" if ended.reason == "busy" else "abort, not asked for"
    return "retryable" if ended.retryable else "ended otherwise"
