"""Breaches of the gateway: resuming, counting attempts, choosing engines."""

from typing import Any

import msgspec

from closeranks.gateway.resume import Requests
from closeranks.gateway.router import Router
from tests.simulation.breaches.breach import Breach

TAKE, SUBMIT, RETRY, UNSTICK, ON_TIME = (
    Requests._take,
    Requests._submit,
    Requests._retry,
    Requests._unstick,
    Requests.on_time,
)
ON_ENDED, ON_OUTPUT, DETACH, ON_STATUS = Requests._on_ended, Requests.on_output, Requests._detach, Router.on_status


def known_tokens_again(self: Requests, request: Any, row: Any, now: float) -> None:
    TAKE(self, request, msgspec.structs.replace(row, index=len(request.tokens)), now)


def any_generation(request: Any, room: Any, endpoint: str) -> bool:
    return request.pair is not None and endpoint in request.pair.endpoints


def gaps_are_jumped(self: Requests, endpoint: str, output: Any, now: float) -> None:
    rows = []
    for row in output.tokens:
        request = self.open.get(row.room.id)
        index = len(request.tokens) if request is not None and row.index > len(request.tokens) else row.index
        rows.append(msgspec.structs.replace(row, index=index))
    ON_OUTPUT(self, endpoint, msgspec.structs.replace(output, tokens=rows), now)


def resumed_from_the_prompt(self: Requests, request: Any, peer: str, now: float) -> Any:
    whole = SUBMIT(self, request, peer, now)
    return msgspec.structs.replace(whole, tokens=whole.tokens[: request.prompt_length])


def length_not_counted_down(self: Requests, request: Any, peer: str, now: float) -> Any:
    return msgspec.structs.replace(SUBMIT(self, request, peer, now), max_new_tokens=request.max_new_tokens)


def generation_is_reused(self: Requests, request: Any, now: float, why: str, after_s: float = 0.0) -> None:
    RETRY(self, request, now, why, after_s)
    if request.pair is None:
        request.generation -= 1


def a_missing_token_is_an_end(self: Requests, request: Any, now: float) -> None:
    request.max_new_tokens = max(1, request.emitted)
    if request.emitted:
        UNSTICK(self, request, now)
    else:
        request.max_new_tokens = 1


def retryable_ends_end(self: Requests, endpoint: str, ended: Any, now: float) -> None:
    ON_ENDED(self, endpoint, msgspec.structs.replace(ended, retryable=False), now)


def attempts_stay_counted(self: Requests, request: Any) -> None:
    request.pair = None


def deadlines_are_the_engines(self: Requests, now: float) -> None:
    deadlines = {number: request.deadline for number, request in self.open.items()}
    for request in self.open.values():
        request.deadline += 1000.0
    ON_TIME(self, now)
    for number, request in self.open.items():
        request.deadline = deadlines[number]


def restarts_unseen(self: Router, endpoint: str, status: Any, now: float) -> bool:
    ON_STATUS(self, endpoint, status, now)
    return False


def an_old_number_is_evidence(self: Router, endpoint: str, now: float) -> bool:
    return False


def late_charges_are_stale(self: Requests, request: Any, endpoint: str, ended: Any, now: float) -> None:
    return None


def nobody_is_charged(self: Requests, request: Any, endpoint: str, ended: Any) -> bool:
    return False


def charges_stay(self: Requests, explained: Any) -> None:
    return None


def suspects_among_others(self: Requests, request: Any, peer: str, now: float) -> Any:
    return msgspec.structs.replace(SUBMIT(self, request, peer, now), alone=False)


def prefill_decides(self: Requests, endpoint: str, ended: Any, now: float) -> None:
    request = self.open.get(ended.room.id)
    if request is not None and request.pair is not None and endpoint == request.pair.prefill:
        endpoint = request.pair.decode
    ON_ENDED(self, endpoint, ended, now)


BREACHES = [
    Breach("tokens that are known are said again", "DESIGN 4, resume", Requests, "_take", known_tokens_again),
    Breach("an older attempt's tokens count", "law 3, M11", Requests, "_current", staticmethod(any_generation)),
    Breach("gaps in a stream are jumped", "DESIGN 4, resume", Requests, "on_output", gaps_are_jumped),
    Breach(
        "a resumed request starts from its prompt", "DESIGN 4, resume", Requests, "_submit", resumed_from_the_prompt
    ),
    Breach("the length is not counted down", "DESIGN 4, resume", Requests, "_submit", length_not_counted_down),
    Breach("a generation is used twice", "law 3, M11", Requests, "_retry", generation_is_reused),
    Breach("missing tokens are taken for the end", "DESIGN 4, resume", Requests, "_unstick", a_missing_token_is_an_end),
    Breach("retryable ends reach the client", "DESIGN 4, resume", Requests, "_on_ended", retryable_ends_end),
    Breach("a charge that comes late is dropped", "DESIGN 4, resume", Requests, "_charge_late", late_charges_are_stale),
    Breach("nobody is charged for a failed step", "DESIGN 4, resume", Requests, "_charge", nobody_is_charged),
    Breach("a culprit's faults stay charged to others", "DESIGN 4, resume", Requests, "_acquit", charges_stay),
    Breach("the twice charged run with others", "DESIGN 4, resume", Requests, "_submit", suspects_among_others),
    Breach("ended attempts stay counted", "law 4, M17", Requests, "_detach", attempts_stay_counted),
    Breach("deadlines are left to the engines", "law 2, M6", Requests, "on_time", deadlines_are_the_engines),
    Breach("a replaced engine goes unnoticed", "law 3, M18", Router, "on_status", restarts_unseen),
    Breach("an old status is fresh", "law 6, M19", Router, "is_silent", an_old_number_is_evidence),
    Breach("prefill's end ends the request", "law 3, M13", Requests, "_on_ended", prefill_decides),
]
