"""The state machine: one more snapshot → the states. Pure; everything that it remembers is in a frozen `Memory`.

    blind ─────► healthy ◄────► suspect ────► confirmed
      ▲             ▲   ▲          │              │  (moved again for a while, or another life)
      └─ no sign ───┘   └─────── excluded ◄───────┘

- Only a proof (`rules`), or an inference with a second signal (`suspicions`), leads to `confirmed`; it stays until the
  engine has moved again for a while or is replaced. A death or a raised error stays for the life of the engine.
- `healthy` needs a sign of life, at most a few seconds old. Without one, and without a suspicion, an engine is `blind`.
- `excluded` says what it is instead.
"""

from collections.abc import Mapping

import msgspec

from closeranks.watch import rules
from closeranks.watch.limits import DEFAULT, Limits
from closeranks.watch.refused import Refusals, follow
from closeranks.watch.snapshot import EngineSeen, Evidence, Phase, Snapshot, State
from closeranks.watch.stalled import advances, empty_s, stalled_s, stalling
from closeranks.watch.suspicions import suspicions
from closeranks.watch.tracks import Key, Track, advance
from closeranks.watch.view import View

LIVELY_S = 5.0
"""A sign of life holds for so long: between two readings of a signal there is none."""
GONE_KEPT_S = 600.0
"""An engine that ended as wanted is remembered for so long."""
SETTLED_S = 20.0
"""Readings may be as old as `view.FRESH_S` and take 8 s: sooner after a process took another's place, a sign that the
engine is ready may be of the process before it."""


class Cast(msgspec.Struct, frozen=True):
    """The processes whose readiness is the engine's: its launcher or leader, and those that run its loop."""

    who: Mapping[str, tuple[int, int]] = {}
    """Label → pid and start time."""
    since: float = float("-inf")
    """When the last of them took another's place; at no time, as far as we know, in an engine's first life here."""
    served: bool = False
    """It was ready with these very processes. Signals that fall silent later do not make it start again."""


class Past(msgspec.Struct, frozen=True):
    """What is remembered of one engine besides its tracks."""

    engine: EngineSeen
    seen: float
    """When it was last among the processes."""
    born: float
    """When this life was first seen."""
    proved: bool = False
    """Its confirmation rests on a proof that holds for this life."""
    proof: bool = False
    """Its confirmation rests on a proof."""
    supported: float = -1e9
    """When a suspicion last had a sign."""
    lively: float = -1e9
    """When it was last healthy by a sign of life."""
    moving: float | None = None
    """Since when it shows signs of life without a break."""
    ended: float | None = None
    """When its log first said that it ends; None again where that has taken it back."""
    cast: Cast = Cast()
    heard: bool = False
    """Its log could be read at the last look: a wanted end would be known."""
    pace_s: float | None = None
    """The longest time for which held requests did not advance and then did; also what passed before we looked."""
    stall_s: float = 0.0
    refusals: Refusals = Refusals()
    """Of the hand-overs to it."""
    cls: str = ""
    """The class of verdict that its confirmation rests on, where that has one."""
    holds: bool = False
    """That confirmation is of requests that it holds."""


class Memory(msgspec.Struct, frozen=True):
    """Everything between two looks."""

    at: float | None = None
    tracks: Mapping[Key, Track] = {}
    past: Mapping[str, Past] = {}
    states: Mapping[str, State] = {}


def step(memory: Memory, snapshot: Snapshot, limits: Limits = DEFAULT) -> Memory:
    """The memory after one more look; the states are in it."""
    tracks = advance(memory.tracks, snapshot, memory.at)
    past: dict[str, Past] = {}
    states: dict[str, State] = {}
    for engine in snapshot.engines:
        old = memory.past.get(engine.name)
        reborn = old is not None and _replaced(old.engine, engine)
        cast = _cast(old, engine, reborn, snapshot.at)
        view = View(engine, snapshot, tracks, memory.states, cast.served, cast.since > float("-inf"), cast.since)
        before = None if reborn else memory.states.get(engine.name)
        own = _past(view, None if reborn else old, reborn, limits)
        if not cast.served and snapshot.at - cast.since >= SETTLED_S and rules.ready(view):
            cast = msgspec.structs.replace(cast, served=True)
        own = msgspec.structs.replace(own, cast=cast)
        phase, why, own = _judge(view, own, before, limits)
        past[engine.name] = own
        made = _state(engine.name, phase, why, before, snapshot.at, view.blind())
        if phase == "confirmed":
            made = msgspec.structs.replace(made, proof=own.proof, cls=own.cls)
        states[engine.name] = made
    heads = {(e.head.pid, e.head.start_time) for e in snapshot.engines if e.head is not None}
    for name, old in memory.past.items():
        head = old.engine.head
        if name in past or (head is not None and (head.pid, head.start_time) in heads):
            continue  # it is here, by another name perhaps: that of its port, once it listens
        said = View(old.engine, snapshot, tracks, memory.states).says("log", "ending")  # its last words
        old = msgspec.structs.replace(old, ended=old.ended if old.ended is not None or not said else snapshot.at)
        if (left := _gone(old, memory.states.get(name), snapshot.at, limits)) is not None:
            past[name], states[name] = old, left
    return Memory(snapshot.at, tracks, past, states)


def urgent(memory: Memory, snapshot: Snapshot, limits: Limits = DEFAULT) -> frozenset[str]:
    """Engines worth reading more often: suspects, those that only a token lets go of, which one of our own requests
    may bring, and those whose main threads have begun to stand."""
    found = {n for n, s in memory.states.items() if s.phase == "suspect" or (s.phase == "confirmed" and s.cls)}
    for engine in snapshot.engines:
        view = View(engine, snapshot, memory.tracks, memory.states)
        unheard = view.says("http", "accepts") and not view.says("http", "answers")
        if stalling(view) or unheard or (engine.kind != "vllm" and rules.still_s(view) >= limits.still_s / 2):
            found.add(engine.name)
    return frozenset(found)


def _replaced(old: EngineSeen, new: EngineSeen) -> bool:
    """Whether another life began: another launcher, leader, gateway or supervisor, or not one process in common."""
    shared = {p.role: p.pid for p in old.shared}
    if any(shared.get(p.role, p.pid) != p.pid for p in new.shared):
        return True
    was, head = old.head, new.head
    if was is not None and head is not None:
        return (was.pid, was.start_time) != (head.pid, head.start_time)
    return not _own(old) & new.life


def _own(engine: EngineSeen) -> frozenset[tuple[int, int]]:
    """Its processes but those that serve other engines too."""
    return frozenset((p.pid, p.start_time) for p in engine.procs if p not in engine.shared)


def _cast(old: Past | None, engine: EngineSeen, reborn: bool, at: float) -> Cast:
    """Who plays now, and whether that is who played when it was ready: a process in another's place starts anew."""
    now = {p.label: (p.pid, p.start_time) for p in (*engine.deciders, *([engine.head] if engine.head else []))}
    if old is None:
        return Cast(now)
    if reborn or any(now.get(label, who) != who for label, who in old.cast.who.items()):
        return Cast(now, at)
    return msgspec.structs.replace(old.cast, who={**old.cast.who, **now})


def _past(view: View, old: Past | None, reborn: bool, limits: Limits) -> Past:
    at = view.snapshot.at
    if old is None:
        began = Refusals(blocked=at) if reborn else Refusals()
        return Past(view.engine, at, at, refusals=follow(view, began, limits))
    heard, ended = view.values("log") is not None, old.ended
    if heard:  # a log that takes the word back has read a former life's last one until now
        ended = (at if ended is None else ended) if rules.ending(view) else None
    moving = (old.moving if old.moving is not None else at) if rules.alive(view) else None
    stall = stalled_s(view)
    pace = old.pace_s
    if pace is None and view.busy():  # nothing is known of the time before our first look but how long it was
        pace = min(max(float(t.value) for t in view.busy()), limits.stalled_unseen_s)
    if stall < old.stall_s and pace is not None:
        pace = max(pace, old.stall_s)
    return msgspec.structs.replace(
        old,
        engine=view.engine,
        seen=at,
        ended=ended,
        heard=heard,
        moving=moving,
        pace_s=pace,
        stall_s=stall,
        refusals=follow(view, old.refusals, limits),
    )


def _judge(view: View, own: Past, before: State | None, limits: Limits) -> tuple[Phase, tuple[Evidence, ...], Past]:
    at = view.snapshot.at
    if own.ended is not None and at - own.ended <= limits.ending_s:
        return "excluded", (Evidence("log", None, "it is being ended: its log says so"),), own
    proofs = rules.proofs(view, limits)
    if own.ended is not None:  # its parts go because it was asked to end, however long that takes
        proofs = tuple(proof for proof in proofs if proof.signal != "proc")
    if proofs:
        return "confirmed", proofs, msgspec.structs.replace(own, proved=True, proof=True, cls="")
    stopped = rules.stopped(view, limits)
    if stopped:
        return "confirmed", stopped, msgspec.structs.replace(own, proof=True, cls="")
    if before is not None and before.phase == "confirmed":
        moved = own.moving is not None and at - own.moving >= limits.again_s
        if own.cls:  # its loop turned all the time, and it may hold nothing: a token shows that the path works
            moved = moved and (own.refusals.served > before.since or (own.holds and empty_s(view) >= limits.again_s))
        else:
            moved = moved and advances(view, limits)
        if own.proved or not moved:
            return "confirmed", before.why, own
    back = rules.held_back(view)
    if back:
        return "excluded", back, own
    found = [s for s in suspicions(view, limits, own.pace_s, own.refusals) if s.signs]
    sure = next((s for s in found if s.enough and not s.excluded), None)
    if sure is not None:
        return (
            "confirmed",
            sure.signs,
            msgspec.structs.replace(own, proved=False, proof=False, cls=sure.cls, holds=sure.holds),
        )
    maybe = next((s for s in found if s.open), None)
    if maybe is not None:
        return "suspect", maybe.signs, msgspec.structs.replace(own, supported=at)
    if found:
        return "excluded", found[0].excluded, own
    if before is not None and before.phase == "suspect" and at - own.supported < limits.clear_s:
        return "suspect", before.why, own
    if rules.paused(view):
        return "excluded", (rules.PAUSED,), own
    signs = rules.alive(view)
    if signs:
        return "healthy", signs, msgspec.structs.replace(own, lively=at)
    if before is not None and before.phase == "healthy" and at - own.lively < LIVELY_S:
        return "healthy", before.why, own
    return "blind", _nothing(view), own


def _nothing(view: View) -> tuple[Evidence, ...]:
    """Why nothing can be said of an engine."""
    if rules.threads_run(view):
        said = "its main threads run, but nothing that counts its work can be read: "
        return (Evidence("proc", None, said + ("; ".join(view.blind())[:300] or "no reading yet")),)
    if view.blind():
        return (Evidence("proc", None, "no sign of life and none of a fault: " + "; ".join(view.blind())[:300]),)
    return (Evidence("proc", None, "no sign of life and none of a fault yet"),)


def _gone(old: Past, state: State | None, at: float, limits: Limits) -> State | None:
    """The state of an engine of which no process is left; None: it is forgotten."""
    away = at - old.seen
    if state is None or away > GONE_KEPT_S:
        return None
    if state.phase == "confirmed" and old.ended is None:
        return state
    if old.ended is not None:
        why = (Evidence("log", None, "it has ended, as its log says it was asked to"),)
        return _state(old.engine.name, "excluded", why, state, at, ())
    if away < limits.gone_s:
        why = (Evidence("proc", None, "all its processes are gone, and nothing says why"),)
        return _state(old.engine.name, "suspect", why, state, at, ())
    why = (Evidence("proc", None, f"all its processes are gone for {away:.0f} s; nothing said that this was wanted"),)
    return msgspec.structs.replace(_state(old.engine.name, "confirmed", why, state, at, ()), proof=old.heard)


def _state(
    name: str, phase: Phase, why: tuple[Evidence, ...], before: State | None, at: float, blind: tuple[str, ...]
) -> State:
    since = before.since if before is not None and before.phase == phase else at
    return State(name, phase, why, since, blind)
