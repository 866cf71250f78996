"""What one look shows of one engine: proofs, signs, exclusions, and signs of life. Pure functions of a `View`.

A *proof* (a death, a raised error, a part stopped by a signal) confirms alone. A *sign* is an inference and needs a
second from another signal, or from the engine at the other end of a transfer. Four suspicions have signs:

    stands    no main thread of any rank runs                        /proc + counters, or + identical stacks twice
    spins     the loop stands while the devices are busy             counters + GPU
    stalled   the loop turns, requests are held and none advances    counters + probe, peer, helper threads
    unheard   the port accepts, nothing answers                      HTTP + /proc of the frontend

A live loop's stacks can look like a desync, a saturated pair fails probes, vLLM's processes stand still when idle, and
`/health` answers 200 through most wedges: none of these decides anything here by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from closeranks.watch.limits import Limits
from closeranks.watch.snapshot import Blind, Evidence, Proc, Signal
from closeranks.watch.tracks import AFTER_DUMP_S
from closeranks.watch.view import View


@dataclass(frozen=True)
class Suspicion:
    """One suspicion: its signs, whether they suffice, and why it is none after all (`excluded`)."""

    signs: tuple[Evidence, ...] = ()
    enough: bool = False
    excluded: tuple[Evidence, ...] = ()

    @property
    def open(self) -> bool:
        """Whether there is anything to look closer at."""
        return bool(self.signs) and not self.excluded


# --- life and readiness ---------------------------------------------------------------------------------------------


def ready(view: View) -> bool:
    """Whether the engine has served or said that it can in this life."""
    if view.says("log", "ready"):
        return True
    if view.number("steps", "steps") or any(
        view.number("counters", name) for name in ("tokens", "finished", "running")
    ):
        return True
    return any(float(track.value) > 0 for track in view.busy())


def readable(view: View) -> bool:
    """Whether anything could tell that it is ready."""
    return any(view.values(signal) is not None for signal in ("log", "counters", "steps", "loads"))


def alive(view: View) -> tuple[Evidence, ...]:
    """Signs that the engine does something, or has nothing to do."""
    found = []
    now = view.snapshot.at
    if any(now - track.changed <= 4 and track.moved for track in view.busy()):
        found.append(Evidence("counters", None, "its scheduler's seconds grow"))
    tokens = view.track("counters", "tokens")
    if tokens is not None and tokens.moved and now - tokens.changed <= 4:
        found.append(Evidence("counters", None, "tokens are generated"))
    steps = view.track("steps", "steps")
    if steps is not None and steps.moved and now - steps.changed <= 4:
        found.append(Evidence("steps", None, "its step counter grows"))
    if threads_run(view) and sees_work(view):
        found.append(Evidence("proc", None, "the main threads of all ranks run"))
    if view.engine.kind in ("vllm", "trtllm") and no_work(view):  # others' loops turn without work too
        found.append(Evidence("counters", None, "no request is in it"))
    return tuple(found)


def threads_run(view: View) -> bool:
    """Whether every rank's main thread does something. That alone is no health: a loop turns without work done too."""
    return bool(view.engine.deciders) and all(_runs(view, p) for p in view.engine.deciders)


def sees_work(view: View) -> bool:
    """Whether anything that counts work has been read lately: without it a stall could not be seen."""
    fields: tuple[tuple[Signal, str], ...] = (("counters", "held"), ("steps", "steps"), ("loads", "heartbeat"))
    return any(view.track(signal, field) is not None for signal, field in fields)


def _runs(view: View, process: Proc) -> bool:
    now = view.snapshot.at
    tracks = [view.proc_track(process, name) for name in ("switches", "ticks")]
    return any(t is not None and t.moved and now - t.changed <= 3 for t in tracks)


def no_work(view: View) -> bool:
    """The engine's counters say that it holds no request."""
    values = view.values("counters")
    return values is not None and "running" in values and values.get("held") is False


# --- proofs ---------------------------------------------------------------------------------------------------------


def proofs(view: View, limits: Limits) -> tuple[Evidence, ...]:
    """What confirms alone and for the life of the engine: a dead process, a raised error."""
    found = []
    named = view.engine.parts
    state = {p: view.text("proc", "state", f"{view.engine.name}/{p.label}") for p in named}
    dead = [p for p in named if state[p] in ("X", "Z")]
    patience = limits.dead_s if view.values("log") is not None else limits.dead_unlogged_s
    if len(dead) == len(named):  # the whole engine went; only helpers are left
        patience = limits.gone_s
    for process in dead:
        track = view.proc_track(process, "state")
        if track is not None and track.last - track.changed >= patience:
            how = "is a zombie" if state[process] == "Z" else "is gone"
            found.append(Evidence("proc", process.label, f"{process.label} ({process.title}, pid {process.pid}) {how}"))
    crash, thread = view.text("log", "crash"), view.text("log", "thread")
    if crash:
        found.append(Evidence("log", None, f"its log says: {crash}"))
    if thread:
        found.append(Evidence("log", None, f"its log says: the helper thread {thread} ended by an exception"))
    return tuple(found)


def stopped(view: View, limits: Limits) -> tuple[Evidence, ...]:
    """What confirms alone as long as it lasts: a part of the engine is stopped by a signal, others are not."""
    found = []
    named = view.engine.parts
    state = {p: view.text("proc", "state", f"{view.engine.name}/{p.label}") for p in named}
    stopped = [p for p in named if state[p] == "T"]
    if len(stopped) < len([p for p in named if state[p] not in ("", "X", "Z")]):
        for process in stopped:
            if view.flat_s("proc", "state", f"{view.engine.name}/{process.label}") >= limits.stopped_s:
                said = f"{process.label} (pid {process.pid}) is stopped by a signal, others of its engine are not"
                found.append(Evidence("proc", process.label, said))
    return tuple(found)


# --- exclusions -----------------------------------------------------------------------------------------------------

UPDATE_S = 600.0
"""An exchange of weights that the log says has begun is believed for so long."""


def held_back(view: View) -> tuple[Evidence, ...]:
    """Why the whole engine is not to be judged now: frozen, traced, still starting, weights being exchanged."""
    found = []
    state = [view.text("proc", "state", f"{view.engine.name}/{p.label}") for p in view.engine.deciders]
    if state and all(s == "T" for s in state):
        found.append(Evidence("proc", None, "all its processes are stopped (SIGSTOP): nothing is served until SIGCONT"))
    if any(view.says("proc", "frozen", f"{view.engine.name}/{p.label}") for p in view.engine.procs):
        found.append(Evidence("proc", None, "its cgroup is frozen: nothing is served until it is thawed"))
    if "t" in state and view.snapshot.disturbed.get(view.engine.name, float("-inf")) < view.snapshot.at - 5:
        found.append(Evidence("proc", None, "a debugger holds one of its processes"))
    if not ready(view) and readable(view):
        found.append(Evidence("log", None, "it is starting: it has not said that it is ready, and nothing was served"))
    if view.says("log", "updating") and view.flat_s("log", "updating") < UPDATE_S:
        found.append(Evidence("log", None, "its weights are being exchanged"))
    return tuple(found)


PAUSED = Evidence("log", None, "its generation is paused, by an operator's order")


def paused(view: View) -> bool:
    """Whether requests are kept and none is to run."""
    return view.says("log", "paused") or (view.number("counters", "paused") or 0) > 0


def ending(view: View) -> bool:
    """Whether its log says that it was asked to end."""
    return view.says("log", "ending")


# --- suspicions -----------------------------------------------------------------------------------------------------


def stands(view: View, limits: Limits) -> Suspicion:
    """No main thread of any rank runs."""
    still = still_s(view)
    if still < limits.still_s:
        return Suspicion()
    vllm = view.engine.kind == "vllm"
    counted, contradicted = _counters_stand(view, limits)
    if contradicted or (vllm and counted is None):
        return Suspicion()  # vLLM's processes stand still whenever there is nothing to do
    signs = [Evidence("proc", None, f"no main thread of its {len(view.engine.deciders)} ranks ran for {still:.1f} s")]
    if counted is not None:
        signs.append(counted)
    stacks = _stacks(view, still)
    if stacks is None:
        if "stacks" in {b.partition(":")[0] for b in view.blind()}:
            waited = still >= limits.still_alone_s and counted is not None
            return Suspicion(tuple(signs), waited and (not vllm or _probe_failed(view, still) is not None))
        return Suspicion(tuple(signs))
    sign, excluded = stacks
    if excluded is not None:
        return Suspicion(tuple(signs), excluded=(excluded,))
    if sign is None:
        return Suspicion(tuple(signs))
    slow = view.says("stacks", "slow") and still < limits.slow_s and not _spinning(view)
    return Suspicion((*signs, sign), enough=not slow)


def still_s(view: View) -> float:
    """For how long no main thread of any rank has run; 0 when one runs, waits for the CPU, or cannot be read."""
    shortest = float("inf")
    dumped = view.snapshot.disturbed.get(view.engine.name, float("-inf")) + AFTER_DUMP_S
    for process in view.engine.deciders:
        values = view.proc(process)
        state = values.get("state") if values is not None else None
        if state in ("X", "Z"):
            continue  # a dead one is a proof of its own
        if values is None or (state not in ("S", "D", "T", "I") and float(values["at"]) > dumped):
            return 0.0
        for field in ("switches", "ticks"):
            track = view.proc_track(process, field)
            shortest = min(shortest, track.flat_s if track is not None else 0.0)
    return 0.0 if shortest == float("inf") else shortest


def _counters_stand(view: View, limits: Limits) -> tuple[Evidence | None, bool]:
    """A second sign beside /proc, from the engine's own numbers; and whether they contradict it."""
    busy = view.busy()
    if busy:
        flat = min(track.flat_s for track in busy)
        if any(view.snapshot.at - track.changed < limits.still_s and track.moved for track in busy):
            return None, True
        if flat >= limits.still_s:
            return Evidence("counters", None, f"the scheduler seconds of all ranks stand for {flat:.1f} s"), False
    steps = view.track("steps", "steps")
    if steps is not None:
        if steps.flat_s >= limits.still_s + 1:
            return Evidence("steps", None, f"its step counter stands for {steps.flat_s:.1f} s"), False
        return None, steps.moved and view.snapshot.at - steps.changed < limits.still_s
    beat = view.flat_s("loads", "heartbeat")
    if beat >= limits.heartbeat_s:
        return Evidence("loads", None, f"the scheduler's heartbeat stands for {beat:.0f} s"), False
    tokens = view.flat_s("counters", "tokens")
    if not busy and (view.number("counters", "running") or 0) > 0 and tokens >= limits.still_s:
        count = int(view.number("counters", "running") or 0)
        return Evidence("counters", None, f"{count} requests run and no token came for {tokens:.1f} s"), False
    return None, False


def _stacks(view: View, still: float) -> tuple[Evidence | None, Evidence | None] | None:
    """(sign, exclusion) of two rounds of dumps that lie within the stillness; None: there are none such."""
    values = view.values("stacks")
    if values is None or float(values["began"]) < view.snapshot.at - still - FUZZ_S:
        return None
    places = str(values["places"])
    if values["startup"]:
        return None, Evidence("stacks", None, f"it is starting, by its stacks: {places}")
    if values["updating"]:
        return None, Evidence("stacks", None, f"its weights are being loaded, by its stacks: {places}")
    if values["idle"]:
        return None, Evidence("stacks", None, f"it waits for work, by its stacks: {places}")
    if not (values["same"] and values["still"]):
        return None, None
    seconds = float(values["seconds"])
    said = f"identical stacks twice, and between the dumps {seconds:.1f} s without a switch on all ranks: {places}"
    return Evidence("stacks", None, said), None


FUZZ_S = 3.0
"""Stillness is known from its second reading on; the dumps may begin a moment before."""


def spins(view: View, limits: Limits) -> Suspicion:
    """The loop stands while its GPUs are busy at low power: a hang on the device, which spins."""
    busy = view.busy()
    flat = min((track.flat_s for track in busy), default=0.0)
    if flat < limits.spinning_s:
        return Suspicion()
    signs = [Evidence("counters", None, f"the scheduler seconds of all ranks stand for {flat:.1f} s, threads run")]
    if not _spinning(view):
        return Suspicion()
    values = view.values("gpu") or {}
    said = f"{int(float(values.get('spinning', 0)))} of {int(float(values.get('cards', 0)))} GPUs busy at low power"
    return Suspicion((*signs, Evidence("gpu", None, said)), enough=True)


def _spinning(view: View) -> bool:
    cards, spinning = view.number("gpu", "cards"), view.number("gpu", "spinning")
    return bool(cards and spinning and (spinning == cards or (view.number("gpu", "idle") or 0) > 0))


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
    if waited < limits.stalled_s:
        return Suspicion((sign,))
    long = _outlasts_an_unseen_prefill(view, limits, waited, pace_s)
    seconds: list[Callable[[], Evidence | None]] = [
        lambda: _probe_failed(view, waited) if long else None,
        lambda: _peer_stalls_too(view, limits),
        lambda: _helper_lacks(view),
        lambda: _helpers_stand(view) if long else None,
    ]
    found = [evidence for ask in seconds if (evidence := ask()) is not None]
    return Suspicion((sign, *found), enough=bool(found))


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


def stalled_s(view: View) -> float:
    """For how long requests are held and nothing advances, by the counters; 0 when that is not known."""
    held = view.track("counters", "held")
    if held is None or held.value is not True:
        return 0.0
    flats = [t.flat_s for name in ("tokens", "finished", "prompted") if (t := view.track("counters", name)) is not None]
    return min([held.flat_s, *flats]) if flats else 0.0


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
    return any(_runs(view, p) for p in view.engine.deciders)


def _explained_by_peer(view: View, limits: Limits) -> Evidence | None:
    """A victim shows symptoms; the engine that it waits for has the cause, or is at work."""
    for peer in view.peers():
        state = view.states.get(peer.engine.name)
        if state is not None and state.phase == "confirmed":
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is confirmed as faulty")
        if still_s(peer) >= limits.still_s and peer.engine.kind != "vllm":
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which stands")
        fields = ("tokens", "prompted", "finished")
        tracks = [t for name in fields if (t := peer.track("counters", name)) is not None]
        if any(t.moved and view.snapshot.at - t.changed <= limits.stalled_s for t in tracks):
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is at work")
        busy = peer.busy()
        computes = any(_runs(peer, p) for p in peer.engine.deciders)
        if busy and computes and all(view.snapshot.at - t.changed > 3 for t in busy):
            return Evidence("counters", None, f"it waits for {peer.engine.name}, which is in one long step")
    return None


def _probe_failed(view: View, waited: float) -> Evidence | None:
    """A request through the real path that began within the stall and did not end; with live counters: overload."""
    values = view.values("probe")
    if values is None or values.get("ok") is not False:
        return None
    if float(values["began"]) < view.snapshot.at - waited - 1:
        return None
    return Evidence("probe", None, f"a request of its own through the real path failed: {values['said']}")


def _peer_stalls_too(view: View, limits: Limits) -> Evidence | None:
    """Prefill has computed and cannot hand over, decode waits for it: two engines say the same of each other."""
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


def unheard(view: View, limits: Limits) -> Suspicion:
    """The port accepts, nothing answers, and the frontend's main thread does not run."""
    values = view.values("http")
    silent = view.track("http", "answers")
    if values is None or silent is None or values.get("accepts") is not True or values.get("answers") is not False:
        return Suspicion()
    if not silent.moved and not ready(view):
        return Suspicion()  # it may not have begun to serve
    waited = view.snapshot.at - silent.changed
    head = next((p for p in view.engine.procs if p.role in ("launcher", "gateway")), None)
    tracks = [view.proc_track(head, name) for name in ("switches", "ticks")] if head is not None else []
    still = min((t.flat_s for t in tracks if t is not None), default=0.0)
    waits = head is not None and view.text("proc", "state", f"{view.engine.name}/{head.label}") in ("S", "D", "T")
    if head is None or not waits or still < limits.still_s:
        return Suspicion()  # it runs, or waits for the CPU: busy, or the machine is
    key = f"{view.engine.name}/launcher"
    signs = [
        Evidence("http", None, f"its port accepts and does not answer, for {max(waited, 1):.0f} s"),
        Evidence("proc", head.label, f"its main thread did not run for {still:.1f} s, with requests waiting"),
    ]
    stacks = view.values("stacks", key)
    if stacks is not None and float(stacks["began"]) >= view.snapshot.at - still - FUZZ_S:
        if stacks["idle"]:
            return Suspicion(tuple(signs))  # its event loop waits for events: it is not what blocks
        if stacks["same"] and stacks["still"]:
            signs.append(Evidence("stacks", head.label, f"identical stacks twice: {stacks['places']}"))
            return Suspicion(tuple(signs), enough=silent.looks >= 2 and waited >= limits.unanswered_s)
    blind = isinstance(view.snapshot.readings.get("stacks", {}).get(key), Blind)
    return Suspicion(tuple(signs), enough=blind and min(still, waited) >= limits.still_alone_s)


def suspicions(view: View, limits: Limits, pace_s: float | None) -> tuple[Suspicion, ...]:
    """All of them, the nearest to the cause first."""
    return stands(view, limits), spins(view, limits), stalled(view, limits, pace_s), unheard(view, limits)
