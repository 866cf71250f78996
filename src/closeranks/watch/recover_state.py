"""What to do about a confirmed wedge: a plan made from facts alone, and which of its steps comes next.

Nothing here reads a clock, a file or a process. A plan is a ladder of rungs. Each ends with a check through the real
key-value path; where that passes, what was drained is admitted again and the plan is over; where it fails, the next
rung begins.

    abort      loops live and work stands: end the stuck requests on both sides, check
    restart    end and start the engines that are to blame, with their peers where those keep what they know of them
    peers      the peers that were left, where the first restart did not help

Rules, whatever comes in: no engine is ended twice in a plan or within its cool-down, nor more often in an hour than
the ceiling allows; none is ended that is not known to be startable; a verdict of healthy, starting or slow ends none.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["drain", "abort", "end", "start", "ready", "verify", "admit"]
Loop = Literal["lives", "stands", "unknown"]
Result = Literal["done", "failed"]

WANTED_S = 30.0
"""After so long an end that somebody else has begun may be over, and whether it was one is looked at again."""
NOT_OURS = {
    "STARTUP": "it is still starting",
    "HEALTHY_IDLE": "the evidence shows a healthy, idle engine",
    "HEALTHY_WATCHDOG_FALSE_POSITIVE": "the evidence shows a false alarm",
    "NOT_HUNG_SLOW_OR_CAPACITY": "it is slow or full, not hung: a restart would lose its requests and change nothing",
    "ROUTER": "the fault is in the router, not in an engine",
}
"""Verdicts after which nothing is ended, and why."""
ABORT_FIRST = frozenset(
    {"KV_TRANSFER", "STALE_PEER", "REQUEST_LEAK", "UNSCHEDULABLE_REQUEST", "NETWORK_OR_TRANSPORT", "UNDETERMINED"}
)
"""Verdicts with live loops, where ending the stuck requests may be enough."""
KEEPS_NOTHING_OF_A_PEER: dict[str, str | None] = {"sglang": None, "vllm": None, "trtllm": None, "closeranks": "0"}
"""First version of an engine whose peer can be replaced alone. None: in no version so far: after a replacement both
sides report ready and every request fails or hangs (sglang#33789, #34289, open at 0.5.23; vllm#49238)."""


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far recovery may go. The defaults suit one prefill and one decode engine."""

    sides: Literal["auto", "wedged", "both"] = "auto"
    """Which engines a restart takes: those to blame (wedged), their peers too (both), or by version (auto)."""
    cooldown_s: float = 300.0
    """No engine is ended again within this many seconds."""
    per_hour: int = 3
    """No engine is ended more often in an hour."""
    end_s: float = 30.0
    """How long killed processes may take to be gone."""
    ready_s: float = 600.0
    """How long an engine may take to load and answer."""
    verify_s: float = 20.0
    """How long one check request through the key-value path may take."""
    verify_tries: int = 3
    """How often a failed check is made again."""
    ramp: tuple[int, ...] = (1, 2, 4)
    """Check requests at a time while an engine is admitted again; every step must pass."""
    peers: tuple[str, ...] = ()
    """The engines that work together with those to blame (names). Without it: the only one of the other role that
    serves the same model here; where several could be, none is touched."""
    router: str = ""
    """Address of the router or gateway before the engines: drained and admitted there, checked through it."""
    router_key: str = ""
    """Its key; rather as a variable than as a flag, which `ps` shows."""
    resume_within_s: float = 900.0
    """An interrupted plan that is older is closed, not gone on with."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as far as a plan needs it."""

    name: str
    kind: str
    role: Literal["prefill", "decode", "both"]
    version: str = ""
    group: str = ""
    """What engines that hand over to each other have in common: model and transfer backend."""
    loop: Loop = "unknown"
    obstacle: str = ""
    """Why it could not be started again; empty: it can."""
    wanted: str = ""
    """That somebody else is ending it just now; empty: nobody is seen to."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: which engines are confirmed to be wedged, and what the diagnosis calls it."""

    blamed: tuple[str, ...]
    verdict: str = "UNDETERMINED"
    certainty: str = "undetermined"
    summary: str = ""
    by_hand: bool = False
    """An operator asked for it: it is not held against that who ends the engine just now."""


class Restart(msgspec.Struct, frozen=True):
    """A past one: of which engine, and how long ago (seconds, never negative)."""

    engine: str
    age_s: float


class Action(msgspec.Struct, frozen=True):
    """One step. `engine` is empty where it concerns all of `engines`."""

    kind: Kind
    engine: str
    engines: tuple[str, ...]
    deadline_s: float
    why: str


class Rung(msgspec.Struct, frozen=True):
    """Steps up to and with a check of the whole path."""

    name: Literal["abort", "restart", "peers"]
    actions: tuple[Action, ...]


class Plan(msgspec.Struct, frozen=True):
    """The ladder, and what is done once a check has passed."""

    case: Case
    rungs: tuple[Rung, ...]
    after: tuple[Action, ...]
    notes: tuple[str, ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        """All steps in order; a step's place here is its number."""
        return tuple(a for rung in self.rungs for a in rung.actions) + self.after


class Refusal(msgspec.Struct, frozen=True):
    """Nothing is done, and why. `wait_s`: after so many seconds the same case would be taken; None: it would not."""

    reason: str
    wait_s: float | None = None


class Over(msgspec.Struct, frozen=True):
    """A plan has come to its end."""

    outcome: Literal["recovered", "failed"]
    says: str


def plan(case: Case, sides: Sequence[Side], policy: Policy, past: Iterable[Restart] = ()) -> Plan | Refusal:
    """The plan for a case, or why there is none."""
    past = list(past)
    if case.verdict in NOT_OURS:
        return Refusal(f"{case.verdict}: {NOT_OURS[case.verdict]}")
    blamed = [side for side in sides if side.name in case.blamed]
    if missing := sorted(set(case.blamed) - {side.name for side in blamed}):
        return Refusal(f"{', '.join(missing)}: no such engine is seen here")
    if not blamed:
        return Refusal("no engine is to blame")
    for side in blamed:
        if side.obstacle:
            return Refusal(f"{side.name} could be ended but not started again: {side.obstacle}")
        if side.wanted and not case.by_hand:
            return Refusal(f"{side.name}: {side.wanted}, and that is not undone", WANTED_S)
        if (held := _held(side.name, policy, past)) is not None:
            return held
    notes: list[str] = []
    peers = []
    candidates, doubt = _peers(blamed, sides, policy)
    notes += [doubt] if doubt else []
    for side in candidates:
        held = _held(side.name, policy, past)
        why_not = side.obstacle or side.wanted or (held.reason if held else "")
        if why_not:
            notes.append(f"its peer {side.name} is left as it is: {why_not}")
        else:
            peers.append(side)
    together = policy.sides == "both" or (
        policy.sides == "auto" and len(peers) == 1 and not may_replace_alone(peers[0].kind, peers[0].version)
    )
    if together and peers and policy.sides == "auto":
        which = f"{peers[0].kind} {peers[0].version or '(version unknown)'}"
        notes.append(f"{peers[0].name} is restarted too: {which} keeps what it knows of a peer that was replaced")
    first = [*blamed, *peers] if together else blamed
    later = [] if together or policy.sides == "wedged" else peers
    everyone = [*blamed, *peers] if together or later else blamed
    rungs = []
    if case.verdict in ABORT_FIRST and all(side.loop == "lives" for side in blamed):
        rungs.append(Rung("abort", _abort(everyone, policy)))
    rungs.append(Rung("restart", _restart(first, later if len(later) == 1 else [], policy, bool(rungs), case)))
    if later:
        rungs.append(Rung("peers", _restart(later, [], policy, True, case)))
    admit = tuple(
        Action("admit", side.name, (side.name,), policy.verify_s * len(policy.ramp), "traffic comes back step by step")
        for side in ordered(everyone, "start")
    )
    return Plan(case, tuple(rungs), admit, tuple(notes))


def next_step(plan: Plan, results: Mapping[int, Result]) -> int | Over:
    """Number of the step that is to be done now, given how those before went; or how the plan ended."""
    number = 0
    passed: str | None = None
    for rung in plan.rungs:
        numbers = range(number, number + len(rung.actions))
        number += len(rung.actions)
        for n, action in zip(numbers, rung.actions, strict=True):
            if n not in results:
                return n
            if results[n] == "done":
                continue
            if action.kind in ("end", "start", "ready"):  # without it the steps after make things worse
                untried = [s for s in lying(plan, results).values() if s not in results]
                if untried:  # but nobody else would start what is ended already
                    return min(untried)
                return Over("failed", f"{action.kind} {action.engine} failed; nothing further is done")
            if action.kind == "verify":
                break
        else:
            passed = rung.name
            break
    if passed is None:
        return Over("failed", "no check through the key-value path passed")
    first_after = len(plan.actions) - len(plan.after)
    for n, action in enumerate(plan.after, first_after):
        if n not in results:
            return n
        if results[n] == "failed":
            return Over("failed", f"the path works, but {action.engine} could not be admitted again")
    return Over("recovered", f"serving again after {passed}")


def lying(plan: Plan, results: Mapping[int, Result]) -> dict[str, int]:
    """Engines that were ended and are not started, with the numbers of the steps that start them."""
    actions = plan.actions
    ended = {a.engine for n, a in enumerate(actions) if a.kind == "end" and results.get(n) == "done"}
    return {
        a.engine: n
        for n, a in enumerate(actions)
        if a.kind == "start" and a.engine in ended and results.get(n) != "done"
    }


def anew(plan: Plan, results: Mapping[int, Result]) -> dict[int, Result]:
    """The results without those failures for which a plan stops: their steps are done once more."""
    actions = plan.actions
    return {n: r for n, r in results.items() if r == "done" or actions[n].kind not in ("end", "start", "ready")}


def may_replace_alone(kind: str, version: str) -> bool:
    """Whether an engine of this version forgets a peer that was replaced."""
    since = KEEPS_NOTHING_OF_A_PEER.get(kind)
    return since is not None and _number(version or "0") >= _number(since)


def ordered(sides: Sequence[Side], for_what: Literal["end", "start"]) -> list[Side]:
    """Engines in the order in which they are ended or started.

    Ended first is who writes or reads the other's memory: prefill of SGLang, TensorRT-LLM and closeranks, which write
    into decode's pages; decode of vLLM, which reads prefill's. Started first is prefill, which hosts the server that
    decode asks; nobody waits for it to be ready before the other is started.
    """

    def place(side: Side) -> int:
        reader = side.kind == "vllm" and for_what == "end"
        return {"prefill": 1 if reader else 0, "decode": 0 if reader else 1, "both": 2}[side.role]

    return sorted(sides, key=lambda side: (place(side), side.name))


def _abort(sides: Sequence[Side], policy: Policy) -> tuple[Action, ...]:
    names = tuple(side.name for side in sides)
    return (
        *(Action("drain", s.name, (s.name,), 10.0, "no new requests meanwhile") for s in sides),
        *(
            Action("abort", s.name, (s.name,), 10.0, "its loop lives: its stuck requests can be ended")
            for s in sides
            if s.loop != "stands"
        ),
        _verify(names, policy),
    )


def _restart(
    sides: Sequence[Side], bystanders: Sequence[Side], policy: Policy, drained: bool, case: Case
) -> tuple[Action, ...]:
    """Drain, end all, start all, wait for all, check. Requests of bystanders whose other half goes down are ended."""
    names = tuple(side.name for side in sides)
    all_names = (*names, *(b.name for b in bystanders))
    why = f"{case.verdict}: {case.summary}" if case.summary else case.verdict
    steps: list[Action] = []
    if not drained:
        steps += [Action("drain", n, (n,), 10.0, "no new requests meanwhile") for n in all_names]
    steps += [
        Action("abort", s.name, (s.name,), 10.0, "its requests lose their other half")
        for s in bystanders
        if s.loop == "lives"
    ]
    blamed = set(case.blamed)
    steps += [
        Action(
            "end", s.name, (s.name,), policy.end_s, why if s.name in blamed else "peer of an engine that is replaced"
        )
        for s in ordered(sides, "end")
    ]
    steps += [Action("start", s.name, (s.name,), 60.0, "") for s in ordered(sides, "start")]
    steps += [Action("ready", s.name, (s.name,), policy.ready_s, "") for s in ordered(sides, "start")]
    return (*steps, _verify(all_names, policy))


def _verify(names: tuple[str, ...], policy: Policy) -> Action:
    return Action("verify", "", names, policy.verify_s * policy.verify_tries, "one request through the real path")


def counterparts(one: Side, sides: Sequence[Side]) -> list[Side]:
    """Engines that could be on the other side of a hand-over from this one."""
    other = {"prefill": "decode", "decode": "prefill"}.get(one.role)
    return [side for side in sides if (side.kind, side.group, side.role) == (one.kind, one.group, other)]


def _peers(blamed: Sequence[Side], sides: Sequence[Side], policy: Policy) -> tuple[list[Side], str]:
    """Engines that share their hand-overs with one that is to blame, and why there are none where there might be.

    Two services on one machine look like one with two of each; nobody's engine is ended on a guess.
    """
    names = {side.name for side in blamed}
    found = {c.name: c for side in blamed for c in counterparts(side, sides) if c.name not in names}
    if policy.peers:
        return [side for side in sides if side.name in policy.peers and side.name not in names], ""
    if len(found) <= 1 and all(len(counterparts(c, sides)) <= 1 for c in found.values()):
        return list(found.values()), ""
    return [], f"which of {', '.join(sorted(found))} belongs to it is not known: none is touched (name them as peers)"


def _held(engine: str, policy: Policy, past: Sequence[Restart]) -> Refusal | None:
    """Why this engine may not be ended now."""
    ages = sorted(r.age_s for r in past if r.engine == engine)
    if ages and ages[0] < policy.cooldown_s:
        return Refusal(
            f"{engine} was restarted {ages[0]:.0f} s ago and is in its cool-down of {policy.cooldown_s:.0f} s",
            policy.cooldown_s - ages[0],
        )
    recent = [age for age in ages if age < 3600.0]
    if len(recent) >= policy.per_hour:
        until = 3600.0 - recent[policy.per_hour - 1] if policy.per_hour > 0 else None
        return Refusal(f"{engine} was restarted {len(recent)} times in the last hour, the ceiling is reached", until)
    return None


def _number(version: str) -> tuple[int, ...]:
    """`0.5.13.post1` → (0, 5, 13, 1); what is no number ends it."""
    parts: list[int] = []
    for part in version.lstrip("v").replace(".post", ".").replace("rc", ".-1.").split("."):
        if not re.fullmatch(r"-?[0-9]+", part):
            break
        parts.append(int(part))
    return tuple(parts)
