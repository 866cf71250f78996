"""Stacks of all processes, twice, and between the dumps a quiet window in which the main threads are watched.

Stacks alone prove no desync: a live loop shows one too, because dumps of ranks are not simultaneous. Identical frames
twice mean something only together with zero context switches and zero CPU of *all* ranks in the window, which py-spy
itself would spoil (it adds about four switches per dump), so it is measured outside the dumps.

Not a periodic signal: taken on suspicion and on a death, kept whole for the bundle.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from closeranks.diagnose.collect import collect
from closeranks.diagnose.facts import Stack
from closeranks.diagnose.stacks import Position, helper_threads, position
from closeranks.evidence import bundle, capture
from closeranks.watch import procfs
from closeranks.watch.aside import Aside
from closeranks.watch.signals import Readings, proc
from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Values

GAP_S = 4.0
SETTLE_S = 0.3
"""After a dump, until its own switches are over."""
PY_SPY_S = 6.0
NATIVE_S = 6.0
"""Patience with a dump of native frames, whose symbols are read first."""
PROC_S = 8.0
AT_ONCE = 4
GONE = "the process is gone, and its pid is another's"
_UPDATES = re.compile(r"^(update_weights\w*|_?update_weight\w*|load_weights\w*|release_memory\w*|resume_memory\w*)$")
_SLOW = {"device_wait", "device_launch", "collective_device", "p2p_device", "implicit_sync", "kernel_call", "compile",
         "ep_dispatch", "nccl_internal", "module_load"}  # fmt: skip
"""Waits for a device or a compiler, which in good health take as long as they take."""
_TRANSFER_THREAD = re.compile(r"\b(transfer_worker|decode_listener_thread|bootstrap_thread|decode_thread)\b")
_HELPERS = {"prefill": "bootstrap_thread", "decode": "decode_listener_thread"}
"""SGLang's helper thread that every rank of a role must have."""
_SENDER = re.compile(r"\btransfer_worker\b")
"""One of the threads that send on a rank of prefill: as many on each rank as on the others."""


@dataclass
class Rounds:
    """Two rounds of dumps with the readings of /proc around the window between them."""

    began: float
    """Monotonic seconds at which the first dump began."""
    engines: tuple[EngineSeen, ...]
    first: dict[str, str] = field(default_factory=dict)
    """`engine/label` → py-spy's text, or the words why there is none."""
    second: dict[str, str] = field(default_factory=dict)
    proc_first: dict[str, str] = field(default_factory=dict)
    proc_second: dict[str, str] = field(default_factory=dict)
    before: Readings = field(default_factory=dict)
    after: Readings = field(default_factory=dict)
    readings: Readings = field(default_factory=dict)
    """What the state machine takes from it."""


@dataclass
class Dumping:
    """When the last dump ended of which engines (infinity: it goes on): their context switches until then are ours."""

    engines: frozenset[str] = frozenset()
    until: float = float("-inf")

    def ends(self) -> dict[str, float]:
        """Engine → end of its last dump."""
        return dict.fromkeys(self.engines, self.until)


async def take(engines: Sequence[EngineSeen], dumping: Dumping, gap_s: float = GAP_S) -> Rounds:
    """Both rounds. Takes `gap_s` and the time of two dumps, which has its own limits. TimeoutError where /proc does not
    answer, for nothing else that processes do."""
    rounds = Rounds(time.monotonic(), tuple(engines))
    dumping.engines, dumping.until = frozenset(e.name for e in engines), float("inf")
    try:
        rounds.first = await _dump(engines)
        dumped = time.monotonic()
        dumping.until = dumped
        await _window(rounds, dumped + gap_s)
        dumping.until = float("inf")
        rounds.second = await _dump(engines)
    finally:
        dumping.until = time.monotonic()
    rounds.readings = await asyncio.to_thread(judge, rounds)
    return rounds


async def _window(rounds: Rounds, until: float) -> None:
    """The quiet window: /proc at its begin and at its end."""
    engines, aside = rounds.engines, Aside("quiet window")
    await asyncio.sleep(SETTLE_S)
    rounds.before, rounds.proc_first = await asyncio.wait_for(aside.run(lambda: _quiet(engines)), PROC_S)
    await asyncio.sleep(max(0.0, until - time.monotonic()))
    rounds.after, rounds.proc_second = await asyncio.wait_for(aside.run(lambda: _quiet(engines)), PROC_S)


async def native(engine: EngineSeen) -> dict[str, str]:
    """Label → py-spy's text with native frames, of the processes that decide; what could not be read is left out."""
    own = [p for p in engine.deciders if not procfs.reused(p.pid, p.start_time)]
    texts = await _read((p.pid for p in own), NATIVE_S, native=True)
    return {p.label: texts[p.pid] for p in own if _stack(texts[p.pid]) is not None}


async def _dump(engines: Iterable[EngineSeen]) -> dict[str, str]:
    wanted = {f"{e.name}/{p.label}": p for e in engines for p in e.parts}
    ours = {key: p.pid for key, p in wanted.items() if not procfs.reused(p.pid, p.start_time)}
    texts = await _read(ours.values(), PY_SPY_S)
    return {key: texts[ours[key]] if key in ours else f"no stacks: {GONE}\n" for key in wanted}


async def _read(pids: Iterable[int], timeout_s: float, native: bool = False) -> dict[int, str]:
    """Each process once, also one that several engines share: of two py-spy at a process the second is refused."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(pid: int) -> str:
        async with slots:
            return await capture.stacks(pid, timeout_s, native)

    once = tuple(dict.fromkeys(pids))
    return dict(zip(once, await asyncio.gather(*map(one, once)), strict=True))


def _quiet(engines: Sequence[EngineSeen]) -> tuple[Readings, dict[str, str]]:
    parts = {f"{e.name}/{p.label}": p for e in engines for p in e.parts}
    texts = {k: f"{GONE}\n" if procfs.reused(p.pid, p.start_time) else capture.proc(p.pid) for k, p in parts.items()}
    return {key: proc.one(p) for key, p in parts.items()}, texts


def judge(rounds: Rounds) -> Readings:
    """Engine → `began, at, read, of, same, still, seconds, idle, startup, updating, slow, compiling, places, lacks,
    transfer_still`, and the same of its frontend alone for `engine/launcher`. Blind when no stack could be read."""
    found: Readings = {}
    for engine in rounds.engines:
        heads = [p for p in engine.procs if p.role in ("launcher", "gateway")]
        for group, key in ((list(engine.deciders), engine.name), (heads[:1], f"{engine.name}/launcher")):
            if group:
                found[key] = _group(rounds, engine, group)
    return found


def _group(rounds: Rounds, engine: EngineSeen, group: Sequence[Proc]) -> Values | Blind:
    keys = {p: f"{engine.name}/{p.label}" for p in group}
    pairs = {p: (_stack(rounds.first.get(k, "")), _stack(rounds.second.get(k, ""))) for p, k in keys.items()}
    read = {p: (a, b) for p, (a, b) in pairs.items() if a is not None and b is not None}
    if not read:
        why = next((text.strip() for k in keys.values() if (text := rounds.second.get(k, ""))), "no process to dump")
        return Blind(why.splitlines()[0][:200])
    last = {p: position(b.main) for p, (_, b) in read.items()}
    still = [_still(rounds.before.get(k), rounds.after.get(k)) for k in keys.values()]
    seconds = [s for s in still if s is not None]
    names = [{f.name for f in b.main.frames} if b.main else set() for _, b in read.values()]
    helper = _HELPERS.get(engine.role, "") if engine.kind == "sglang" else ""
    lacking = [p.label for p, (_, b) in read.items() if p.role == "rank" and helper and helper not in helper_threads(b)]
    lacks = [f"no {helper} in {', '.join(lacking)}"] if lacking else []
    lacks += _fewer_senders(rounds, {p.label: keys[p] for p in read if p.role == "rank"}) if helper else []
    core = [p for p in last if p.role in ("engine_core", "launcher", "gateway")]
    return {
        "began": rounds.began,
        "at": time.monotonic(),
        "read": float(len(read)),
        "of": float(len(group)),
        "same": all(
            a.main is not None and b.main is not None and a.main.frames == b.main.frames for a, b in read.values()
        ),
        "still": len(seconds) == len(still) and bool(still),
        "seconds": min(seconds, default=0.0),
        "idle": bool(core) and all(last[p].kind in ("idle", "launcher") for p in core),  # or waits for its children
        "startup": any(place.site == "startup" for place in last.values()),
        "updating": any(_UPDATES.match(name) for found in names for name in found),
        "slow": any(place.kind in _SLOW for place in last.values()),
        "compiling": any(place.kind == "compile" for place in last.values()),
        "places": _places(last),
        "lacks": ", ".join(lacks),
        "transfer_still": _transfer_still(rounds, engine, read),
    }


def _fewer_senders(rounds: Rounds, ranks: Mapping[str, str]) -> list[str]:
    """Ranks with fewer threads that send than another one, in both dumps. `ranks`: label → key."""
    counts = {
        n: [len(_tasks(dumps[key], _SENDER)) for dumps in (rounds.first, rounds.second)] for n, key in ranks.items()
    }
    most = max((min(pair) for pair in counts.values()), default=0)
    return [f"{max(pair)} of {most} transfer_worker in {n}" for n, pair in sorted(counts.items()) if max(pair) < most]


def _transfer_still(rounds: Rounds, engine: EngineSeen, read: Mapping[Proc, tuple[Stack, Stack]]) -> bool:
    """Whether the threads that move KV made no switch in the window, on every rank that has such threads."""
    found = []
    for process in read:
        key = f"{engine.name}/{process.label}"
        for task in _tasks(rounds.second[key], _TRANSFER_THREAD):
            counts = [_task_switches(text, task) for text in (rounds.proc_first[key], rounds.proc_second[key])]
            found.append(counts[0] is not None and counts[0] == counts[1])
    return bool(found) and all(found)


def _tasks(dump: str, wanted: re.Pattern[str]) -> list[str]:
    """Thread ids in a dump whose thread name or one of whose functions is `wanted`."""
    found, task = [], ""
    for line in dump.splitlines():
        head = re.match(r"Thread (\d+) \([\w+]+\)(.*)", line)
        if head:
            task = head[1]
        if task and wanted.search(head[2] if head else line.split(" (")[0]):
            found.append(task)
            task = ""
    return found


def _task_switches(proc_text: str, task: str) -> tuple[str, ...] | None:
    """The context-switch counters of one thread in the text that `capture.proc` gives."""
    line = re.search(rf"^task {task}:.*$", proc_text, re.MULTILINE)
    return tuple(re.findall(r"ctxt_switches (\d+)", line[0])) if line else None


def _still(before: Values | Blind | None, after: Values | Blind | None) -> float | None:
    """Seconds for which a main thread made no switch and used no CPU, None if it did or is not there to tell.

    A stopped process stands still in its own way; one that is gone takes no part any more.
    """
    if before is None or after is None or isinstance(before, Blind) or isinstance(after, Blind):
        return None
    if before["state"] in ("X", "Z") or after["state"] in ("X", "Z"):
        return float(after["at"]) - float(before["at"])
    moved = any(before[name] != after[name] for name in ("switches", "ticks", "start"))
    return None if moved or after["state"] == "R" else float(after["at"]) - float(before["at"])


def _stack(text: str) -> Stack | None:
    """The dump in a text, as diagnose reads it."""
    if not text or text.startswith("no stacks:"):
        return None
    return next((f for f in collect(bundle.from_texts([("dump", text)])).facts if isinstance(f, Stack)), None)


def _places(at: Mapping[Proc, Position]) -> str:
    """`TP0, TP1 in broadcast in recv_requests; TP2 in …`, for people."""
    by_place: dict[str, list[str]] = {}
    for process, place in at.items():
        by_place.setdefault(place.where, []).append(process.label)
    return "; ".join(f"{', '.join(sorted(labels))} in {where}" for where, labels in by_place.items())[:400]
