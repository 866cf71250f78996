"""Inferences of a fault: each is a set of signs, and needs a second one from another signal.

stands    no main thread of any rank runs                        /proc + counters, or + identical stacks twice
spins     the loop stands while the devices are busy             counters + GPU
stalled   the loop turns, requests are held and none advances    counters + probe, helper threads
refused   hand-overs fail one after the other, none succeeds     counters + probe
unheard   the port accepts, nothing answers                      HTTP + /proc of the frontend
"""

import re

from closeranks.watch.limits import Limits
from closeranks.watch.refused import Refusals, refused
from closeranks.watch.rules import Suspicion, ready, still_s, still_since
from closeranks.watch.snapshot import Blind, Evidence
from closeranks.watch.stalled import probe_failed, stalled
from closeranks.watch.view import View


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
    stacks = _stacks(view)
    if stacks is None:
        if "stacks" in {b.partition(":")[0] for b in view.blind()}:
            waited = still >= limits.still_alone_s and counted is not None
            return Suspicion(tuple(signs), waited and (not vllm or probe_failed(view, still) is not None))
        return Suspicion(tuple(signs))
    sign, excluded = stacks
    if excluded is not None:
        return Suspicion(tuple(signs), excluded=(excluded,))
    if sign is None:
        return Suspicion(tuple(signs))
    slow = view.says("stacks", "slow") and still < limits.slow_s and not _spinning(view)
    return Suspicion((*signs, sign), enough=not slow)


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


def _stacks(view: View) -> tuple[Evidence | None, Evidence | None] | None:
    """(sign, exclusion) of two rounds of dumps that lie within the stillness; None: there are none such."""
    values = view.values("stacks")
    if values is None or float(values["began"]) < still_since(view) - FUZZ_S:
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
    found = [view.proc_track(head, name) for name in ("switches", "ticks")] if head is not None else []
    tracks = [t for t in found if t is not None]
    still = min((t.flat_s for t in tracks), default=0.0)
    waits = head is not None and view.text("proc", "state", f"{view.engine.name}/{head.label}") in ("S", "D", "T")
    if head is None or not waits or still < limits.still_s:
        return Suspicion()  # it runs, or waits for the CPU: busy, or the machine is
    key = f"{view.engine.name}/launcher"
    signs = [
        Evidence("http", None, f"its port accepts and does not answer, for {max(waited, 1):.0f} s"),
        Evidence("proc", head.label, f"its main thread did not run for {still:.1f} s, with requests waiting"),
    ]
    stacks = view.values("stacks", key)
    if stacks is not None and float(stacks["began"]) >= max(t.changed for t in tracks) - FUZZ_S:
        if stacks["idle"]:
            return Suspicion(tuple(signs))  # its event loop waits for events: it is not what blocks
        if stacks["same"] and stacks["still"]:
            signs.append(Evidence("stacks", head.label, f"identical stacks twice: {stacks['places']}"))
            return Suspicion(tuple(signs), enough=silent.looks >= 2 and waited >= limits.unanswered_s)
    blind = isinstance(view.snapshot.readings.get("stacks", {}).get(key), Blind)
    serves = not any(_SERVES.match(p.title) for p in view.engine.procs)
    return Suspicion(tuple(signs), enough=blind and serves and min(still, waited) >= limits.still_alone_s)


_SERVES = re.compile(r"VLLM::APIServer_\d")
"""vLLM's processes that serve HTTP in its launcher's stead (`--api-server-count`)."""


def suspicions(view: View, limits: Limits, pace_s: float | None, refusals: Refusals) -> tuple[Suspicion, ...]:
    """All of them, the nearest to the cause first."""
    return (
        stands(view, limits),
        spins(view, limits),
        stalled(view, limits, pace_s),
        refused(view, limits, refusals),
        unheard(view, limits),
    )
