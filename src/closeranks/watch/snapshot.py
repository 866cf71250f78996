"""What the watch knows at one moment, as frozen data: engines, readings of the signals, and the state of each engine.

Signals fill a `Snapshot`; the state machine turns snapshots into `State`s and looks at nothing else, so that a recorded
sequence of snapshots gives the same states again.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal["sglang", "vllm", "trtllm", "closeranks"]
Role = Literal["prefill", "decode", "both"]
ProcRole = Literal[
    "launcher", "rank", "detokenizer", "engine_core", "worker", "router", "leader", "gateway", "supervisor", "helper"
]
"""`gateway`, `supervisor`: of `closeranks serve`, one for all its engines."""
Phase = Literal["healthy", "suspect", "excluded", "confirmed", "blind"]
"""`excluded`: looks like a fault and is none, the reason is said. `blind`: nothing can be said of this engine."""
Signal = Literal["proc", "counters", "loads", "http", "log", "probe", "gpu", "steps", "stacks"]
Value = float | str | bool
Values = Mapping[str, Value]


class Proc(msgspec.Struct, frozen=True):
    """One process. `start_time`: clock ticks since boot (of /proc/PID/stat); with the pid it is an identity."""

    pid: int
    start_time: int
    ppid: int
    role: ProcRole
    engine: str
    rank: int | None
    title: str
    """Process title or module, without arguments."""

    @property
    def label(self) -> str:
        """Its name within the engine: `TP0`, `launcher`, `detokenizer`, …"""
        if self.role in ("rank", "worker") and self.rank is not None:
            return f"TP{self.rank}"
        return self.role if self.rank is None else f"{self.role}_{self.rank}"

    @property
    def decides(self) -> bool:
        """Whether its main thread runs the engine's loop."""
        return self.role in ("rank", "worker", "engine_core", "leader")


class EngineSeen(msgspec.Struct, frozen=True):
    """One engine as its processes show it."""

    name: str
    """Unique on this host and the same after a restart: role and port, e.g. `decode-31022`."""
    kind: Kind
    role: Role
    url: str | None
    """Base address of its HTTP server; None when no flag or listening socket tells."""
    procs: tuple[Proc, ...]
    argv: tuple[str, ...] = ()
    """Command line of its launcher: start it again with this. Holds secrets; never shown."""
    cwd: str = ""
    logs: tuple[str, ...] = ()
    """Files that its launcher's standard output and error go to."""
    world: int = 0
    """Ranks according to its flags; 0: unknown."""
    backend: str = ""
    """KV transfer backend according to its flags."""

    @property
    def deciders(self) -> tuple[Proc, ...]:
        """The processes whose main threads run its loop."""
        return tuple(p for p in self.procs if p.decides)

    @property
    def launcher(self) -> Proc | None:
        return next((p for p in self.procs if p.role == "launcher"), None)

    @property
    def head(self) -> Proc | None:
        """Its launcher or, of our own engines, its leader: another one is another life of the engine."""
        return next((p for p in self.procs if p.role in ("launcher", "leader")), None)

    @property
    def own_name(self) -> str:
        """Of closeranks' own: what the engine calls itself, as its gateway's metrics have it."""
        head = next((p for p in self.procs if p.role in ("leader", "rank")), None)
        words = head.title.split(" ") if head is not None else []
        return words[1] if len(words) > 1 else self.name

    @property
    def shared(self) -> tuple[Proc, ...]:
        """Those of its processes that serve other engines too."""
        return tuple(p for p in self.procs if p.role in ("gateway", "supervisor"))

    @property
    def parts(self) -> tuple[Proc, ...]:
        """Its processes that are known by a role: all but its helpers."""
        return tuple(p for p in self.procs if p.role != "helper")

    @property
    def life(self) -> frozenset[tuple[int, int]]:
        """Identity of this life of the engine: pid and start time of each process."""
        return frozenset((p.pid, p.start_time) for p in self.procs)


class Blind(msgspec.Struct, frozen=True):
    """A signal gave nothing, and why. It silences only its own rules, and is shown."""

    reason: str


class Snapshot(msgspec.Struct, frozen=True):
    """One look. `readings`: signal → (engine name, or `engine/label` for one process) → values, or Blind."""

    at: float
    """Seconds of a monotonic clock."""
    wall: float
    """Epoch seconds, for people only: nothing is decided by it."""
    engines: tuple[EngineSeen, ...]
    readings: Mapping[Signal, Mapping[str, Values | Blind]]
    disturbed: Mapping[str, float] = {}
    """Engine → when the last stack dump of it ended (infinity: it goes on). Context switches up to then are ours."""


class Evidence(msgspec.Struct, frozen=True):
    """One piece of evidence, in words."""

    signal: Signal
    rank: str | None
    """Label of the process that it is about; None: the engine."""
    text: str


class State(msgspec.Struct, frozen=True):
    """What is held of one engine. `since`: monotonic seconds at which this phase began."""

    engine: str
    phase: Phase
    why: tuple[Evidence, ...]
    since: float
    blind: tuple[str, ...] = ()
    """Signals that give nothing for this engine, each with its reason."""
    proof: bool = False
    """Confirmed by a proof: a death, a raised error, a part stopped by a signal. No inference speaks against it."""
    cls: str = ""
    """The class of verdict that the signs of its confirmation amount to by themselves; mostly none."""
