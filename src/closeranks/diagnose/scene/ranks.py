"""Ranks and engines as the dumps show them."""

from dataclasses import dataclass, field
from functools import cached_property

from closeranks.diagnose.facts import Stack, Who
from closeranks.diagnose.stacks import Position, position, same_call


@dataclass
class RankView:
    """One rank of one engine: its dumps in order, and where the last one found it."""

    who: Who
    label: str
    stacks: list[Stack] = field(default_factory=list)

    @cached_property
    def positions(self) -> list[Position]:
        """A position per dump."""
        return [position(s.main) for s in self.stacks]

    @property
    def at(self) -> Position:
        """Where the last dump found it."""
        return self.positions[-1]

    @property
    def moving(self) -> bool | None:
        """Whether two dumps differ in their frames' names; None with one dump."""
        if len(self.stacks) < 2:
            return None
        return len({_shape(s) for s in self.stacks}) > 1

    @property
    def turned(self) -> bool:
        """Whether the last two dumps found it in two different collectives, or in blocking I/O and then elsewhere: what
        it waited in first has ended."""
        if len(self.stacks) < 2:
            return False
        a, b = self.positions[-2:]
        if a.kind == "blocking_io" != b.kind:
            return True
        return a.kind == b.kind == "collective" and ((a.op, a.site) != (b.op, b.site) or not same_call(a, b))


@dataclass
class EngineView:
    """The ranks that share collectives: one engine (one side of a pair, one set of workers)."""

    name: str  # decode, prefill, "" for an engine without a role
    family: str
    ranks: dict[str, RankView] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def at(self, *kinds: str) -> list[RankView]:
        """Ranks whose position is of one of `kinds`."""
        return [r for r in self.ranks.values() if r.at.kind in kinds]

    @property
    def still(self) -> bool | None:
        """Whether every rank was dumped twice without a difference; None with one round."""
        moves = [r.moving for r in self.ranks.values()]
        return None if not moves or any(m is None for m in moves) else not any(moves)

    def by_stage(self) -> dict[int | None, list[RankView]]:
        """Ranks by pipeline stage: those of one stage form a tensor-parallel group."""
        out: dict[int | None, list[RankView]] = {}
        for r in self.ranks.values():
            out.setdefault(r.who.pp, []).append(r)
        return out


def _shape(s: Stack) -> tuple[str, ...]:
    """Names of the main thread's Python frames: a dump with native frames and one without show the same place."""
    frames = s.main.frames if s.main else ()
    python = tuple(f.name for f in frames if f.file.endswith(".py"))
    return python or tuple(f.name for f in frames)
