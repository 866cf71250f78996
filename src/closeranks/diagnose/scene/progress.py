"""Progress: whether tokens flow, loops turn and counters move, and since when they do not."""

import re
from functools import cached_property
from itertools import pairwise

from closeranks.diagnose.facts import Event, Fact, Metric, Process, Ras
from closeranks.diagnose.scene.index import Index

DISTURBED = 20  # context switches that dumps alone can cause in a process that stands still
FEW_TICKS = 2  # of CPU time, of which dumps alone cost some
MANY = 4  # requests that do not all end within one interval of the log
_LOOPS = ("scheduler", "worker", "engine_core")
_TOKENS = re.compile(r"[:_](?:generation|realtime)_tokens(?:_total)?$")
SILENCE = 60.0  # seconds without a batch line, with requests running, that count as a stall
GRACE_S = 5.0  # a step that was under way when something happened may still print its line
SKIPPED = 3  # lines that a log has to skip, at the pace that it kept until then, before that counts as silence


class Progress(Index):
    """What moves in the bundle and what stands."""

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
        return (last, quiet) if quiet >= max(SILENCE, SKIPPED * _usual_gap(mine)) else None

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
        out = [f for f in out if not self._tokens_since(f)]
        out += self._empty_rounds
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

    def _tokens_since(self, f: Fact) -> bool:
        """Whether the same log, or one of its folder and engine into which it was rotated, shows tokens after `f`: what
        it complained of has passed."""
        return f.time is not None and any(self._one_log(b, f) for b in self.gen_after(f.time))

    def _one_log(self, a: Fact, b: Fact) -> bool:
        """Whether two facts may be of one engine's log, in one file or in several."""
        if a.src.file == b.src.file:
            return True
        return a.src.file.rpartition("/")[0] == b.src.file.rpartition("/")[0] and self.side(a) == self.side(b)

    def side(self, f: Fact) -> str:
        """The role of a fact's engine; where it does not tell, that of the batch lines in its file."""
        told = self._file_roles.get(f.src.file, set())
        return self.role_of(f) or (next(iter(told)) if len(told) == 1 else "")

    @cached_property
    def _file_roles(self) -> dict[str, set[str]]:
        out: dict[str, set[str]] = {}
        for b in self.batches:
            if role := self.role_of(b):
                out.setdefault(b.src.file, set()).add(role)
        return out

    @cached_property
    def _empty_rounds(self) -> list[Fact]:
        """The last two throughput lines of one vLLM engine, if requests ran in both and neither has a token."""
        by: dict[object, list[Event]] = {}
        for e in self.events("vllm_stats"):
            by.setdefault((e.src.file, e.get("engine")), []).append(e)
        for lines in by.values():
            last = lines[-2:]
            empty = [e for e in last if e.num("running") and not e.num("gen") and not e.num("prompt")]
            if len(empty) == 2 and not _alike(*empty):
                return [*empty]
        return []

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

    def flows(self, since: float | None) -> list[Fact]:
        """Tokens: counters that grow between scrapes, and batch lines that show some after `since`, if that is known.

        What stands since then makes none: against this no rule shows a standstill.
        """
        counted = [m for m in self.moving_counters if "tokens" in m.name]
        return [*counted[:1], *(self.gen_after(since + GRACE_S)[:1] if since is not None else ())]

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
        return m.name, tuple(sorted(m.labels.items())), m.other, self.role_of(m)

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
        tokens = [m for m, d in self.counter_deltas if d > 0 and _TOKENS.search(m.name)]
        return tokens or [m for m, d in self.counter_deltas if d > 0 and "stage_seconds" in m.name]

    @cached_property
    def requests(self) -> tuple[float, float]:
        """(running, waiting) by the last scrape, else `/v1/loads`, else the last batch line; -1 where nothing says."""
        running = self.gauge(r"num_(?:running_reqs|requests_running)$")
        waiting = self.gauge(r"num_(?:queue_reqs|requests_waiting)$")
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

    def newest(self, pattern: str) -> list[Metric]:
        """The last sample of each series of this name."""
        return list({self.series(m): m for m in self.of(Metric) if re.search(pattern, m.name)}.values())

    def gauge(self, pattern: str) -> float | None:
        """The largest value of a gauge over its series, each by its last scrape."""
        return max((m.value for m in self.newest(pattern)), default=None)

    @cached_property
    def frozen_ras(self) -> list[Ras]:
        """Mismatches that two snapshots show alike, with the same ranks apart."""
        seen: dict[object, list[Ras]] = {}
        for r in self.ras:
            if r.status == "MISMATCH" and r.counts:
                seen.setdefault((r.comm, r.op, tuple(sorted(r.counts)), r.minority), []).append(r)
        return [r for group in seen.values() if len(group) > 1 for r in group]


def _usual_gap(lines: list[Event]) -> float:
    """The time between batch lines of one file while requests ran, by its median: how often it is written is a flag."""
    last = lines[-1]
    own = [e for e in lines if (e.kind, e.src.file, e.who) == (last.kind, last.src.file, last.who)]
    times = [e.time for e in own if e.time is not None]
    gaps = sorted(b - a for a, b in pairwise(times[-20:]))
    return gaps[len(gaps) // 2] if len(gaps) > 1 else 0.0


def _alike(a: Event, b: Event) -> bool:
    """Whether two lines are one, read from two copies of a log."""
    return a.time == b.time and a.data == b.data
