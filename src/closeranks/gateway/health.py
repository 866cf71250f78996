"""Law 6: alive means that work gets done while work is waiting. Pure functions of what is known now."""

from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.gateway.resume import Request
from closeranks.gateway.router import Engine, Router


@dataclass(frozen=True, slots=True)
class Verdict:
    """`ok`, and otherwise why not, each naming engine and rank where one is known."""

    ok: bool
    reasons: tuple[str, ...] = ()


def ready(router: Router, draining: bool, model_error: str, now: float) -> Verdict:
    """Whether tokens can flow: a pair of fresh, ready, matching engines, a tokenizer, and no shutdown."""
    if draining:
        return Verdict(False, ("the gateway is shutting down",))
    if model_error:
        return Verdict(False, (model_error,))
    if router.pairs(now):
        return Verdict(True)
    reasons = [said for engine in router.engines.values() if (said := _absent(engine, router, now))]
    mismatch = router.mismatch()
    if mismatch:
        reasons.append(mismatch)
    return Verdict(False, tuple(reasons) or ("no prefill and decode engine that belong together",))


def health(router: Router, requests: Iterable[Request], bound_s: float, now: float) -> Verdict:
    """Unhealthy if no pair can be seen at all, or if something waits beyond `bound_s` and no work moved for it since.

    Steps are no evidence, an idle engine steps too: work is tokens computed and pages sent, by the engines' own
    counters. What moves elsewhere is no excuse: an engine with running requests must move itself, one whose requests
    only wait must move itself or have a peer that does.
    """
    reasons = []
    if not router.pairs(now):
        reasons += [said for engine in router.engines.values() if (said := _absent(engine, router, now))]
        reasons += [said for said in (router.mismatch(),) if said]
    for engine in router.engines.values():
        status = engine.status
        if status is None:
            continue
        if status.running and now - engine.moved > bound_s:
            said = f"{status.running} requests run and no work moved for {now - engine.moved:.1f} s"
            reasons.append(f"{_name(engine)}: {said}{_rank(engine)}")
        elif status.oldest_wait_s > bound_s and now - (moved := _moved(router, engine.endpoint)) > bound_s:
            said = f"a request waits for {status.oldest_wait_s:.1f} s and no work moved for {now - moved:.1f} s"
            reasons.append(f"{_name(engine)}: {said}{_rank(engine)}")
    stuck = [r for r in requests if now - _progress(router, r) > bound_s]
    if stuck:
        oldest = min(stuck, key=lambda r: r.moved)
        where = [router.engines[endpoint] for endpoint in oldest.pair.endpoints] if oldest.pair else []
        named = ", ".join(f"{_name(engine)}{_rank(engine)}" for engine in where) or "no engine"
        said = f"{len(stuck)} requests without progress, the oldest ({oldest.rid}) for {now - oldest.moved:.1f} s"
        reasons.append(f"{said}, at {named}")
    return Verdict(not reasons, tuple(reasons))


def _moved(router: Router, endpoint: str) -> float:
    """When work last moved in an engine or in one that it is paired with."""
    peers = [e for pair in router.known for e in pair.endpoints if endpoint in pair.endpoints]
    return max(router.engines[e].moved for e in (endpoint, *peers))


def _progress(router: Router, request: Request) -> float:
    """When something last moved for a request: its own token, or, before its first, work in the engines it is at."""
    if request.pair is None or request.spoke:
        return request.moved
    return max(request.moved, *(router.engines[endpoint].moved for endpoint in request.pair.endpoints))


def _absent(engine: Engine, router: Router, now: float) -> str:
    """Why an engine cannot be used; empty if it can."""
    status = engine.status
    if status is None:
        return f"{engine.role} engine at {engine.endpoint}: not heard of yet"
    if router.is_silent(engine.endpoint, now):
        return f"{_name(engine)}: silent for {now - engine.heard:.1f} s{_rank(engine)}"
    if status.state != "ready":
        return f"{_name(engine)}: {status.state}{f', {status.detail}' if status.detail else ''}{_rank(engine)}"
    if not engine.trusted:
        return f"{_name(engine)}: faulted or lost its connection, not heard of since"
    return ""


def _name(engine: Engine) -> str:
    return f"engine {engine.status.engine}" if engine.status else f"engine at {engine.endpoint}"


def _rank(engine: Engine) -> str:
    if engine.status is None or engine.status.slowest_rank < 0:
        return ""
    status = engine.status
    return f" (its open step waits for rank {status.slowest_rank}, for {status.last_progress_s:.1f} s)"
