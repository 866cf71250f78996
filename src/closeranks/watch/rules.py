"""What one look shows of one engine by itself: signs of life, proofs, exclusions. Pure functions of a `View`.

A *proof* (a death, a raised error, a part stopped by a signal) confirms alone; inferences are in `suspicions`. A live
loop's stacks can look like a desync, a saturated pair fails probes, vLLM's processes stand still when idle, and
`/health` answers 200 through most wedges: none of these decides anything by itself.
"""

from dataclasses import dataclass

from closeranks.watch.limits import Limits
from closeranks.watch.snapshot import Evidence, Proc, Signal
from closeranks.watch.tracks import AFTER_DUMP_S
from closeranks.watch.view import View


@dataclass(frozen=True)
class Suspicion:
    """One suspicion: its signs, whether they suffice, and why it is none after all (`excluded`)."""

    signs: tuple[Evidence, ...] = ()
    enough: bool = False
    excluded: tuple[Evidence, ...] = ()
    cls: str = ""
    """The class of verdict that the signs amount to by themselves, for when a diagnosis finds nothing; mostly none."""
    holds: bool = False
    """The signs are of requests that the engine holds: where it has held none for a while, they are over."""

    @property
    def open(self) -> bool:
        """Whether there is anything to look closer at."""
        return bool(self.signs) and not self.excluded


# --- life and readiness ---------------------------------------------------------------------------------------------


def ready(view: View) -> bool:
    """Whether the engine has served or said that it can in this life."""
    if view.served or view.says("log", "ready"):
        return True
    last_word = view.anew and view.number("steps", "up") == 0  # of the life before: the gateway keeps showing it
    if view.number("steps", "steps") and not last_word:
        return True
    if any(view.number("counters", name) for name in ("tokens", "finished", "running")):
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
    return bool(view.engine.deciders) and all(runs(view, p) for p in view.engine.deciders)


def sees_work(view: View) -> bool:
    """Whether anything that counts work has been read lately: without it a stall could not be seen."""
    fields: tuple[tuple[Signal, str], ...] = (("counters", "held"), ("steps", "steps"), ("loads", "heartbeat"))
    return any(view.track(signal, field) is not None for signal, field in fields)


def runs(view: View, process: Proc) -> bool:
    now = view.snapshot.at
    tracks = [view.proc_track(process, name) for name in ("switches", "ticks")]
    return any(t is not None and t.moved and now - t.changed <= 3 for t in tracks)


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


def still_since(view: View) -> float:
    """When the last of the ranks' main threads was seen to run, but under a dump."""
    tracks = [view.proc_track(process, name) for process in view.engine.deciders for name in ("switches", "ticks")]
    return max((t.changed for t in tracks if t is not None), default=float("inf"))


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
