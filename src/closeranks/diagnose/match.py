"""Matching findings with known issues: by frames, pairs of places, events, versions, flags and architecture."""

import re

from closeranks.catalog.known import KnownIssue as Entry
from closeranks.catalog.known import Match, in_range
from closeranks.diagnose.audit.sources.areas import area_of
from closeranks.diagnose.facts import Setting
from closeranks.diagnose.scene import EngineView, Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding, KnownIssue

ENGINES = ("sglang", "vllm", "tensorrt-llm", "dynamo")
_BUILD = re.compile(r"dev|\+g[0-9a-f]{6}|git|^0\.0\b")  # between releases: the range cannot tell


def known_issues(scene: Scene, found: Finding, entries: list[Entry], main: bool = True) -> list[KnownIssue]:
    """Entries that fit the finding, the surest first, at most four.

    A finding beside the main one is often its echo; there only issues whose cause is established are named.
    """
    entries = [e for e in entries if main or e.established]
    out = [k for e in entries if found.cls in e.classes and (k := _match(scene, found, e)) is not None]
    return sorted(out, key=lambda k: k.certainty != SHOWN)[:4]


def _match(scene: Scene, found: Finding, entry: Entry) -> KnownIssue | None:
    m = entry.match
    if foreign(scene, entry):
        return None
    if (m.rule and found.rule != m.rule) or any(scene.has(k) for k in m.not_events):
        return None
    engines = [e for e in scene.engines if not found.engine or found.engine in (e.name, e.family)] or scene.engines
    reasons = _frames(scene, engines, m)
    if reasons is None:
        return None
    others = _others(scene, m)
    if others is None:
        return None
    reasons += others
    open_points: list[str] = []
    for component, wanted in entry.versions.items():
        seen = scene.versions(component)
        inside = [v for v in seen if in_range(v, wanted)]
        if seen and not inside:
            return None
        if not seen:
            open_points.append(f"{component} {wanted} (its version is not in the evidence)")
        elif len(inside) < len(seen) or any(_BUILD.search(v) for v in inside):
            odd = "a build of its own" if len(inside) == len(seen) else f"also {', '.join(set(seen) - set(inside))}"
            open_points.append(f"{component} {wanted} (the evidence names {inside[0]}, {odd})")
        else:
            reasons.append(f"{component} {inside[0]} is {wanted}")
    if entry.arch:
        arch = scene.arch()
        if arch and arch != entry.arch:
            return None
        (reasons if arch else open_points).append(
            entry.arch if arch else f"{entry.arch} (architecture not in the evidence)"
        )
    patched = _patched(scene, entry)
    sure = entry.established and not open_points and found.certainty == SHOWN and not patched
    reason = "; ".join(reasons) + (f". To check: {'; '.join(open_points)}" if open_points else "")
    if patched:
        reason += f". Lowered: the installed engine is not the release that this was seen in: {'; '.join(patched)}"
    return KnownIssue(
        id=entry.id,
        reason=reason,
        workaround=entry.workaround,
        price=entry.price,
        fix=entry.fix,
        certainty=SHOWN if sure else LIKELY,
        checked=entry.checked.isoformat(),
    )


def foreign(scene: Scene, entry: Entry) -> bool:
    """Whether the entry is about an engine and the evidence is of others only. Libraries are no engines."""
    return entry.engine in ENGINES and bool(scene.families) and entry.engine not in scene.families


def _patched(scene: Scene, entry: Entry) -> list[str]:
    """Patched areas in which the entry's defect lies: by its places and flags, and by the files of its frames."""
    patched = scene.patched()
    if not patched:
        return []
    m = entry.match
    named = {*m.frames, *m.any_frames}
    files = {f.file for s in scene.stacks for t in s.threads for f in t.frames if f.name in named}
    words = [*files, *m.sites, *m.flags, *m.any_flags, *named]
    areas = {area_of(w.replace("hierarchical-cache", "hicache")) for w in words} - {"other"}
    return [f"{area}: {patched[area]} differ" for area in sorted(areas & set(patched))]


def _frames(scene: Scene, engines: list[EngineView], m: Match) -> list[str] | None:
    """Reasons of the stack conditions; None if one fails."""
    ranks = [r for e in engines for r in e.ranks.values()]
    mains = [s.main for r in ranks for s in r.stacks] + [
        s.main for stacks in scene.processes_by_kind.values() for s in stacks
    ]
    names = {f.name for t in mains if t for f in t.frames}
    names |= {f.name for s in scene.stacks if s.tool == "gdb" for t in s.threads for f in t.frames}
    logged = scene.events("failed_collective_frame", "traceback_frame")
    recorded = {str(e.get("function")) for e in logged}
    recorded |= {str(e.get("file")).removesuffix(".py") for e in logged}
    recorded |= {
        n for c in scene.collectives for f in c.frames for n in (f.name, f.file.rsplit("/", 1)[-1].removesuffix(".py"))
    }
    recorded |= {str(e.get("function")) for e in scene.events("top_row")}
    names |= recorded
    if any(f not in names for f in m.frames) or any(f in names for f in m.not_frames):
        return None
    hit = [f for f in m.any_frames if f in names]
    if m.any_frames and not hit:
        return None
    sites = {r.at.site for r in ranks}
    if any(s not in sites for s in m.sites):
        return None
    if m.dp is not None and m.dp != any(r.who.dp is not None for r in ranks):
        return None
    if m.pp is not None and m.pp != any(r.who.pp is not None for r in ranks):
        return None
    families = {e.family for e in scene.engines} | {f.who.family for f in scene.facts if f.who}
    if m.family and m.family not in families | scene.families:
        return None
    reasons = []
    if m.frames or hit:
        reasons.append(f"frames {', '.join([*m.frames, *hit[:2]])}")
    if m.sites:
        reasons.append(f"ranks at {' and '.join(s.replace('_', ' ') for s in m.sites)}")
    return reasons


def _others(scene: Scene, m: Match) -> list[str] | None:
    """Reasons of the conditions on logs, devices and settings; None if one fails."""
    reasons: list[str] = []
    if any(not scene.has(k) for k in m.events):
        return None
    seen = [k for k in m.any_events if scene.has(k)]
    if m.any_events and not seen:
        return None
    if m.events or seen:
        reasons.append(f"log: {', '.join(k.replace('_', ' ') for k in [*m.events, *seen])}")
    for where, pattern in m.values.items():
        kind, key = where.split(".")
        hit_value = next((str(v) for e in scene.events(kind) if re.search(pattern, str(v := e.get(key, "")))), None)
        if hit_value is None:
            return None
        reasons.append(f"{kind.replace('_', ' ')}: {key} {hit_value}")
    ops = {c.op for c in scene.collectives}
    if any(o not in ops for o in m.ops):
        return None
    if m.ops:
        reasons.append(f"operations {', '.join(m.ops)}")
    for pattern in m.kernels:
        kernel = next((k for k in scene.kernels if k.name and re.search(pattern, k.name)), None)
        if kernel is None:
            return None
        reasons.append(f"kernel {kernel.name}")
    flags = [scene.flag(f) for f in m.flags]
    if any(f is None for f in flags):
        return None
    any_flags = [s for f in m.any_flags if (s := scene.flag(f)) is not None]
    if m.any_flags and not any_flags:
        return None
    env = [s for v in m.env if (s := scene.env(v)) is not None]
    if m.env and not env:
        return None
    settings: list[Setting] = [s for s in flags if s is not None] + any_flags + env
    if settings:
        reasons.append(f"set: {', '.join(s.name for s in settings[:4])}")
    return reasons
