"""Requests that outlive engines. Sans-IO: events and clock readings in, messages for leaders (`outbox`) out.

A request *is* its prompt tokens, its emitted tokens and its sampling state. An *attempt* is one hand-over of it to a
pair of engines, named by the room (id, generation). Draws are a function of (seed, position), so an attempt that
starts after the emitted tokens continues the same stream. The rules, event by event:

===========================================  =====================================================================
event, for an open request                   what follows
===========================================  =====================================================================
Tokens of this generation, next index        emitted; from now on the prefill engine no longer matters (`spoke`)
Tokens that overlap emitted ones             the known part is dropped
Tokens beyond the next index                 kept; if the gap is not filled within `gap_s`: next attempt
Tokens, Ended of another generation          dropped, counted as stale; a charge counts all the same
Ended `stop`/`length` by decode              the request ends; if tokens are missing: as a gap
Ended `stop`/`length` by prefill             nothing: its part is done
any Ended, new instance, silence by prefill  after `spoke`: nothing; before: as by decode
Ended retryable                              next attempt
Ended charged                                counted, once per attempt; twice: it runs alone; then, alone, once
                                             more: the request ends (poison), and the faults in which it was are
                                             no other's
Ended `busy`, nothing emitted yet            the other pairs, then the request ends (busy)
Ended `abort`, not asked for                 (a lapsed lease) next attempt
Ended otherwise                              the request ends with that reason
engine shows a new instance                  next attempt
no Status for `silence_s`, link lost         next attempt
Status with fewer rooms than run there       next attempt of as many as are missing, the longest without a token first
complete, but no Ended within `gap_s`        the request ends
runs alone for what was another's doing      next attempt, once a pair is usable
deadline                                     the request ends
no usable pair for `engine_wait_s`           the request ends
===========================================  =====================================================================

Before a next attempt both leaders are told to abort the old one; repeated attempts without a token back off.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from closeranks.gateway.router import Pair, Router
from closeranks.protocol import Abort, Ended, Output, RoomId, Sampling, Status, Submit, ToEngine, Tokens, TopLogprobs

ALONE_AFTER = 2
"""Charged this often, a request runs alone; charged once more then, it ends."""
GAPS = 5
"""Attempts in a row without a token that may be spent on lost messages."""
SETTLED_S = 2.0
"""Age of a submit that a Status must know of, if it arrived."""
BACK_OFF_S = 2.0
"""Longest pause between attempts."""


Life = tuple[str, int]
"""Endpoint and instance: an epoch of an engine, which ends by one fault."""


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended. `reason`: those of `protocol.Ended`, or `poison`, `no_engine`, `shutdown`."""

    reason: str
    detail: str = ""
    retry_after_s: float = 0.0
    cached_tokens: int = 0


class Sink(Protocol):
    """Who gets the tokens: each once, in order, then exactly one end."""

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None: ...

    def on_end(self, end: End) -> None: ...


@dataclass(slots=True)
class Request:
    """One request with its state. The first block is given, the second is the table's."""

    id: int
    """Random 63 bits, unique in the deployment."""
    rid: str
    tokens: list[int]
    """Prompt, then what was emitted."""
    prompt_length: int
    max_new_tokens: int
    sampling: Sampling
    stop_ids: list[int]
    deadline: float
    """Clock reading."""
    sink: Sink

    generation: int = 0
    pair: Pair | None = None
    """Where the current attempt runs; None: it waits for one."""
    tried: Pair | None = None
    """Where the last attempt ran."""
    spoke: bool = False
    """The decode engine has sent a token in this attempt."""
    early: dict[int, Tokens] = field(default_factory=dict)
    held: Ended | None = None
    """An end that came before the tokens it closes."""
    stuck_since: float = math.inf
    """When something was first found missing: tokens, or the end."""
    charges: dict[int, Life | None] = field(default_factory=dict)
    """Attempts that were charged, and where; None: that fault was another's. Both engines of a pair may charge one,
    also after the next has begun."""
    lone: set[int] = field(default_factory=set)
    """Attempts that share no step with another request."""
    began: float = 0.0
    """When the current attempt was submitted."""
    fails: int = 0
    """Attempts in a row that ended without a token."""
    refused: int = 0
    retry_at: float = 0.0
    waits_since: float = 0.0
    moved: float = 0.0
    """When it was taken on, or last got a token."""
    cached_tokens: int = 0

    @property
    def suspect(self) -> bool:
        """It must run alone: charged that often, and not for what others did each time."""
        return len(self.charges) >= ALONE_AFTER and any(self.charges.values())

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def complete(self) -> bool:
        """Nothing more can come, whether or not the end was seen."""
        return self.emitted > 0 and (self.emitted >= self.max_new_tokens or self.tokens[-1] in self.stop_ids)


class Requests:
    """All open requests of a gateway."""

    def __init__(self, router: Router, *, gap_s: float = 1.0, engine_wait_s: float = 120.0) -> None:
        self.router = router
        self.outbox: list[tuple[str, ToEngine]] = []
        """(endpoint, message), oldest first; whoever drives this object sends and clears them."""
        self.open: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()
        """`output_tokens`, `stale_messages`, `duplicate_tokens`, `attempts`, and `resumed_WHY`."""
        self._gap_s = gap_s
        self._engine_wait_s = engine_wait_s
        self._waiting: dict[int, Request] = {}

    # ---- from the client's side

    def start(self, request: Request, now: float) -> None:
        """Take a request on; its sink hears its end even if no engine ever comes."""
        if request.id in self.open:
            raise ValueError(f"room id {request.id:016x} is in use")
        self.open[request.id] = request
        request.moved = now
        self._wait(request, now)
        self._dispatch(request, now)

    def abort(self, request_id: int, reason: str) -> None:
        """The client has enough (gone, or a stop string): both leaders are told, the sink hears nothing more."""
        request = self.open.get(request_id)
        if request is not None:
            self._abandon(request, reason)
            self._forget(request)

    def end(self, request_id: int, end: End) -> None:
        """End a request from this side, telling its sink and both leaders."""
        request = self.open.get(request_id)
        if request is not None:
            self._abandon(request, end.reason)
            self._finish(request, end)

    @property
    def waiting(self) -> int:
        """Requests that run nowhere at the moment."""
        return len(self._waiting)

    # ---- from the engines' side

    def on_output(self, endpoint: str, output: Output, now: float) -> None:
        for row in output.tokens:
            request = self.open.get(row.room.id)
            if request is None or not self._current(request, row.room, endpoint) or request.pair.decode != endpoint:  # type: ignore[union-attr]
                self.counts["stale_messages"] += 1
                continue
            expected = len(request.tokens)
            if row.index > expected:
                request.early[row.index] = row
                request.stuck_since = min(request.stuck_since, now)
                continue
            self._take(request, row, now)
            if request.early:
                self._take_early(request, now)
        for ended in output.ended:
            self._on_ended(endpoint, ended, now)

    def on_status(self, endpoint: str, status: Status, now: float) -> None:
        if self.router.on_status(endpoint, status, now):
            self._leave(endpoint, now, "restart")
        elif status.state == "ready":
            self._recover_lost(endpoint, status.rooms_open, now)
        if self._waiting and self.router.usable(endpoint, now):
            for request in list(self._waiting.values()):
                if request.retry_at <= now:
                    self._dispatch(request, now)

    def on_link_lost(self, endpoint: str, now: float) -> None:
        """The connection broke: messages may be lost in either direction, so nothing that ran over it is sure."""
        self.router.doubt(endpoint)
        self._leave(endpoint, now, "link")

    def on_time(self, now: float) -> None:
        """Call several times a second."""
        silent = {e for e in self.router.engines if self.router.is_silent(e, now)}
        usable = bool(self.router.pairs(now))
        for request in list(self.open.values()):
            if now >= request.deadline:
                self.end(request.id, End("deadline", "the request's time is over"))
            elif request.pair is None:
                if usable:
                    request.waits_since = now
                    if request.retry_at <= now:
                        self._dispatch(request, now)
                elif now - request.waits_since > self._engine_wait_s:
                    said = self.router.mismatch() or "no engine can take the request"
                    self._finish(request, End("no_engine", said, retry_after_s=5.0))
            elif request.pair.decode in silent or (request.pair.prefill in silent and not request.spoke):
                self._retry(request, now, "silence")
            elif now - request.stuck_since > self._gap_s:
                self._unstick(request, now)
            elif usable and request.generation in request.lone and not request.suspect:
                self._retry(request, now, "acquitted")

    # ---- inside

    @staticmethod
    def _current(request: Request, room: RoomId, endpoint: str) -> bool:
        pair = request.pair
        return pair is not None and room.generation == request.generation and endpoint in (pair.decode, pair.prefill)

    def _take(self, request: Request, row: Tokens, now: float) -> None:
        """Emit the new part of `row`, which starts at or before the next index."""
        tokens, logprobs = row.tokens, row.logprobs
        known = len(request.tokens) - row.index
        if known:
            self.counts["duplicate_tokens"] += min(known, len(tokens))
            tokens, logprobs = tokens[known:], logprobs[known:]
        room = request.max_new_tokens - request.emitted
        if len(tokens) > room:
            tokens, logprobs = tokens[:room], logprobs[:room]
        if not tokens:
            return
        request.spoke = True
        request.fails = 0
        request.moved = now
        request.tokens += tokens
        self.counts["output_tokens"] += len(tokens)
        if len(tokens) == room or tokens[-1] in request.stop_ids:
            request.stuck_since = min(request.stuck_since, now)  # the end is due
        request.sink.on_tokens(tokens, logprobs)

    def _take_early(self, request: Request, now: float) -> None:
        """After a gap was filled: what waits behind it."""
        while request.early and request.id in self.open:
            index = min(request.early)
            if index > len(request.tokens):
                return
            self._take(request, request.early.pop(index), now)
        if request.id not in self.open:
            return
        if not request.complete and request.held is None:
            request.stuck_since = math.inf
        elif request.complete and request.held is not None:
            self._finish(request, self._said(request, request.held))

    def _on_ended(self, endpoint: str, ended: Ended, now: float) -> None:
        request = self.open.get(ended.room.id)
        if request is None or not self._current(request, ended.room, endpoint):
            self.counts["stale_messages"] += 1
            if request is not None and ended.charged:
                self._charge_late(request, endpoint, ended, now)
            return
        assert request.pair is not None
        request.cached_tokens = max(request.cached_tokens, ended.cached_tokens)
        done = ended.reason in ("stop", "length") and not ended.retryable
        if endpoint != request.pair.decode and (request.spoke or done):
            return
        if done:
            if request.complete or (ended.reason == "stop" and not request.stop_ids and not request.early):
                self._finish(request, self._said(request, ended))
            else:
                request.held = ended
                request.stuck_since = min(request.stuck_since, now)
            return
        if ended.reason == "busy" and not request.emitted:
            request.refused += 1
            if request.refused >= len(self.router.pairs(now)):
                self._abandon(request, "busy")
                self._finish(request, self._said(request, ended))
                return
        elif not ended.retryable and ended.reason != "abort":
            self._abandon(request, ended.reason)
            self._finish(request, self._said(request, ended))
            return
        if ended.reason == "fault":
            self.router.doubt(endpoint)
        if ended.charged and self._charge(request, endpoint, ended):
            return
        self._retry(request, now, ended.reason, ended.retry_after_s)

    def _charge(self, request: Request, endpoint: str, ended: Ended) -> bool:
        """An attempt was in a step that failed. True: it was alone there, so the request has ended."""
        generation = ended.room.generation
        if generation in request.charges:
            return False
        status = self.router.engines[endpoint].status
        request.charges[generation] = (endpoint, status.instance if status else 0)
        if generation not in request.lone:
            return False
        said = f"request {request.rid} was in a step that failed {len(request.charges)} times, the last one alone"
        self._abandon(request, "poison")
        self._finish(request, End("poison", f"{said}: {ended.detail}" if ended.detail else said))
        self._acquit(set(request.charges.values()))
        return True

    def _acquit(self, explained: set[Life | None]) -> None:
        """These faults had a culprit: nobody else is charged for them."""
        for request in self.open.values():
            for generation, life in request.charges.items():
                if life in explained:
                    request.charges[generation] = None

    def _charge_late(self, request: Request, endpoint: str, ended: Ended, now: float) -> None:
        """The other engine's word came first, and the next attempt has begun: it must be alone if this one says so."""
        if self._charge(request, endpoint, ended) or request.pair is None:
            return
        if request.suspect and request.generation not in request.lone:
            self._retry(request, now, "charged")

    def _leave(self, endpoint: str, now: float, why: str) -> None:
        """Whatever ran on `endpoint` is gone."""
        for request in list(self.open.values()):
            pair = request.pair
            if pair and (endpoint == pair.decode or (endpoint == pair.prefill and not request.spoke)):
                self._retry(request, now, why)

    def _recover_lost(self, endpoint: str, rooms: int, now: float) -> None:
        """An engine that has fewer rooms than we submitted a while ago has ended some, and its word of it was lost."""
        before = now - SETTLED_S
        old = [r for r in self.open.values() if r.pair and r.pair.decode == endpoint and r.began < before]
        missing = len(old) - rooms
        if missing > 0:
            suspects = [r for r in old if r.moved < before]
            for request in sorted(suspects, key=lambda r: r.moved)[:missing]:
                self._retry(request, now, "lost")

    def _unstick(self, request: Request, now: float) -> None:
        """Something was missing for `gap_s`: the end, or tokens."""
        if request.complete:
            self._abandon(request, "complete")
            reason = "stop" if request.tokens[-1] in request.stop_ids else "length"
            self._finish(request, End(reason, cached_tokens=request.cached_tokens))
        elif request.held is not None and request.held.reason == "length" and not request.early:
            self._finish(request, self._said(request, request.held))  # the engine's own limit, below ours
        elif request.fails >= GAPS:
            self._abandon(request, "lost")
            self._finish(request, End("fault", f"tokens of the request were lost in {GAPS} attempts in a row"))
        else:
            self._retry(request, now, "gap")

    def _retry(self, request: Request, now: float, why: str, after_s: float = 0.0) -> None:
        if request.complete:  # nothing is left to be computed
            self._unstick(request, now)
            return
        self._abandon(request, "superseded")
        self.counts["resumed_" + why] += 1
        pause = 0.0 if not request.fails else min(BACK_OFF_S, 0.05 * 2.0 ** min(request.fails, 10))
        request.fails += 1
        request.retry_at = now + max(after_s, pause)
        self._wait(request, now)
        if request.retry_at <= now:
            self._dispatch(request, now)

    def _wait(self, request: Request, now: float) -> None:
        request.waits_since = now
        self._waiting[request.id] = request

    def _dispatch(self, request: Request, now: float) -> None:
        """Begin the next attempt, if a pair is usable."""
        if now >= request.deadline:
            return  # `on_time` ends it
        avoid = request.tried if request.fails or request.refused else None
        pair = self.router.choose(request.tokens, now, avoid)
        if pair is None:
            return
        del self._waiting[request.id]
        request.generation += 1
        request.pair = request.tried = pair
        request.began = now
        request.spoke = False
        request.held = None
        request.stuck_since = math.inf
        request.early.clear()
        if request.suspect:
            request.lone.add(request.generation)
        self.counts["attempts"] += 1
        for endpoint in pair.endpoints:
            self.router.engines[endpoint].open += 1
            self.outbox.append((endpoint, self._submit(request, pair.peer(endpoint), now)))

    def _submit(self, request: Request, peer: str, now: float) -> Submit:
        return Submit(
            room=RoomId(request.id, request.generation),
            rid=request.rid,
            tokens=request.tokens.copy(),
            prompt_length=request.prompt_length,
            max_new_tokens=request.max_new_tokens - request.emitted,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            deadline_s=request.deadline - now,
            peer=peer,
            alone=request.generation in request.lone,
        )

    def _abandon(self, request: Request, reason: str) -> None:
        """Tell the leaders of the current attempt, if there is one, that it is over."""
        if request.pair is not None:
            room = RoomId(request.id, request.generation)
            self.outbox.extend((endpoint, Abort(room, reason)) for endpoint in request.pair.endpoints)
            self._detach(request)

    def _detach(self, request: Request) -> None:
        if request.pair is not None:
            for endpoint in request.pair.endpoints:
                self.router.engines[endpoint].open -= 1
            request.pair = None

    def _forget(self, request: Request) -> None:
        self._detach(request)
        self._waiting.pop(request.id, None)
        del self.open[request.id]

    def _finish(self, request: Request, end: End) -> None:
        self._forget(request)
        request.sink.on_end(end)

    @staticmethod
    def _said(request: Request, ended: Ended) -> End:
        return End(ended.reason, ended.detail, ended.retry_after_s, request.cached_tokens)
