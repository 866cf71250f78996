"""The environment that a bug report asks for, from facts: versions, flags, variables, topology."""

from closeranks.diagnose.facts import Setting
from closeranks.diagnose.scene import Scene

_MOST = 40  # lines of one section


def environment(scene: Scene) -> dict[str, list[str]]:
    """Section → lines; a section of which the evidence says nothing is left out."""
    sections = {
        "Versions": _versions(scene),
        "Flags": _values(scene, "flag", "--", " "),
        "Variables": _values(scene, "env", "", "="),
        "Topology": _topology(scene),
        "Changed against the release": [f"{area}: {files}" for area, files in scene.patched().items()],
    }
    return {name: lines[:_MOST] for name, lines in sections.items() if lines}


def _versions(scene: Scene) -> list[str]:
    seen: dict[str, list[str]] = {}
    for s in scene.of(Setting):
        if s.kind == "version" and s.value not in seen.setdefault(s.name, []):
            seen[s.name].append(s.value)
    arch = scene.arch()
    return [f"{name} {' and '.join(values)}" for name, values in sorted(seen.items())] + ([arch] if arch else [])


def _values(scene: Scene, kind: str, before: str, between: str) -> list[str]:
    """Each distinct setting once; a flag with two values has two engines, or was overridden."""
    found = [s for s in scene.of(Setting) if s.kind == kind]
    return list(dict.fromkeys(f"{before}{s.name}{between if s.value else ''}{s.value}" for s in found))


def _topology(scene: Scene) -> list[str]:
    out = []
    for e in scene.engines:
        labels = list(e.ranks)
        shown = ", ".join(labels) if len(labels) <= 16 else f"{labels[0]} … {labels[-1]} ({len(labels)})"
        out.append(f"{' '.join(w for w in (e.family, e.name) if w) or 'ranks'}: {shown}")
        if e.missing:
            out[-1] += f"; without a dump: {', '.join(e.missing[:16])}"
    roles = {str(b.get("role")) for b in scene.batches if b.get("role")} - {e.name for e in scene.engines}
    out += [f"{role} engine (by its log)" for role in sorted(roles)]
    cards = {g.index for g in scene.gpus}
    return out + ([f"{len(cards)} GPU{'s' if len(cards) > 1 else ''} in nvidia-smi"] if cards else [])
