# ruff: noqa: E501 - sentences stay in one piece, so that a search finds them
"""Starts that go on, and starts that wait for a lock."""

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.stacks import FILE_LOCK
from closeranks.diagnose.verdict import LIKELY, Finding


@rule(25, "STARTUP", "ranks wait for the lock of a kernel cache, and none of them builds")
def cache_lock(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        waiting = [r for r in engine.ranks.values() if r.at.op == FILE_LOCK]
        if not waiting or engine.at("compile") or any(r.moving for r in waiting):
            continue
        return finding(
            "STARTUP",
            LIKELY,
            f"{labels(waiting)} wait for the lock of a kernel cache ({waiting[0].at.where}), and no rank in view builds anything.",
            [*(r.stacks[-1] for r in waiting[:3]), *scene.events("shm_wait")[-1:]],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            mechanism="a build that was killed left its lock, or its owner is on another host that shares the cache",
            decoys=["the frames below the lock name a compiler; nothing compiles"],
            next_checks=[
                "who holds the lock file (lslocks, fuser)?",
                "is a compiler running on any host of the cache?",
            ],
            workaround="end all engines, remove the lock or the cache's folder, start again with a cache per host",
        )
    return None


@rule(64, "NOT_HUNG_SLOW_OR_CAPACITY", "a start whose progress bar moves")
def start_goes_on(scene: Scene) -> Finding | None:
    bars = [e for e in scene.events("bar") if e.get("work") in ("weights", "capture")]
    if scene.has("started") or scene.batches or scene.engines or len(bars) < 2 or not _moves(bars):
        return None
    if scene.has("rank_exception", "fatal", "teardown", "child_crashed", "worker_died"):
        return None
    if any(e.src.file != bars[0].src.file or e.src > bars[0].src for e in scene.events("exception")):
        return None  # one before the bars was overcome
    last = bars[-1]
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        LIKELY,
        f"The start goes on: {'weights are being loaded' if last.get('work') == 'weights' else 'graphs are being captured'} ({bars[0].get('percent')} %, then {last.get('percent')} %).",
        [bars[0], last, *scene.events("shm_wait", "probe_failed", "core_wait")[-2:]],
        mechanism="slow storage, or many graphs; time-outs and warnings measure duration and not progress",
        decoys=["'No available shared memory broadcast block' is printed while workers are busy, too"]
        if scene.has("shm_wait")
        else [],
        next_checks=["does the bar go on? Read rate of the storage that holds the weights"],
        workaround="a longer start-up time-out; weights on local storage",
    )


def _moves(bars: list[Event]) -> bool:
    """Whether the last bar is further than one before it of the same work, and not yet full."""
    last = bars[-1]
    before = [b for b in bars[:-1] if b.get("work") == last.get("work") and b.get("total") == last.get("total")]
    return any((b.num("done") or 0) < (last.num("done") or 0) for b in before) and (last.num("percent") or 0) < 100


_PATIENCE = 60.0  # seconds of asking again, from which on it counts as waiting


@rule(65, "STARTUP", "a start that waits for GPUs of a cluster, or for workers that do not answer")
def start_waits_for_others(scene: Scene) -> Finding | None:
    asked = scene.events("cluster_wait")
    pings = scene.events("leader_ping")
    times = [e.time for e in pings if e.time is not None]
    long = any((e.num("seconds") or 0) >= _PATIENCE for e in asked)
    unanswered = len(pings) >= 10 or (bool(times) and max(times) - min(times) >= _PATIENCE)
    if not (long or unanswered):
        return None
    last = (asked or pings)[-1]
    if any(
        f.src.file == last.src.file and f.src > last.src for f in [*scene.events("started", "kv_size"), *scene.batches]
    ):
        return None  # they came
    return finding(
        "STARTUP",
        LIKELY,
        f"The start waits for GPUs that Ray does not give ({last.get('seconds')} s so far); no engine runs yet."
        if long
        else f"A leader asks its workers to come up again and again ({len(pings)} times), and they do not answer.",
        [*(asked if long else pings)[:1], last],
        mechanism="the cluster has fewer free GPUs, or none on the host that is asked for, than the engine needs"
        if long
        else "the workers did not start, or listen elsewhere; the leader asks without an end",
        decoys=["nothing failed: no line of this log will say more"],
        next_checks=["ray status: GPUs free, and on which nodes; who holds the others?"]
        if long
        else ["the workers' own logs", "the address that the leader asks, and who listens there"],
    )
