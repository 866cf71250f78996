"""Hand-overs that fail one after the other: nothing is held anywhere, both sides answer, and no request is served.

After a cut of the link, or when a peer was replaced, every transfer can end in an error at once, for good. Engines
count such ends. They count those that a client gave up among them, so what is followed here is failures beyond
requests that were given up; and a token that comes out of decode begins the count anew, because then the path works.

A run of failures is a suspicion. It is confirmed by requests of our own through the same path that are answered with
an error while the engines count on. What explains failures for a while confirms nothing: a prefill engine that is away,
starting, or has just come back.
"""

from collections.abc import Mapping

import msgspec

from closeranks.watch.limits import Limits
from closeranks.watch.rules import PAUSED, Suspicion, ending, held_back, paused
from closeranks.watch.snapshot import Evidence, Signal
from closeranks.watch.view import View

RISES = 2
"""In so many readings the count must have grown: one burst is one event."""
PROBES = 2
"""So many requests of our own must have failed in a row."""


class Refusals(msgspec.Struct, frozen=True):
    """Failures since the last token of one engine that decodes. Times are monotonic seconds of looks."""

    base: Mapping[str, float] = {}
    """Engine, of this one and those that hand over to it → its count of failures when this run of them began."""
    grown: float = 0.0
    """Failures since then, by the engine that counts most."""
    rises: int = 0
    """Looks that showed more of them than any before."""
    since: float = float("inf")
    """When the first of them was seen."""
    last: float = float("-inf")
    """When the newest was."""
    served: float = float("-inf")
    """When a token was last seen to come; of one that hands over, from those that it hands over to."""
    probes: int = 0
    """Requests of our own since then that were answered with an error, in a row."""
    probed: float = float("-inf")
    """Time of the newest of our own that is counted."""
    blocked: float = float("-inf")
    """When something last explained failures."""
    peers: frozenset[tuple[str, int, int]] | None = None
    """Who hands over to it: name, pid and start time. None: not looked yet."""


def follow(view: View, old: Refusals, limits: Limits) -> Refusals:
    """What is known after one more look at an engine. Of one that hands over to others only the tokens that come of it
    are followed: whether its requests are served is seen where they are decoded."""
    if view.engine.role == "prefill":
        return msgspec.structs.replace(old, served=_served(view, old.served))
    at, signal = view.snapshot.at, _signal(view)
    sides = {side.engine.name: side for side in (view, *view.peers())}
    counts = {n: s.number(signal, "refused") or 0.0 for n, s in sides.items() if s.values(signal) is not None}
    served = _served(view, old.served)
    peers = frozenset((p.engine.name, h.pid, h.start_time) for p in view.peers() if (h := p.engine.head) is not None)
    changed = old.peers is not None and old.peers != peers
    blocked = at if changed or held_back(view) or any(map(_held_up, view.peers())) else old.blocked
    explained = at - blocked < limits.refused_grace_s or _phases(view, ("confirmed", "blind"))
    known = {name: n for name, n in old.base.items() if name in sides}
    if explained or served > old.served or paused(view):
        return Refusals({**known, **counts}, served=served, blocked=blocked, peers=peers)
    base = {**counts, **known}
    now = msgspec.structs.replace(old, base=base, peers=peers)
    grown = max((n - base[name] for name, n in counts.items()), default=0.0)
    if grown > old.grown:
        since = old.since if old.rises else at
        now = msgspec.structs.replace(now, grown=grown, rises=old.rises + 1, since=since, last=at)
    return _probed(view, now)


def _served(view: View, before: float) -> float:
    """When something last came out of the path that an engine is part of. One that hands over makes a token of every
    request, also of those that get no further: what counts are those of the engines that it hands over to; what it
    finished, where they are not in view."""
    prefill = view.engine.role == "prefill"
    ends = [*view.peers()] if prefill else [view]
    tracks = [side.track(_signal(side), "tokens") for side in ends]
    if prefill and not ends:
        tracks = [view.track(_signal(view), "finished")]
    return max([before, *(track.changed for track in tracks if track is not None and track.moved)])


def _probed(view: View, now: Refusals) -> Refusals:
    values = view.values("probe")
    if values is None or float(values["at"]) <= now.probed or float(values["began"]) < now.since:
        return now
    failed = values.get("ok") is False and values.get("answered") is True
    return msgspec.structs.replace(now, probes=now.probes + 1 if failed else 0, probed=float(values["at"]))


def refused(view: View, limits: Limits, seen: Refusals) -> Suspicion:
    """Hand-overs to this engine fail one after the other."""
    at = view.snapshot.at
    few = seen.grown < limits.refused_requests or seen.rises < RISES
    if view.engine.role == "prefill" or few or at - seen.last > limits.refused_quiet_s:
        return Suspicion()
    waited = seen.last - seen.since
    said = f"{int(seen.grown)} hand-overs failed one after the other within {waited:.1f} s, and no token came since"
    sign = Evidence(_signal(view), None, said)
    if paused(view):
        return Suspicion((sign,), excluded=(PAUSED,))
    if not any(True for _ in view.peers()) and at - seen.since < limits.refused_unseen_s:
        unseen = Evidence(_signal(view), None, "the engine that hands over to it is not in view, and may be starting")
        return Suspicion((sign,), excluded=(unseen,))
    probe = _probes_refused(view, seen)
    if probe is None or not all(_well(peer) for peer in view.peers()):
        return Suspicion((sign,))
    return Suspicion((sign, probe), enough=at - seen.since >= limits.refused_s, cls="KV_TRANSFER")


def _signal(view: View) -> Signal:
    return "steps" if view.engine.kind == "closeranks" else "counters"


def _phases(view: View, phases: tuple[str, ...]) -> bool:
    """Whether an engine that hands over to this one is in one of these phases."""
    states = (view.states.get(peer.engine.name) for peer in view.peers())
    return any(state is not None and state.phase in phases for state in states)


def _held_up(peer: View) -> bool:
    """Whether an engine takes no hand-overs by its own state: one that only waits for decode goes on to hand over."""
    state = peer.states.get(peer.engine.name)
    return state is not None and state.phase == "excluded" and bool(held_back(peer) or paused(peer) or ending(peer))


def _well(peer: View) -> bool:
    """Whether nothing else is known against an engine, and something is known of it now."""
    state = peer.states.get(peer.engine.name)
    return state is not None and state.phase == "healthy" and peer.values(_signal(peer)) is not None


def _probes_refused(view: View, seen: Refusals) -> Evidence | None:
    """Requests of our own that were answered, with an error, while engines counted failures."""
    values = view.values("probe")
    if values is None or seen.probes < PROBES or seen.last < float(values["began"]):
        return None
    return Evidence("probe", None, f"requests of its own through the real path fail at once: {values['said']}")
