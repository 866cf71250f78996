"""The scene: facts put side by side. Engines with their ranks and positions, progress over time, settings, devices.

Everything here is derived from facts alone and decides nothing; rules decide. `index` holds the facts by kind,
`progress` what moves and what stands, `past` what is over, `ranks` the ranks of one engine; this module sorts dumps
into engines.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from closeranks.diagnose import names
from closeranks.diagnose.facts import Fact, Stack, Who
from closeranks.diagnose.scene.past import Past
from closeranks.diagnose.scene.progress import MANY
from closeranks.diagnose.scene.ranks import EngineView, RankView

ROLES = {"decode", "prefill"}
__all__ = ["MANY", "ROLES", "EngineView", "RankView", "Scene", "first"]


@dataclass
class Scene(Past):
    """All facts of one bundle, and views on them."""

    _own: dict[int, "Scene"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def engines(self) -> list[EngineView]:
        """Engines with dumps. A second dump of one process is a second sample; of another process, another engine."""
        out: list[EngineView] = []
        for s in self.stacks:
            who = s.who or names.from_file(s.src.file)
            if who is None:
                if s.main is None or not _computes(s):
                    continue
                who = Who(kind="torch", family="")
            if not who.is_rank:
                continue
            label = who.label if who.label != who.kind else f"pid {s.pid}"
            family = who.family
            role = s.role or names.role_in_path(s.src.file) or self._role_beside(s, label)
            engine = next((e for e in out if e.family == family and e.name == role and _fits(e, label, s)), None)
            if engine is None:
                engine = EngineView(role, family)
                out.append(engine)
            engine.ranks.setdefault(label, RankView(who, label)).stacks.append(s)
        for engine in out:
            engine.missing = self._missing(engine)
        return out

    @cached_property
    def _roles_by_file(self) -> dict[str, dict[str, dict[str, set[int | None]]]]:
        """File → role that frames or titles tell → label → processes, of ranks."""
        out: dict[str, dict[str, dict[str, set[int | None]]]] = {}
        for s in self.stacks:
            if s.who and s.who.is_rank and s.role:
                ranks = out.setdefault(s.src.file, {}).setdefault(s.role, {})
                ranks.setdefault(s.who.label, set()).add(s.pid)
        return out

    def _role_beside(self, dump: Stack, label: str) -> str:
        """The one role that the other ranks of its file show, for a rank without one: it starts, or ends.

        "" where a rank of that role already has its label: then it is of another engine.
        """
        beside = self._roles_by_file.get(dump.src.file, {})
        if len(beside) != 1:
            return ""
        ((role, ranks),) = beside.items()
        return role if ranks.get(label, {dump.pid}) <= {dump.pid} else ""

    def only(self, engine: EngineView) -> "Scene":
        """This scene without what belongs to another engine: whether one stands does not depend on its peer.

        Facts belong by process, or by the role that a label, a batch line or a file's name tells. The rest stays. Made
        once: rules ask again and again, and what a scene derives costs a pass over all facts.
        """
        own = self._own.get(id(engine))
        if own is None:
            own = self._own[id(engine)] = self._only(engine)
        return own

    def _only(self, engine: EngineView) -> "Scene":
        others = [e for e in self.engines if e is not engine]
        foreign = ROLES - {engine.name} if engine.name in ROLES else set()
        if not others and not foreign:
            return self
        own = {s.pid for r in engine.ranks.values() for s in r.stacks}
        pids = {s.pid for e in others for r in e.ranks.values() for s in r.stacks} - own - {None}
        roles = ({e.name for e in others} - {engine.name, ""} if engine.name else set()) | foreign
        facts = [f for f in self.facts if not (getattr(f, "pid", None) in pids or self.role_of(f) in roles)]
        return Scene(facts, self.files, self.notes)

    def engine_of(self, pid: int) -> str:
        """The role of the engine whose dumps hold this process, "" if none does or it has no role."""
        return next((e.name for e in self.engines for r in e.ranks.values() for s in r.stacks if s.pid == pid), "")

    def _missing(self, engine: EngineView) -> list[str]:
        """Ranks that exist by label, flag or failed dump and have no dump."""
        labels = set(engine.ranks)
        tps = {r.who.tp for r in engine.ranks.values() if r.who.tp is not None}
        seen = {
            f.who.label: f.who
            for f in self.facts
            if f.who and f.who.kind in ("scheduler", "worker") and f.who.family == engine.family
            if not engine.name or self.role_of(f) in ("", engine.name)
        }
        out = [
            label
            for label, who in seen.items()
            if label not in labels and label != who.kind and self._same_shape(engine, who)
        ]
        size = self.flag_number("tp", "tp-size", "tensor-parallel-size")
        if tps and size and len(self.engines_named(engine)) <= 1:
            known = tps | {w.tp for w in seen.values() if w.tp is not None}
            out += [f"TP{i}" for i in range(min(size, 1024)) if i not in known]
        gaps = set(range(max(tps) + 1)) - tps if tps and max(tps) < 1024 else set()
        known_tp = {w.tp for w in seen.values()}
        out += [f"TP{i}" for i in sorted(gaps) if i not in known_tp and f"TP{i}" not in out]
        return sorted(set(out), key=_natural)

    def engines_named(self, engine: EngineView) -> set[str]:
        """Roles seen in this bundle for the family of `engine`."""
        return {self.role_of(s) for s in self.stacks if s.who and s.who.family == engine.family and s.who.is_rank}

    def _same_shape(self, engine: EngineView, who: Who) -> bool:
        any_rank = next(iter(engine.ranks.values())).who
        return (
            (any_rank.dp is None) == (who.dp is None)
            and (any_rank.pp is None) == (who.pp is None)
            and len(self.engines_named(engine)) <= 1
        )


def _computes(s: Stack) -> bool:
    main = s.main
    return bool(
        main and any(re.search(r"torch|jax|cuda|vllm|sglang|tensorrt_llm|megatron|deep", f.file) for f in main.frames)
    )


def _fits(engine: EngineView, label: str, s: Stack) -> bool:
    known = engine.ranks.get(label)
    return known is None or any(k.pid == s.pid for k in known.stacks)


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(p), "") if p.isdecimal() else (0, p) for p in re.split(r"(\d+)", text))


def first(items: Iterable[Fact], test: Callable[[Fact], bool] = lambda _: True) -> Fact | None:
    """The first item that passes, by time where there is one."""
    found = [i for i in items if test(i)]
    return min(found, key=lambda f: (f.time if f.time is not None else float("inf"), f.src)) if found else None
