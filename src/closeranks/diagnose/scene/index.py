"""Facts by kind, and what follows from facts of one kind: readings of a process, devices, settings, families."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from msgspec.structs import replace

from closeranks.diagnose import names
from closeranks.diagnose.facts import (
    Collective,
    Event,
    Fact,
    Gpu,
    GroupStatus,
    Kernel,
    Metric,
    Process,
    Ras,
    Setting,
    Stack,
    StackFailed,
    Who,
)

F = TypeVar("F", bound=Fact)
_PACKAGE = re.compile(r"(?:^|/)(sglang|vllm|tensorrt_llm|dynamo)/(?!.*/(?:sglang|vllm|tensorrt_llm|dynamo)/)")
_NO_ENGINE = ("", "torch")


# Events that speak of the life in which they were logged. After an engine has come up anew they are the past.
_TROUBLE = frozenset(
    """worker_died engine_dead engine_start_failed child_crashed rank_exception exception fatal helper_thread_dead
    teardown exit_code shm_wait rpc_timeout watchdog health_failed peer_closed peer_lost gloo_timeout kv_pull_failed
    kv_handshake_failed kv_load_failed kv_expired kv_read_expired transfer_failed transfer_error
    transfer_worker_error stale_agent peer_blacklisted""".split()  # noqa: SIM905
)


def _came_up_again(events: dict[str, list[Event]]) -> dict[str, Event]:
    """File → the last beginning of a life in it after which the engine came up: logs go on over restarts.

    Not of files into which two engines write: whose death stands there cannot be told.
    """
    up = {u.src.file: u.src for u in events.get("started", ())}  # the last of each file
    found: dict[str, Event] = {}
    sides: dict[str, set[str]] = {}
    for b in events.get("life_began", ()):
        if side := b.get("side") or b.get("port"):
            sides.setdefault(b.src.file, set()).add(str(side))
        if b.src.file in up and b.src < up[b.src.file]:
            found[b.src.file] = b
    return {file: b for file, b in found.items() if len(sides.get(file, ())) < 2}


def _former(e: Event, again: dict[str, Event]) -> bool:
    """Whether its log shows that the engine began anew after `e` and came up."""
    b = again.get(e.src.file)
    return b is not None and b.src > e.src and (e.time is None or b.time is None or b.time > e.time)


def _distance(a: Fact, b: Fact) -> tuple[int, int]:
    """How far apart two facts stand: those of one file are near, and what follows is nearer than what stands before."""
    if a.src.file != b.src.file:
        return 1, 0
    return 0, b.src.line - a.src.line if b.src >= a.src else 1_000_000 + a.src.line - b.src.line


@dataclass
class Index:
    """The facts of one bundle, by kind."""

    facts: list[Fact]
    files: list[str]
    notes: list[str] = field(default_factory=list)

    def of(self, kind: type[F]) -> list[F]:
        """Facts of one type, in order."""
        return [f for f in self.facts if isinstance(f, kind)]

    @cached_property
    def _events(self) -> dict[str, list[Event]]:
        out: dict[str, list[Event]] = {}
        who_at = {(e.src.file, e.src.line): e.who for e in self.of(Event) if e.kind == "exception" and e.who}
        for e in self.of(Event):
            if e.who is None and (e.src.file, e.src.line) in who_at and e.kind != "exception":
                e = Event(src=e.src, who=who_at[e.src.file, e.src.line], time=e.time, kind=e.kind, data=e.data)
            out.setdefault(e.kind, []).append(e)
        again = _came_up_again(out)
        for kind in _TROUBLE & set(out) if again else ():
            kept = [e for e in out[kind] if not _former(e, again)]
            out.pop(kind)
            if kept:
                out[kind] = kept
        return out

    def events(self, *kinds: str) -> list[Event]:
        """Events of the given kinds, by kind, then in order."""
        return [e for k in kinds for e in self._events.get(k, ())]

    @property
    def kinds(self) -> list[str]:
        """Kinds of events that were seen, in order of appearance."""
        return list(self._events)

    def has(self, *kinds: str) -> bool:
        """Whether any event of these kinds was seen."""
        return any(k in self._events for k in kinds)

    @cached_property
    def stacks(self) -> list[Stack]:
        """All dumps, in order of appearance. A dump without a title takes the name that others give its process."""
        found = self.of(Stack)
        names_of: dict[int | None, set[Who]] = {}
        for s in found:
            if s.who is not None and s.pid is not None:
                names_of.setdefault(s.pid, set()).add(s.who)
        return [
            replace(s, who=next(iter(names_of[s.pid]))) if s.who is None and len(names_of.get(s.pid, ())) == 1 else s
            for s in found
        ]

    @cached_property
    def gpus(self) -> list[Gpu]:
        """Rows of nvidia-smi."""
        return self.of(Gpu)

    @cached_property
    def kernels(self) -> list[Kernel]:
        """What cuda-gdb saw."""
        return self.of(Kernel)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Collectives of watchdogs, recorders and desync reports.

        A watchdog's line does not name its group. The line of the same rank about that sequence number does; where it
        is lost, the only group that other ranks name for this number is taken, and the fact says so.
        """
        found = self.of(Collective)
        status: dict[tuple[Who | None, int], list[GroupStatus]] = {}
        for s in self.group_status:
            if s.failed_seq is not None and s.group:
                status.setdefault((s.who, s.failed_seq), []).append(s)
        out: list[Collective] = []
        for c in found:
            if c.origin == "watchdog" and not c.group and (near := status.get((c.who, c.seq))):
                s = min(near, key=lambda s: _distance(c, s))
                # Without a number of the job two ranks of a log share theirs: only a line right beside it is its own.
                if s.place in (None, c.place) and (c.numbered or _distance(c, s) <= (0, 6)):
                    c = replace(c, group=s.group)
            out.append(c)
        named: dict[int, set[str]] = {}
        for c in out:
            if c.origin == "watchdog" and c.group:
                named.setdefault(c.seq, set()).add(c.group)
        return [
            replace(c, group=next(iter(named[c.seq])), unsure=True)
            if c.origin == "watchdog" and not c.group and len(named.get(c.seq, ())) == 1
            else c
            for c in out
        ]

    @cached_property
    def group_status(self) -> list[GroupStatus]:
        """Enqueued and completed counts."""
        return self.of(GroupStatus)

    @cached_property
    def ras(self) -> list[Ras]:
        """RAS findings."""
        return self.of(Ras)

    @cached_property
    def processes(self) -> list[Process]:
        """ps and /proc rows. Of a process that was read twice, the last reading tells what happened in between.

        `/proc` cuts a name after 15 letters, and has none of what runs under its interpreter's: a row takes the full
        one that a title or a dump gives its process.
        """
        named: dict[int, set[Who]] = {}
        kinds: dict[int, set[Who]] = {}
        seen: list[Process | Stack] = [*self.of(Process), *self.stacks]
        for f in seen:
            if f.pid is not None and f.who is not None:
                (named if f.who.label != f.who.kind else kinds).setdefault(f.pid, set()).add(f.who)
        first: dict[int, Process] = {}
        clock: dict[int, list[float]] = {}
        ran: set[int] = set()
        for p in self.of(Process):
            if p.ticks_total is not None:
                clock.setdefault(p.pid, []).append(p.ticks_total)
            if p.switches_total is not None and p.state.startswith("R"):
                ran.add(p.pid)
        out: list[Process] = []
        for p in self.of(Process):
            if p.switches_total is not None:
                before = first.setdefault(p.pid, p)
                if before is not p:
                    ticks = clock.get(p.pid, [])
                    p = replace(
                        p,
                        switches=abs(p.switches_total - (before.switches_total or 0)),
                        forced=abs((p.forced_total or 0) - (before.forced_total or 0)),
                        ticks=max(ticks) - min(ticks) if len(ticks) > 1 else None,
                        ran=p.pid in ran,
                    )
            known = named.get(p.pid) or (kinds.get(p.pid, set()) if p.who is None else set())
            if len(known) == 1 and (p.who is None or p.who.label == p.who.kind):
                p = replace(p, who=next(iter(known)))
            out.append(p)
        return out

    @cached_property
    def failed_dumps(self) -> list[StackFailed]:
        """Dumps that gave nothing."""
        return self.of(StackFailed)

    @cached_property
    def processes_by_kind(self) -> dict[str, list[Stack]]:
        """Dumps of processes that are no ranks (API server, detokenizer, launcher), by kind."""
        out: dict[str, list[Stack]] = {}
        for s in self.stacks:
            if s.who and not s.who.is_rank:
                out.setdefault(s.who.kind, []).append(s)
        return out

    @cached_property
    def batches(self) -> list[Event]:
        """Batch lines of SGLang, throughput lines of vLLM, in order."""
        found = self.events("prefill_batch", "decode_batch", "vllm_stats")
        return sorted(found, key=lambda e: (e.time if e.time is not None else 0.0, e.src))

    @cached_property
    def paused(self) -> list[Event]:
        """Orders to pause that no later line of the same file takes back."""
        last: dict[str, Event] = {}
        for e in sorted(self.events("paused", "resumed"), key=lambda e: e.src):
            last[e.src.file] = e
        return [e for e in last.values() if e.kind == "paused"]

    def role_of(self, fact: Fact) -> str:
        """The role of the engine that a fact speaks of, "" if nothing tells."""
        told = ""
        if isinstance(fact, Metric):
            told = fact.labels.get("engine_type", "")
        elif isinstance(fact, Stack):
            told = fact.role
        elif isinstance(fact, Event):
            told = str(fact.get("role", ""))
        return told or names.role_in_path(fact.src.file)

    # -- settings ----------------------------------------------------------------------------------------------------

    def flag(self, *flags: str) -> Setting | None:
        """The last setting of one of these launch flags."""
        return self._setting("flag", flags)

    def env(self, *variables: str) -> Setting | None:
        """The last setting of one of these environment variables."""
        return self._setting("env", variables)

    def version(self, component: str) -> Setting | None:
        """The version of a component, if printed."""
        return self._setting("version", (component,))

    def versions(self, component: str) -> list[str]:
        """All versions of a component that are printed, in order: two engines may differ."""
        found = [s.value for s in self.of(Setting) if s.kind == "version" and s.name == component]
        return list(dict.fromkeys(found))

    @cached_property
    def _engines_named(self) -> Counter[str]:
        """Engines that this evidence is of → how much of it: titles, prefixes, batch lines, metrics and frames."""
        seen = Counter(f.who.family for f in self.facts if f.who and f.who.family not in _NO_ENGINE)
        seen.update("vllm" if b.kind == "vllm_stats" else "sglang" for b in self.batches)
        seen.update({m.name.split(":")[0] for m in self.of(Metric)} & {"sglang", "vllm", "dynamo"})
        frames = {f.file for s in self.stacks for t in s.threads for f in t.frames}
        seen.update(m[1].replace("_", "-") for file in frames if (m := _PACKAGE.search(file)))
        trt = self.events("trt_iter", "trt_active", "ctx_transfer_timeout", "cache_sender_error")
        return seen + Counter({"tensorrt-llm": len(trt)})

    @cached_property
    def families(self) -> set[str]:
        """Engines that this evidence is of; by printed versions if nothing else tells."""
        printed = {s.name for s in self.of(Setting) if s.kind == "version"}
        return set(self._engines_named) or printed & {"sglang", "vllm", "tensorrt-llm"}

    @property
    def family(self) -> str:
        """The engine that most of the evidence is of, `torch` if it is of none and has collectives, else ""."""
        most = self._engines_named.most_common(1)
        return most[0][0] if most else "torch" if self.collectives else ""

    def arch(self) -> str:
        """`aarch64`, `x86_64`, or "" if the evidence does not say."""
        found = {s.value for s in self.of(Setting) if s.kind == "arch"}
        return found.pop() if len(found) == 1 else ""

    def patched(self) -> dict[str, str]:
        """Areas of the installed engine that differ from its release → how many files, of which engine."""
        return {s.name: s.value for s in self.of(Setting) if s.kind == "patched"}

    def _setting(self, kind: str, wanted: tuple[str, ...]) -> Setting | None:
        return next((s for s in reversed(self.of(Setting)) if s.kind == kind and s.name in wanted), None)

    def flag_number(self, *flags: str) -> int | None:
        """The value of a flag as a number."""
        s = self.flag(*flags)
        return int(s.value) if s and s.value.isdecimal() else None

    # -- devices -----------------------------------------------------------------------------------------------------

    @cached_property
    def spinning(self) -> list[Gpu]:
        """GPUs that are fully busy. Power tells spin from work where a limit or several rows allow it."""
        return [g for g in self.gpus if g.util is not None and g.util >= 90]

    @cached_property
    def resting(self) -> list[Gpu]:
        """GPUs at 0 %."""
        return [g for g in self.gpus if g.util is not None and g.util <= 3]

    def low_power(self, gpu: Gpu) -> bool | None:
        """Whether a fully busy GPU draws too little for work; None if power is not known."""
        if gpu.power is None:
            return None
        limit = gpu.power_limit or (700.0 if gpu.power > 60 else 140.0 if gpu.power < 45 else 300.0)
        return gpu.power < 0.45 * limit or (gpu.mem_util is not None and gpu.mem_util <= 1)
