# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Expert-parallel exchange: the barrier matrix, workers that raised in it and stayed, slow compilation behind it."""

from collections import Counter

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    finding,
)
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(25, "CRASH_LOOKS_LIKE_HANG", "a worker raised, and its process tree stays up answering 503")
def raised_but_up(scene: Scene) -> Finding | None:
    raised = [
        e for e in scene.events("exception", "rank_exception") if e.who and e.who.is_rank and not _went_on(scene, e)
    ]
    if not raised or scene.has("teardown", "child_crashed", "hard_kill"):
        return None
    raised = scene.lasting(raised)
    t = raised[0].time
    refused = [e for e in scene.events("http") if e.get("status") == 503]
    after = [e for e in refused if t is None or e.time is None or e.time >= t]
    if len(after) < 2 or any(e.get("status") == 200 for e in scene.events("http") if e.src > after[-1].src):
        return None
    column = _column(scene)
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        SHOWN,
        f"{raised[0].who.label if raised[0].who else 'A worker'} raised {raised[0].get('type', 'an exception')}; its process tree was not torn down and answers 503 for good.",
        [*raised[:2], *after[:3], *scene.events("deepep_cell")[:1]],
        mechanism="the supervisor keeps waiting for workers that have failed",
        missing=[f"local peer {p}" for p in column],
        shown=[f"{raised[0].src}: the worker raised", f"{len(after)} answers 503 after it"],
        likely=[f"local peer {column[0]} never reached the barrier: look at its log first"] if column else [],
        decoys=["503 looks like a start that goes on; it will not end"],
        next_checks=["the first exception of all workers"],
        workaround="a liveness probe that restarts after prolonged 503",
    )


def _went_on(scene: Scene, e: Event) -> bool:
    """Whether the process that raised worked on: it logged a step of the start, a bar or a batch after that."""
    steps = scene.events("bar", "start_step", "started", "prefill_batch", "decode_batch", "kv_size")
    return any(s.src.file == e.src.file and s.src > e.src and s.who in (None, e.who) for s in steps)


def _column(scene: Scene) -> list[str]:
    """DeepEP: local peers that are absent on every reporting rank of their node, which is named where there are several."""
    out = []
    nodes = _nodes(scene)
    for node, cells in nodes.items():
        absent: Counter[int] = Counter()
        reporting: set[int] = set()
        for e in cells:
            rank, peer, value = int(e.get("rank", -1)), int(e.get("peer", -1)), int(e.get("value", 0))
            reporting.add(rank)
            if value >= 1024 and peer != rank:
                absent[peer] += 1
        gone = sorted(p for p, n in absent.items() if reporting and n >= len(reporting))
        out += [f"{p} of {node}" if len(nodes) > 1 else str(p) for p in gone]
    return out


def _nodes(scene: Scene) -> dict[str, list[Event]]:
    """The matrix's cells by node, to which its indices are local: by pod, else by file where files contradict each other."""
    pods: dict[str, list[Event]] = {}
    for e in scene.events("deepep_cell"):
        pods.setdefault(str(e.get("node", "")), []).append(e)
    out: dict[str, list[Event]] = {}
    for pod, cells in pods.items():
        seen: dict[tuple[object, object], set[tuple[str, object]]] = {}
        for e in cells:
            seen.setdefault((e.get("rank"), e.get("peer")), set()).add((e.src.file, int(e.get("value", 0)) >= 1024))
        apart = any(len({f for f, _ in told}) > 1 and len({v for _, v in told}) > 1 for told in seen.values())
        for e in cells:
            out.setdefault(e.src.file if apart else pod, []).append(e)
    return out


@rule(26, "MISSING_PARTICIPANT", "DeepEP's barrier matrix: a column of peers that have not arrived")
def deepep_column(scene: Scene) -> Finding | None:
    cells = scene.events("deepep_cell")
    if not cells:
        remote = scene.events("deepep_remote")
        if not remote:
            return None
        node = Counter(int(e.get("remote", -1)) for e in remote).most_common(1)[0][0]
        return finding(
            "MISSING_PARTICIPANT",
            LIKELY,
            f"DeepEP: node {node} (RDMA lane index) sent nothing.",
            remote[:4],
            missing=[f"node {node}"],
            mechanism="the receivers wait for a remote node that did not dispatch",
            next_checks=["dump the ranks of that node"],
        )
    column = _column(scene)
    several = len(_nodes(scene)) > 1
    reporting = sorted({int(e.get("rank", -1)) for e in cells})
    alone = len(reporting) == 1 and len(column) > 1 and not several
    if not column:
        return None
    who = ", ".join(map(str, column))
    evidence = [e for e in cells if int(e.get("value", 0)) >= 1024]
    return finding(
        "MISSING_PARTICIPANT",
        SHOWN if len(reporting) > 1 or alone else LIKELY,
        f"DeepEP barrier: local rank {reporting[0]} is alone, peers {who} have not arrived."
        if alone
        else f"DeepEP barrier: local peer {who} has not arrived; ranks {', '.join(map(str, reporting))} wait for it.",
        [*evidence[:4], *scene.events("deepep_host_timeout")[:2], *scene.batches[:2]],
        ranks={f"local rank {r}": "waits in barrier_block" for r in reporting},
        missing=[f"local peer {p}" for p in column],
        mechanism="value 1024 at thread t: local peer t has not entered this barrier (0: it has; below 0: it is one ahead)",
        shown=["every reporting rank shows the same absent peers"],
        likely=[
            "with data-parallel attention, ranks without tokens in that step may have skipped the collective"
            if alone
            else "why that peer did not come"
        ],
        decoys=[
            "ranks that report are the ones that wait",
            "indices are local to the NVLink group, not global ranks",
            "no proof of a network fault",
        ],
        next_checks=[
            "dump the absent peers: alive, in another collective, compiling?",
            "batch lines per rank just before: did some ranks have no tokens?",
        ],
    )


_BAR_STANDS = 300.0  # seconds that a log goes on after the last step of a bar, after which the bar counts as standing


@rule(15, "NOT_HUNG_SLOW_OR_CAPACITY", "a kernel compilation is under way while a peer's fixed timer ran out")
def slow_compile(scene: Scene) -> Finding | None:
    bars = [e for e in scene.events("bar") if e.get("work") == "jit"]
    sessions = scene.events("jit_session", "compile")
    moving = len(bars) >= 2 and (bars[-1].num("done") or 0) > (bars[0].num("done") or 0)
    ends = [f.time for f in scene.facts if f.time is not None and bars and f.src.file == bars[-1].src.file]
    stale = bool(ends) and bars[-1].time is not None and max(ends) - bars[-1].time > _BAR_STANDS
    waits = scene.events(
        "deepep_host_timeout", "deepep_cell", "shm_wait", "rpc_timeout", "probe_failed", "health_failed"
    )
    if _compiled(scene, bars):
        return None
    if not (moving or (sessions and len(bars) >= 1 and (bars[-1].num("percent") or 0) < 100)) or not (
        waits or sessions
    ):
        return None
    if [e for e in scene.events("oom_kill", "fatal")]:
        return None
    who = next((s.who.label for s in sessions if s.who), "")
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        SHOWN if moving and not stale else LIKELY,
        f"{who or 'A rank'} is compiling kernels ({bars[-1].get('percent')} %{', moving' if moving and not stale else ''}); a peer's fixed timer ran out first.",
        [*sessions[:1], *bars[:1], *bars[-1:], *waits[:2]],
        mechanism="a cold kernel cache takes longer than the peer's timer, which measures duration and not progress",
        shown=["the progress bar moves"] if moving else [],
        decoys=["the time-out of the communication library names no fault of its own"]
        if scene.has("deepep_host_timeout", "deepep_cell")
        else [],
        next_checks=["does the bar go on?"],
        workaround="compile ahead (sglang.compile_deep_gemm) and share the cache among nodes",
    )


def _compiled(scene: Scene, bars: list[Event]) -> bool:
    """Whether the last bar is full, and what follows in its log is of an engine that serves."""
    if not bars or (bars[-1].num("percent") or 0) < 100:
        return False
    last = bars[-1]
    after = [*scene.events("started"), *scene.batches]
    return any(e.src.file == last.src.file and e.src > last.src for e in after)
