# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Rules: small, pure, named functions from a scene to findings. A module here registers its own; nothing lists them.

`@rule(stage, classes, looks_for)` puts a function into the order of cause: a lower stage is nearer to the cause, and the
finding with the lowest stage is the main one. Stages, by what they rest on:

 0-19  a process or library that is shown to be dead, blocked on itself, or refused a resource
20-29  what ranks wait for in each other: operation, size, stage, participant
30-39  an ended wait whose cause is not in the evidence; crashes; routers
40-49  transfers, peers, leaks between engines
50-59  devices, queues, loops that turn without effect
60-69  waits that are alike on all ranks
70-97  nothing wrong, or slow
98     what has passed: the engine that it concerns made tokens after it (`_past`)
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from closeranks.diagnose.rules._past import Cited, demoted, told
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding

Found = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Rule:
    """A registered rule."""

    name: str
    stage: int
    classes: tuple[str, ...]
    looks_for: str
    run: Callable[[Scene], Found]


FAILED = "failed on this evidence"
_RULES: dict[str, Rule] = {}


def rule(stage: int, classes: str, looks_for: str) -> Callable[[Callable[[Scene], Found]], Callable[[Scene], Found]]:
    """Register a rule under its function's name."""

    def register(function: Callable[[Scene], Found]) -> Callable[[Scene], Found]:
        name = function.__name__
        if name in _RULES:
            raise ValueError(f"two rules are called {name}")
        _RULES[name] = Rule(name, stage, tuple(classes.split()), looks_for, function)
        return function

    return register


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, nearest to the cause first."""
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
        importlib.import_module(f"{__name__}.{module}")
    return tuple(sorted(_RULES.values(), key=lambda r: (r.stage, r.name)))


# Classes of what makes no tokens: shown only where none flow.
STANDSTILLS = frozenset(
    """DESYNC_DIFFERENT_COLLECTIVE DESYNC_SAME_OP_SHAPE_OR_SEQ MISSING_PARTICIPANT UNMATCHED_COLLECTIVE_OR_P2P PP_STALL
    DEVICE_HANG RUNTIME_LIBRARY_DEADLOCK HOST_DEVICE_INTERLOCK GIL_DEADLOCK DEAD_PEER CRASH_LOOKS_LIKE_HANG STARTUP
    HEALTH_FALSE_OK_ENGINE_DEAD UNSCHEDULABLE_REQUEST SCHEDULER_LIVELOCK IPC_OR_EXTERNAL_LOST""".split()  # noqa: SIM905
)


def guarded(scene: Scene, f: Finding) -> Finding:
    """The finding, without its certainty where the engine that it speaks of makes tokens after all that it cites."""
    if f.certainty != SHOWN or f.cls not in STANDSTILLS:
        return f
    mine = [e for e in scene.engines if e.name and e.name == f.engine]
    own = scene.only(mine[0]) if mine else scene
    if len({own.side(b) for b in own.batches} - {""}) > 1:
        return f  # tokens of one engine say nothing about another, and which is meant is not told
    cited = [e.time for e in f.evidence]
    dated = [t for t in cited if t is not None]  # where a dump has no clock nothing is known to be later
    if not (against := own.flows(max(dated) if len(dated) == len(cited) and dated else None)):
        return f
    return replace(
        f, certainty=LIKELY, likely=[*f.likely, f"tokens flow beside it: {against[0].says()} ({against[0].src})"]
    )


def apply(scene: Scene) -> list[Finding]:
    """Findings of all rules, main first: by stage, shown before likely; what has passed comes last. A rule that fails
    costs what it would have found, and a note says so."""
    found: list[Finding] = []
    for r in rules():
        try:
            result = r.run(scene)
            made = [] if result is None else [result] if isinstance(result, Finding) else list(result)
            made = [guarded(scene, f) for f in made]
        except Exception as error:  # noqa: BLE001 - said; not in its own words, which may quote evidence
            scene.notes.append(f"rule {r.name} {FAILED} ({type(error).__name__}): what it looks for is not judged")
            continue
        found += [replace(f, rule=r.name, stage=r.stage if f.stage is None else f.stage) for f in made]
    cited = Cited(scene, found)
    found = [demoted(scene, f, cited) for f in found]
    order = {"shown": 0, "likely": 1, "undetermined": 2}
    return told(sorted(found, key=lambda f: (f.stage if f.stage is not None else 99, order[f.certainty])))
