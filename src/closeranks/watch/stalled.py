"""A loop that turns, holds requests, and advances none: a lost hand-over, a dead helper thread, a peer that is gone.

Alone that is saturation, or a long step of the engine that this one waits for; so it takes a second sign: a failed
request of our own, helper threads. That the peer at the other end of the same transfers stalls too is the same fact
once more: it is told, and is no second sign.
"""

from collections.abc import Callable

from closeranks.watch.limits import Limits
from closeranks.watch.rules import PAUSED, Suspicion, paused, runs, still_s
from closeranks.watch.snapshot import Blind, Evidence
from closeranks.watch.view import View


def stalled(view: View, limits: Limits, pace_s: float | None) -> Suspicion:
    """The loop turns, requests are held, and none advances. `pace_s`: the longest healthy wait that is known."""
    if view.engine.kind == "closeranks":
        return _own_stalled(view, limits)
    waited = stalled_s(view)
    if waited < limits.stalled_suspect_s or not _loop_lives(view):
        return Suspicion()
    held = _held_words(view)
    sign = Evidence("counters", None, f"{held}, and no token, prompt or request advanced for {waited:.1f} s")
    if paused(view):
        return Suspicion((sign,), excluded=(PAUSED,))
    explained = _explained_by_peer(view, limits)
    if explained is not None:
        return Suspicion((sign,), excluded=(explained,))
    lacks = _helper_lacks(view)
    compiles, fresh = _compiles(view, limits, waited)
    if compiles is not None and lacks is None:
        return Suspicion((sign,), excluded=(compiles,) if fresh else ())  # an old dump asks for a new one
    if waited < limits.stalled_s:
        return Suspicion((sign,))
    long = _outlasts_an_unseen_prefill(view, limits, waited, pace_s)
    seconds: list[Callable[[], Evidence | None]] = [
        lambda: probe_failed(view, waited) if long else None,
        lambda: lacks,
        lambda: _helpers_stand(view) if long else None,
    ]
    found = [evidence for ask in seconds if (evidence := ask()) is not None]
    both_ends = _peer_stalls_too(view, limits)
    signs = (sign, *found) if both_ends is None else (sign, both_ends, *found)
    return Suspicion(signs, enough=bool(found), cls=_class_of(view), holds=True)


_ON_THE_WAY = ("bootstrap", "inflight", "prealloc", "transfer")
"""Queues of requests between two engines."""


def _class_of(view: View) -> str:
    """What the stall is where a diagnosis finds the engine well: at least no sound one."""
    counts = (side.number("counters", name) or 0 for side in (view, *view.peers()) for name in _ON_THE_WAY)
    return "KV_TRANSFER" if any(count > 0 for count in counts) else "UNDETERMINED"


LOOKED_AT_S = 25.0
"""Stacks tell for so long what an engine does; under suspicion they are taken again sooner."""


def _compiles(view: View, limits: Limits, waited: float) -> tuple[Evidence | None, bool]:
    """Whether its ranks compiled kernels when they were last dumped within the stall, and whether that was just now."""
    values = view.snapshot.readings.get("stacks", {}).get(view.engine.name)
    if values is None or isinstance(values, Blind) or values.get("compiling") is not True:
        return None, False
    ago = view.snapshot.at - float(values["began"])
    if ago > waited or waited > limits.compile_s:
        return None, False
    return Evidence("stacks", None, f"it compiles kernels, by its stacks: {values['places']}"), ago <= LOOKED_AT_S


def _own_stalled(view: View, limits: Limits) -> Suspicion:
    """closeranks: it steps, holds requests and moves nothing; its gateway, which knows each request, must agree."""
    holds = sum(view.number("steps", name) or 0 for name in ("running", "waiting"))
    tracks = [t for name in ("tokens", "prefilled", "transfers") if (t := view.track("steps", name)) is not None]
    waited = min((t.flat_s for t in tracks), default=0.0)
    if not holds or waited < limits.stalled_s:
        return Suspicion()
    signs = [
        Evidence("steps", None, f"{int(holds)} requests are in it and nothing was computed or sent for {waited:.1f} s")
    ]
    reasons = view.text("steps", "unhealthy")
    if reasons:
        signs.append(Evidence("http", None, f"its gateway's /health answers 503: {reasons}"))
    return Suspicion(tuple(signs), enough=bool(reasons))


_ADVANCES = ("tokens", "finished", "prompted", "worked")
"""Fields that grow where requests advance."""


def stalled_s(view: View) -> float:
    """For how long requests are held and nothing advances, by the counters; 0 when that is not known.

    While a prefill engine hands over, only what it finishes is an advance: where nobody sends any more, it goes on to
    make a token of every request that comes, and clients that give up come again.
    """
    held = view.track("counters", "held")
    if held is None or held.value is not True:
        return 0.0
    flats = [t.flat_s for name in _ADVANCES if (t := view.track("counters", name)) is not None]
    waited = min([held.flat_s, *flats]) if flats else 0.0
    sends, finished = view.track("counters", "sends"), view.track("counters", "finished")
    if view.engine.role == "prefill" and sends is not None and sends.value is True and finished is not None:
        return max(waited, min(sends.flat_s, finished.flat_s))
    return waited


def advances(view: View, limits: Limits) -> bool:
    """Whether nothing is held, or tokens came lately. In a stall the loop turns all the time, and what clients give up
    counts as finished, with its prompt: a confirmed engine has not moved by that."""
    held, tokens = view.track("counters", "held"), view.track("counters", "tokens")
    return held is None or held.value is not True or tokens is None or tokens.flat_s < limits.again_s


def empty_s(view: View) -> float:
    """For how long an engine has held no request. Between clients that give up and the next ones it is a moment."""
    held = view.track("counters", "held")
    return held.flat_s if held is not None and held.value is False else 0.0


def stalling(view: View) -> bool:
    """Whether two readings in a row held requests without an advance: the next ones are worth reading sooner."""
    held, tokens = view.track("counters", "held"), view.track("counters", "tokens")
    return held is not None and held.value is True and tokens is not None and tokens.looks >= 2


def _held_words(view: View) -> str:
    names = {"running": "running", "waiting": "waiting", "bootstrap": "in bootstrap", "inflight": "in flight",
             "prealloc": "waiting for pages", "transfer": "in transfer"}  # fmt: skip
    counts = [f"{int(n)} {said}" for name, said in names.items() if (n := view.number("counters", name) or 0) > 0]
    return f"requests are held ({', '.join(counts)})"


def _loop_lives(view: View) -> bool:
    """Whether the loop turns: a loop that stands is the business of `stands`."""
    now = view.snapshot.at
    busy = view.busy()
    if busy:
        return all(t.moved and now - t.changed <= 3.5 for t in busy)
    return any(runs(view, p) for p in view.engine.deciders)


def _explained_by_peer(view: View, limits: Limits) -> Evidence | None:
    """A victim shows symptoms; the engine that it waits for has the cause, or is at work."""
    for peer in view.peers():
        state = view.states.get(peer.engine.name)
        if state is not None and state.phase == "confirmed":
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is confirmed as faulty")
        if still_s(peer) >= limits.still_s and peer.engine.kind != "vllm":
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which stands")
        stuck = stalled_s(peer) >= limits.stalled_s  # it computes on what comes, and nothing of that gets out of it
        fields = [name for name in _ADVANCES if name != "worked" or not stuck]
        tracks = [t for name in fields if (t := peer.track("counters", name)) is not None]
        if any(t.moved and view.snapshot.at - t.changed <= limits.stalled_s for t in tracks):
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is at work")
        if _compiles(peer, limits, LOOKED_AT_S)[1]:
            return Evidence("stacks", None, f"it waits for {peer.engine.name}, which compiles kernels")
        busy = peer.busy()
        computes = any(runs(peer, p) for p in peer.engine.deciders)
        if busy and computes and all(view.snapshot.at - t.changed > 3 for t in busy):
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is in one long step")
    return None


def probe_failed(view: View, waited: float) -> Evidence | None:
    """A request through the real path that began within the stall and did not end; with live counters: overload."""
    values = view.values("probe")
    if values is None or values.get("ok") is not False:
        return None
    if float(values["began"]) < view.snapshot.at - waited - 1:
        return None
    return Evidence("probe", None, f"a request of its own through the real path failed: {values['said']}")


def _peer_stalls_too(view: View, limits: Limits) -> Evidence | None:
    """Prefill has computed and cannot hand over, decode waits for it: a slow link as well as a lost one."""
    for peer in view.peers():
        pair = (view, peer) if view.engine.role == "prefill" else (peer, view)
        sent, due = pair[0].number("counters", "inflight"), pair[1].number("counters", "transfer")
        if stalled_s(peer) >= limits.stalled_s and (sent or 0) > 0 and (due or 0) > 0:
            said = f"by its own counters {peer.engine.name} holds requests in the same transfer, and none ends"
            return Evidence("counters", None, said)
    return None


def _helper_lacks(view: View) -> Evidence | None:
    lacks = view.text("stacks", "lacks")
    return Evidence("stacks", None, f"a helper thread that its role needs is missing: {lacks}") if lacks else None


def _helpers_stand(view: View) -> Evidence | None:
    """The threads that move KV did nothing between two dumps."""
    if not view.says("stacks", "transfer_still"):
        return None
    return Evidence("stacks", None, "its transfer threads did nothing between two dumps")


def _outlasts_an_unseen_prefill(view: View, limits: Limits, waited: float, pace_s: float | None) -> bool:
    """Whether no healthy prefill engine elsewhere explains the stall.

    While one computes a long prompt, transfer threads stand and a probe of the same path does not end either. So these
    count once the stall is long beside the longest healthy wait of this engine, or prefill is in view and was found not
    at work. An engine that does both itself has nobody to wait for; of vLLM's, which may be called both in a pair, that
    is not known.
    """
    alone = view.engine.role == "both" and view.engine.kind != "vllm"
    if alone or any(True for _ in view.peers()):
        return True
    bound = limits.stalled_unseen_s if pace_s is None else max(limits.stalled_s, 3 * pace_s)
    return waited >= min(bound, limits.stalled_unseen_s)
