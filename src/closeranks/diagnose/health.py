"""What speaks against health: open work, and signs of failure. A verdict of health is shown only where both are empty.

The kinds of events that are harmless are listed, not those that are bad: a signature that a reader learns tomorrow
takes the certainty away by itself.
"""

import re
from collections import Counter
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact, Metric
from closeranks.diagnose.scene import ROLES, Scene
from closeranks.diagnose.stacks import position

# Gauges that count requests which the engine holds. Not those that only name a limit, a sum, or requests paused on
# purpose.
_HELD = re.compile(
    r"[:_](?:num_(?:\w+_)?(?:reqs|requests)(?:_(?:running|waiting|swapped|active|queued)\w*|_kv_fetch_by_stage)?"
    r"|num_unique_running_routing_keys|(?:inflight|queued|pending|active)_(?:requests|reqs)|queue_depth)$"
)
_NOT_HELD = re.compile(r"paused|_total$|max_|limit|capacity|expired|failed|aborted|preempt")
_LINE_FIELDS = ("running", "queue", "waiting", "deferred", "fetching", "transfer", "inflight", "prealloc", "bootstrap")

# Kinds of events that a healthy engine logs as well. Every other kind is a doubt.
HARMLESS = frozenset(
    """decode_batch prefill_batch vllm_stats chunk bar http load top_row top_head ps_listing start_step started kv_size
    max_len max_concurrency paused resumed received request_count nccl_ready nccl_p2p registered_graphs host_pool
    jit_session compile recorder_dump ras_report stack_dump batch_size pool trt_iter trt_active acs_off full_mesh
    recorder_file core_wait life_began asked capacity kv_moved aibrix_line traceback_frame
    failed_collective_frame""".split()  # noqa: SIM905
)
_BAD_STATUS = frozenset({408, 429, 499})
_OURS = ("scheduler", "worker", "engine_core", "api", "detokenizer", "dp_controller", "launcher", "torch")


TURNED_S = 3.0
"""Seconds of a loop that must pass before the absence of idle time says anything: it is accounted for by the second."""


def held(metric: Metric) -> bool:
    """Whether a gauge counts requests that the engine holds."""
    return bool(_HELD.search(metric.name)) and not _NOT_HELD.search(metric.name)


def gauged(scene: Scene) -> bool:
    """Whether a scrape or `/v1/loads` counts requests: newer than a batch line, which only a busy engine writes."""
    return any(re.search(r"num_(?:running_reqs|requests_running)$", m.name) for m in scene.of(Metric)) or any(
        e.num("num_running_reqs") is not None for e in scene.events("load")
    )


def open_work(scene: Scene) -> list[Fact]:
    """What the newest reading of each source says to be open: running, waiting, or in any queue on the way."""
    last: dict[object, Metric] = {}
    for m in scene.of(Metric):
        if held(m):
            last[scene.series(m)] = m
    out: list[Fact] = [m for m in last.values() if m.value > 0]
    loads = {(e.src.file, e.get("dp_rank")): e for e in scene.events("load")}
    out += [e for e in loads.values() if _loaded(e)]
    if not gauged(scene):
        out += _lines(scene)
    out += _never_idle(scene)
    return [*out, *(e for e in scene.events("trt_active")[-1:] if (e.num("active") or 0) > 0)]


def _never_idle(scene: Scene) -> list[Fact]:
    """Ranks whose loops turned between two scrapes where none of their group counted idle time: SGLang's queues held
    something, whatever its gauges say, which lag. Where one rank was idle the others waited for it."""
    turned: dict[tuple[object, ...], float] = {}
    idle: dict[tuple[object, ...], tuple[Metric, float]] = {}
    for m, delta in scene.counter_deltas:
        rank = scene.role_of(m), m.labels.get("dp_rank"), m.labels.get("pp_rank"), m.labels.get("tp_rank")
        if m.name.endswith("scheduler_stage_seconds_total"):
            turned[rank] = turned.get(rank, 0.0) + delta
        elif m.name.endswith("scheduler_idle_seconds_total"):
            idle[rank] = m, delta
    rested = {rank[:2] for rank, (_, delta) in idle.items() if delta}
    return [m for rank, (m, _) in idle.items() if turned.get(rank, 0.0) >= TURNED_S and rank[:2] not in rested]


def _loaded(load: Event) -> bool:
    return any(
        re.search(r"_(?:reqs|requests)$", k) and not _NOT_HELD.search(k) and isinstance(v, int | float) and v > 0
        for k, v in load.data.items()
    )


def _lines(scene: Scene) -> list[Fact]:
    """The last batch line of each engine, if it tells of open requests."""
    last: dict[object, Event] = {}
    for b in scene.batches:
        last[b.kind, b.get("role", ""), b.get("engine"), b.who, b.src.file] = b
    return [b for b in last.values() if any((b.num(f) or 0) > 0 for f in _LINE_FIELDS)]


def doubts(scene: Scene, ignore: Iterable[str] = ()) -> list[Fact]:
    """Everything in the bundle that a healthy engine does not show, whichever reader found it.

    `ignore` names kinds of events that the calling rule explains.
    """
    harmless = HARMLESS | set(ignore)
    out: list[Fact] = [e for kind in scene.kinds if kind not in harmless for e in scene.events(kind)[:2]]
    out += [e for e in scene.events("http") if (s := e.num("status") or 0) >= 500 or s in _BAD_STATUS]
    out += [b for b in scene.events("bar")[-1:] if (b.num("percent") or 0) < 100]
    out += [f for f in (*scene.stalls, *scene.hints) if not (isinstance(f, Event) and f.kind in harmless)]
    out += scene.failed_dumps
    out += [s for e in scene.engines if e.missing for r in e.ranks.values() for s in r.stacks[:1]][:1]
    out += [c for c in scene.collectives if c.state not in ("completed", "")]
    out += [g for g in scene.group_status if g.enqueued != g.completed]
    out += [r for r in scene.ras if r.status != "OK" or r.missing or r.dead]
    out += [k for k in scene.kernels if k.name or k.spinning]
    out += scene.spinning
    out += [p for p in scene.processes if p.state[:1] in "TtDZX" and p.state and (p.who is None or p.who.kind in _OURS)]
    return out + busy_beside(scene)


def busy_beside(scene: Scene) -> list[Fact]:
    """Processes that are no ranks (API server, detokenizer, launcher) and whose main thread does not wait for work."""
    kinds = ("host_work", "blocking_io", "compile", "gil")
    return [s for stacks in scene.processes_by_kind.values() for s in stacks if position(s.main).kind in kinds]


def was_open(scene: Scene) -> list[Fact]:
    """Work that an older reading shows: it may have ended since, or what reports it may have stopped.

    Two scrapes that agree on nothing to do outweigh a batch line, because lines end with the work.
    """
    gauges = [m for m in scene.of(Metric) if held(m)]
    out: list[Fact] = [m for m in gauges if m.value > 0]
    out += [e for e in scene.events("load") if _loaded(e)]
    scrapes = Counter(scene.series(m) for m in gauges)
    if max(scrapes.values(), default=0) < 2:
        out += _lines(scene)
    return out


def unseen(scene: Scene) -> list[str]:
    """Roles with stacks of which no gauge, load or batch line speaks: an idle decode proves nothing about prefill."""
    roles = {e.name for e in scene.engines if e.name}
    if len(scene.engines) < 2 or not roles:
        return []
    told = {scene.role_of(m) for m in scene.of(Metric) if held(m)}
    told |= {str(b.get("role", "")) for b in scene.batches}
    return sorted(roles - told)


_BETWEEN = re.compile(r"(prefill|decode)_(?:bootstrap|inflight|prealloc|transfer)_queue_reqs$")


def unread(scene: Scene) -> list[str]:
    """Roles of SGLang engines of a pair whose queues of transfers no scrape and no load counts: a request on its way is
    neither running nor waiting."""
    if "sglang" not in scene.families:
        return []
    mode = scene.flag("disaggregation-mode")
    roles = {e.name for e in scene.engines} | {m.labels.get("engine_type", "") for m in scene.of(Metric)}
    roles = (roles | ({mode.value} if mode else set())) & ROLES
    names = [m.name for m in scene.of(Metric)] + [k for e in scene.events("load") for k in e.data]
    return sorted(roles - {m[1] for n in names if (m := _BETWEEN.search(n))})
