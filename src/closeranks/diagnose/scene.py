"""The scene: facts put side by side. Engines with their ranks and positions, progress over time, settings, devices.

Everything here is derived from facts alone and decides nothing; rules decide.
"""

import re
from collections.abc import Callable, Iterable
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
from closeranks.diagnose.stacks import Position, position

DISTURBED = 20  # context switches that dumps alone can cause in a process that stands still
FEW_TICKS = 2  # of CPU time, of which dumps alone cost some
MANY = 4  # requests that do not all end within one interval of the log
F = TypeVar("F", bound=Fact)
_PACKAGE = re.compile(r"(?:^|/)(sglang|vllm|tensorrt_llm|dynamo)/(?!.*/(?:sglang|vllm|tensorrt_llm|dynamo)/)")
_LOOPS = ("scheduler", "worker")
SILENCE = 60.0  # seconds without a batch line, with requests running, that count as a stall


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


@dataclass
class Scene:
    """All facts of one bundle, and views on them."""

    facts: list[Fact]
    files: list[str]
    notes: list[str] = field(default_factory=list)
    _own: dict[int, "Scene"] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        """Collectives of watchdogs, recorders and desync reports."""
        return self.of(Collective)

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

        `/proc` cuts a name after 15 letters: a row takes the full one that a title or a dump gives its process.
        """
        named: dict[int, set[Who]] = {}
        seen: list[Process | Stack] = [*self.of(Process), *self.stacks]
        for f in seen:
            if f.pid is not None and f.who is not None and f.who.label != f.who.kind:
                named.setdefault(f.pid, set()).add(f.who)
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
            known = named.get(p.pid, set())
            if len(known) == 1 and (p.who is None or p.who.label == p.who.kind):
                p = replace(p, who=next(iter(known)))
            out.append(p)
        return out

    def engine_of(self, pid: int) -> str:
        """The role of the engine whose dumps hold this process, "" if none does or it has no role."""
        return next((e.name for e in self.engines for r in e.ranks.values() for s in r.stacks if s.pid == pid), "")

    @cached_property
    def failed_dumps(self) -> list[StackFailed]:
        """Dumps that gave nothing."""
        return self.of(StackFailed)

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
    def families(self) -> set[str]:
        """Engines that this evidence is of: by titles, prefixes, batch lines, metrics and frames; else by versions."""
        out = {f.who.family for f in self.facts if f.who} - {"", "torch"}
        out |= {"vllm" if b.kind == "vllm_stats" else "sglang" for b in self.batches}
        out |= {m.name.split(":")[0] for m in self.of(Metric)} & {"sglang", "vllm", "dynamo"}
        for s in self.stacks:
            for t in s.threads:
                for f in t.frames:
                    if m := _PACKAGE.search(f.file):
                        out.add(m[1].replace("_", "-"))
        if self.has("trt_iter", "trt_active", "ctx_transfer_timeout", "cache_sender_error"):
            out.add("tensorrt-llm")
        return out or {s.name for s in self.of(Setting) if s.kind == "version"} & {"sglang", "vllm", "tensorrt-llm"}

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
        return int(s.value) if s and s.value.isdigit() else None

    # -- engines -----------------------------------------------------------------------------------------------------

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
        if not others:
            return self
        own = {s.pid for r in engine.ranks.values() for s in r.stacks}
        pids = {s.pid for e in others for r in e.ranks.values() for s in r.stacks} - own - {None}
        roles = {e.name for e in others} - {engine.name, ""} if engine.name else set()
        facts = [f for f in self.facts if not (getattr(f, "pid", None) in pids or self.role_of(f) in roles)]
        return Scene(facts, self.files, self.notes)

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

    def _missing(self, engine: EngineView) -> list[str]:
        """Ranks that exist by label, flag or failed dump and have no dump."""
        labels = set(engine.ranks)
        tps = {r.who.tp for r in engine.ranks.values() if r.who.tp is not None}
        seen = {
            f.who.label: f.who
            for f in self.facts
            if f.who and f.who.kind in ("scheduler", "worker") and f.who.family == engine.family
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

    @cached_property
    def processes_by_kind(self) -> dict[str, list[Stack]]:
        """Dumps of processes that are no ranks (API server, detokenizer, launcher), by kind."""
        out: dict[str, list[Stack]] = {}
        for s in self.stacks:
            if s.who and not s.who.is_rank:
                out.setdefault(s.who.kind, []).append(s)
        return out

    # -- progress ----------------------------------------------------------------------------------------------------

    @cached_property
    def batches(self) -> list[Event]:
        """Batch lines of SGLang, throughput lines of vLLM, in order."""
        found = self.events("prefill_batch", "decode_batch", "vllm_stats")
        return sorted(found, key=lambda e: (e.time if e.time is not None else 0.0, e.src))

    def last_batch(self, role: str = "") -> Event | None:
        """The last batch line, of one role if given."""
        return next((e for e in reversed(self.batches) if not role or e.get("role", "") in ("", role)), None)

    @cached_property
    def end_time(self) -> float | None:
        """The last clock in the bundle."""
        times = [f.time for f in self.facts if f.time is not None]
        return max(times) if times else None

    def gen_after(self, t: float | None) -> list[Event]:
        """Batch lines that show tokens after `t`."""
        return [
            e for e in self.batches if (e.num("gen") or 0) > 0 and (t is None or (e.time is not None and e.time > t))
        ]

    def silence(self, role: str = "") -> tuple[Event, float] | None:
        """The last batch line with requests running, and for how long its file went on without another."""
        mine = [e for e in self.batches if e.kind != "vllm_stats" and (not role or e.get("role", "") in ("", role))]
        last = mine[-1] if mine else None
        if last is None or last.time is None:
            return None
        if not ((last.num("running") or 0) > 0 or (last.num("queue") or 0) > 0 or (last.num("new_seq") or 0) > 0):
            return None
        later = [f.time for f in self.facts if f.time is not None and f.src.file == last.src.file]
        quiet = max(later) - last.time if later else 0.0
        return (last, quiet) if quiet >= SILENCE else None

    @cached_property
    def stalls(self) -> list[Fact]:
        """Hard signs that an engine stands still, independent of stacks: time-outs, counters and clocks that stay."""
        out: list[Fact] = []
        for e in self.events("watchdog"):
            part = str(e.get("part", "Scheduler"))
            if "cheduler" in part or not part.strip() or "DataParallel" in part:
                out.append(e)
        out += self.events("rpc_timeout", "gloo_timeout", "hang_detected", "heartbeat_timeout", "debug_info")
        out += [c for c in self.collectives if c.state == "timeout"]
        stats = [e for e in self.events("vllm_stats") if (e.num("running") or 0) > 0]
        if len(stats) >= 2 and all((e.num("gen") or 0) == 0 and (e.num("prompt") or 0) == 0 for e in stats[-2:]):
            out += stats[-2:]
        # An idle or saturated engine core shows no switches at all: only processes with a loop of their own count. One
        # that computes, or waits for a CPU, does not switch either.
        loops = [
            p for p in self.processes if p.switches is not None and p.who and p.who.kind in ("scheduler", "worker")
        ]
        if loops and not any(p.switches or p.forced or p.ran or (p.ticks or 0) > FEW_TICKS for p in loops):
            out += loops[:3]
        out += [e for e in self.events("load") if (e.num("age") or 0) >= 30]
        quiet = self.silence()
        if quiet and (quiet[0].num("running") or 0) >= MANY:
            out.append(quiet[0])
        return [*out, *([] if self.turning else self.frozen_counters), *self.frozen_ras]

    @cached_property
    def hints(self) -> list[Fact]:
        """Soft signs: silence with requests running, probes that failed. An overloaded or idle engine has them too."""
        quiet = self.silence()
        out: list[Fact] = [quiet[0]] if quiet and (quiet[0].num("running") or 0) < MANY else []
        return [*out, *(e for e in self.events("health_failed") if not self.gen_after(e.time))]

    @cached_property
    def live(self) -> list[Fact]:
        """Signs that every engine's loop turns: counters of tokens or stages that grow, context switches."""
        if self.frozen_counters and not self.turning:
            return []
        dumped = max((s.time for s in self.stacks if s.time is not None), default=None)
        after = self.gen_after(dumped + 5) if dumped is not None else []
        return [*self.moving_counters, *self.turning, *after[:2]]

    @cached_property
    def turning(self) -> list[Process]:
        """Loop processes that went to sleep and woke up too often between two readings to be standing."""
        return [p for p in self.processes if (p.switches or 0) > DISTURBED and p.who and p.who.kind in _LOOPS]

    @cached_property
    def counter_deltas(self) -> list[tuple[Metric, float]]:
        """Counters seen in two scrapes, with their change from the first to the last."""
        by: dict[object, list[Metric]] = {}
        for m in self.of(Metric):
            if m.name.endswith(("_total", "_count", "_sum")) or ("tokens" in m.name and "usage" not in m.name):
                by.setdefault(self.series(m), []).append(m)
        return [(s[-1], abs(s[-1].value - s[0].value)) for s in by.values() if len(s) > 1]

    def series(self, m: Metric) -> object:
        """What a sample is a reading of. Two engines of a pair may export the same labels, into files of their own."""
        return m.name, tuple(sorted(m.labels.items())), self.role_of(m)

    def _by_engine(self, pattern: str) -> dict[str, list[tuple[Metric, float]]]:
        out: dict[str, list[tuple[Metric, float]]] = {}
        for m, d in self.counter_deltas:
            if re.search(pattern, m.name):
                out.setdefault(self.role_of(m) + m.labels.get("engine", ""), []).append((m, d))
        return out

    @cached_property
    def frozen_counters(self) -> list[Metric]:
        """Counters of one engine of which none moved: of its loop's stages, or of tokens while requests run."""
        out: list[Metric] = []
        for series in self._by_engine(r"scheduler_(?:stage|idle)_seconds_total").values():
            if not any(d for _, d in series):
                out += [m for m, _ in series][:2]
        if out or self._by_engine("stage_seconds") or self.requests[0] <= 0:
            return out
        for series in self._by_engine(r"generation_tokens|prompt_tokens|realtime_tokens|forward_execution").values():
            if not any(d for _, d in series):
                out += [m for m, _ in series][:2]
        return out

    @cached_property
    def moving_counters(self) -> list[Metric]:
        """Token counters that grew between scrapes; else stage counters of a loop that turns."""
        tokens = [m for m, d in self.counter_deltas if d > 0 and re.search(r"(?:generation|realtime)_tokens", m.name)]
        return tokens or [m for m, d in self.counter_deltas if d > 0 and "stage_seconds" in m.name]

    @cached_property
    def requests(self) -> tuple[float, float]:
        """(running, waiting) by the last scrape, else `/v1/loads`, else the last batch line; -1 where nothing says."""
        running = self._gauge(r"num_(?:running_reqs|requests_running)$")
        waiting = self._gauge(r"num_(?:queue_reqs|requests_waiting)$")
        loads = {(e.src.file, e.get("dp_rank")): e for e in self.events("load")}.values()
        if running is None:
            running = max((n for e in loads if (n := e.num("num_running_reqs")) is not None), default=None)
        if waiting is None:
            waiting = max((n for e in loads if (n := e.num("num_waiting_reqs")) is not None), default=None)
        last = self.batches[-1] if self.batches else None
        if last is not None:
            if running is None:
                running = last.num("running")
            if waiting is None:
                waiting = last.num("queue") if last.kind != "vllm_stats" else last.num("waiting")
        return (running if running is not None else -1.0, waiting if waiting is not None else -1.0)

    def _gauge(self, pattern: str) -> float | None:
        last: dict[object, float] = {}
        for m in self.of(Metric):
            if re.search(pattern, m.name):
                last[self.series(m)] = m.value
        return max(last.values(), default=None)

    def gauge(self, pattern: str) -> float | None:
        """The largest value of a gauge over its series, each by its last scrape."""
        return self._gauge(pattern)

    @cached_property
    def frozen_ras(self) -> list[Ras]:
        """Mismatches that two snapshots show alike."""
        seen: dict[tuple[str, str, tuple[tuple[int, int], ...]], list[Ras]] = {}
        for r in self.ras:
            if r.status == "MISMATCH" and r.counts:
                seen.setdefault((r.comm, r.op, tuple(sorted(r.counts))), []).append(r)
        return [r for group in seen.values() if len(group) > 1 for r in group]

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


def _shape(s: Stack) -> tuple[str, ...]:
    """Names of the main thread's Python frames: a dump with native frames and one without show the same place."""
    frames = s.main.frames if s.main else ()
    python = tuple(f.name for f in frames if f.file.endswith(".py"))
    return python or tuple(f.name for f in frames)


def _computes(s: Stack) -> bool:
    main = s.main
    return bool(
        main and any(re.search(r"torch|jax|cuda|vllm|sglang|tensorrt_llm|megatron|deep", f.file) for f in main.frames)
    )


def _fits(engine: EngineView, label: str, s: Stack) -> bool:
    known = engine.ranks.get(label)
    return known is None or any(k.pid == s.pid for k in known.stacks)


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", text))


def first(items: Iterable[Fact], test: Callable[[Fact], bool] = lambda _: True) -> Fact | None:
    """The first item that passes, by time where there is one."""
    found = [i for i in items if test(i)]
    return min(found, key=lambda f: (f.time if f.time is not None else float("inf"), f.src)) if found else None
