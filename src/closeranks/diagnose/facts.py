"""Facts: what readers take out of evidence. Frozen, each with its file and line, none with a prompt, local or key.

A fact holds parsed fields only. `says()` renders it for a person from those fields, so a report never needs the raw
line again.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

Value = str | int | float | bool


class Src(msgspec.Struct, frozen=True, order=True):
    """Where a fact was read: evidence name and 1-based line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Who(msgspec.Struct, frozen=True):
    """A process of an engine, as its title or log prefix names it. Indices are None when the name has no such part."""

    kind: str  # scheduler, worker, engine_core, api, detokenizer, dp_controller, launcher, router, torch, other
    family: str = ""  # sglang, vllm, tensorrt-llm, dynamo, torch, ""
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    ep: int | None = None
    rank: int | None = None  # a global rank, where only that is known

    @property
    def label(self) -> str:
        """`DP0 TP3`, `rank 5`, `engine_core`: stable within one engine."""
        if self.rank is not None:
            return f"rank {self.rank}"
        parts = [f"{n}{v}" for n, v in (("DP", self.dp), ("PP", self.pp), ("TP", self.tp)) if v is not None]
        if not parts and self.ep is not None:
            parts = [f"EP{self.ep}"]
        if self.kind == "engine_core":
            parts.insert(0, "EngineCore")
        return " ".join(parts) or self.kind

    @property
    def is_rank(self) -> bool:
        """Whether this process takes part in the engine's collectives."""
        return self.kind in ("scheduler", "worker", "torch", "engine_core")


class Frame(msgspec.Struct, frozen=True):
    """One stack frame: `name` without its class, `file` as printed, line 0 for native frames."""

    name: str
    file: str
    line: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.file.rsplit('/', 1)[-1]}:{self.line})" if self.line else f"{self.name} ({self.file})"
        )


class Thread(msgspec.Struct, frozen=True):
    """One thread of a dump, frames innermost first."""

    name: str
    frames: tuple[Frame, ...]
    active: bool = False
    gil: bool = False
    main: bool = False


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all facts. `time` is seconds since the start of a year (see `clock`), None if the source has no clock."""

    src: Src
    who: Who | None = None
    time: float | None = None

    def says(self) -> str:
        """One safe line about this fact."""
        raise NotImplementedError


class Stack(Fact, frozen=True, kw_only=True):
    """All threads of one process at one moment."""

    pid: int | None
    threads: tuple[Thread, ...]
    tool: str
    role: str = ""  # decode, prefill, or "" when frames do not tell
    python: str = ""  # version of the interpreter, `3.12`

    @property
    def main(self) -> Thread | None:
        """The thread that decides: MainThread by name, else the one flagged by the reader."""
        return next((t for t in self.threads if t.main), None)

    def says(self) -> str:
        main = self.main
        top = " ← ".join(str(f) for f in main.frames[:4]) if main else "no main thread"
        return f"{self.who.label if self.who else 'a process'}: {top}"


class StackFailed(Fact, frozen=True, kw_only=True):
    """A dump that was tried and gave nothing: no evidence about that rank, not evidence that it is well."""

    pid: int | None
    reason: str

    def says(self) -> str:
        return f"{self.who.label if self.who else f'pid {self.pid}'}: no stack ({self.reason})"


class Event(Fact, frozen=True, kw_only=True):
    """Something a log line, an event list or a command's output tells. `kind` names it, `data` holds parsed values."""

    kind: str
    data: Mapping[str, Value] = msgspec.field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """A parsed value."""
        return self.data.get(key, default)

    def num(self, key: str) -> float | None:
        """A parsed value as a number, None if absent."""
        v = self.data.get(key)
        return float(v) if isinstance(v, int | float) else None

    def says(self) -> str:
        shown = ", ".join(f"{k} {v}" for k, v in self.data.items() if not k.startswith("_"))
        who = f"{self.who.label}: " if self.who else ""
        return f"{who}{self.kind.replace('_', ' ')}{f' ({shown})' if shown else ''}"


class Collective(Fact, frozen=True, kw_only=True):
    """One collective of one rank: from the NCCL watchdog, a flight recorder, or a desync report."""

    origin: str  # watchdog, recorder, desync_report
    op: str  # lower case, without a backend prefix: allreduce, broadcast, allgather, …
    seq: int
    group: str  # process group, "" when neither the line nor, for a watchdog's, one beside it names it
    numel_in: int | None = None
    numel_out: int | None = None
    state: str = ""  # scheduled, started, completed, timeout
    frames: tuple[Frame, ...] = ()
    p2p: bool = False
    timeout_ms: int | None = None
    dump: str = ""  # identity of the file or document it came from, for ranks without a number
    place: int | None = None  # rank inside the group
    numbered: bool = False  # `who.rank` is the rank of the job; otherwise it may be that inside the group
    unsure: bool = False  # the scene took the group from other ranks' lines: the only one that is named there

    def says(self) -> str:
        size = f", {self.numel_in} elements" if self.numel_in is not None else ""
        where = f" in {self.frames[-1]}" if self.frames else ""
        group = f" of group {self.group}" if self.group else ""
        who = self.who.label if self.who else self.dump or "a rank"
        return f"{who}: {self.op} #{self.seq}{group}{size}{where} ({self.state})"


class GroupStatus(Fact, frozen=True, kw_only=True):
    """Counts of one process group on one rank: hosts that enqueued the same number agree."""

    group: str
    enqueued: int
    completed: int
    failed_seq: int | None = None
    members: tuple[int, ...] = ()
    place: int | None = None  # rank inside the group

    def says(self) -> str:
        return f"{self.who.label if self.who else 'a rank'}: enqueued {self.enqueued}, completed {self.completed}"


class Metric(Fact, frozen=True, kw_only=True):
    """One sample of one scrape. `scrape` numbers the scrapes of a bundle in order of appearance."""

    name: str
    labels: Mapping[str, str]
    value: float
    scrape: int
    other: str = ""
    """A digest of the labels that are not kept: samples that differ in those are of two series."""

    def says(self) -> str:
        rank = self.labels.get("tp_rank") or self.labels.get("engine")
        return f"{self.name}{f'[{rank}]' if rank else ''} = {self.value:g}"


class Gpu(Fact, frozen=True, kw_only=True):
    """One row of nvidia-smi. Power in watts, memory in MiB."""

    index: str
    util: float | None = None
    mem_util: float | None = None
    power: float | None = None
    power_limit: float | None = None
    mem_used: float | None = None
    mem_total: float | None = None

    def says(self) -> str:
        power = f", {self.power:g} W" if self.power is not None else ""
        return f"GPU {self.index}: {self.util:g} % busy{power}" if self.util is not None else f"GPU {self.index}"


class Kernel(Fact, frozen=True, kw_only=True):
    """What cuda-gdb sees on one device: a resident kernel, or none (`name` empty), or a spinning instruction."""

    device: str
    name: str
    spinning: bool = False

    def says(self) -> str:
        if not self.name:
            return f"device {self.device}: no kernel resident"
        return f"device {self.device}: {self.name} resident{', spinning on a barrier' if self.spinning else ''}"


class Process(Fact, frozen=True, kw_only=True):
    """A row of ps, or `/proc/<pid>`: state letter, CPU percent, changes over a window where two readings exist."""

    pid: int
    state: str
    cpu: float | None = None
    title: str = ""
    switches_total: float | None = None  # voluntary context switches so far: how often it went to sleep
    forced_total: float | None = None  # involuntary ones: how often it was put off the CPU, as a spinning thread is
    ticks_total: float | None = None  # CPU time so far, in clock ticks
    switches: float | None = None  # voluntary ones between two readings; filled in by the scene
    forced: float | None = None
    ticks: float | None = None
    ran: bool = False  # was running or waited for a CPU in one of the readings

    def says(self) -> str:
        name = self.who.label if self.who else self.title or "process"
        moved = f", {self.switches:g} context switches in the window" if self.switches is not None else ""
        return f"pid {self.pid} ({name}): state {self.state}{moved}"


class Ras(Fact, frozen=True, kw_only=True):
    """One finding of ncclras about one communicator."""

    comm: str
    status: str  # OK, MISMATCH, ERROR, INCOMPLETE
    op: str = ""
    counts: tuple[tuple[int, int], ...] = ()  # (ranks, launched operations)
    minority: tuple[int, ...] = ()
    missing: int = 0
    dead: int = 0
    ranks: int = 0

    @property
    def few_are_ahead(self) -> bool:
        """Whether the ranks that are listed by number are those that have launched most."""
        top = max((k for _, k in self.counts), default=0)
        named = {k for n, k in self.counts if n == len(self.minority)}
        return bool(self.minority) and named == {top} and any(k < top for _, k in self.counts)

    def says(self) -> str:
        counts = "; ".join(f"{n} ranks at {k}" for n, k in self.counts)
        who = f", minority: rank {', '.join(map(str, self.minority))}" if self.minority else ""
        return f"RAS {self.comm or 'summary'}: {self.status}{f' {self.op}' if self.op else ''} {counts}{who}".rstrip()


class Setting(Fact, frozen=True, kw_only=True):
    """A launch flag (`name` without dashes, underscores as dashes), an environment variable, a version,
    a platform, or a patched area.
    """

    kind: str  # flag, env, version, arch, patched
    name: str
    value: str

    def says(self) -> str:
        return f"{self.kind} {self.name}{f' = {self.value}' if self.value else ''}"
