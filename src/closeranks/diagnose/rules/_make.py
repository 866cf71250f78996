"""Building findings, so that a rule is its condition and its words."""

import re
from collections.abc import Iterable
from typing import Any

from closeranks.diagnose.facts import Event, Fact, Metric
from closeranks.diagnose.scene import EngineView, RankView, Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding, cite

WAITS = ("collective", "collective_device")
DEVICE = (
    "device_wait",
    "device_launch",
    "kernel_call",
    "module_load",
    "collective_device",
    "p2p_device",
    "implicit_sync",
)


def finding(cls: str, certainty: str, summary: str, facts: Iterable[Fact | None] = (), **more: Any) -> Finding:
    """A finding that cites `facts`. Its rule and stage are filled in by `rules.apply`, unless `stage` is given."""
    return Finding(cls=cls, certainty=certainty, summary=summary, evidence=cite(facts), **more)


def places(ranks: Iterable[RankView]) -> dict[str, str]:
    """Rank → where it waits."""
    return {r.label: r.at.where for r in ranks}


def labels(ranks: Iterable[RankView]) -> str:
    """`TP0, TP1, TP3` or, for many, `TP0 … TP15 (16)`."""
    found = [r.label for r in ranks]
    return ", ".join(found) if len(found) <= 8 else f"{found[0]} … {found[-1]} ({len(found)})"


def engine_name(engine: EngineView) -> str:
    """`decode`, `prefill`, or the family."""
    return engine.name or engine.family


def side_of(scene: Scene, facts: Iterable[Fact]) -> str:
    """The one engine of a pair that all these facts are of, "" if that is not told."""
    sides = {scene.role_of(f) for f in facts}
    return sides.pop() if len(sides) == 1 else ""


def sure(scene: Scene, engine: EngineView | None = None) -> str:
    """Shown if something besides stacks says that the engine stands still (`Scene.stalls`), else likely.

    Dumps of several ranks are not simultaneous: a live loop can look desynchronised in one round, even in two, and a
    probe that fails beside them may be overload. What the other engine of a pair does says nothing about this one.
    """
    if engine is not None:
        scene = scene.only(engine)
    if scene.live:
        return LIKELY
    if engine is not None and any(r.moving for r in engine.ranks.values()):
        return LIKELY
    return SHOWN if scene.stalls else LIKELY


def stall_words(scene: Scene, role: str = "") -> list[str]:
    """What shows that the engine stands still, for the list of what is shown."""
    quiet = scene.silence(role)
    out = [
        f"{f.src}: {f.says()}"
        for f in [*scene.stalls, *scene.hints][:2]
        if not (isinstance(f, Event) and f.kind.endswith("_batch"))
    ]
    if quiet:
        out.append(f"no batch line for {quiet[1]:.0f} s after {quiet[0].src} although requests were running")
    return out


def gauges(scene: Scene) -> list[Metric]:
    """The last gauges that count requests."""
    return [m for m in scene.of(Metric) if re.search(r"running|waiting|queue_reqs", m.name)][-3:]
