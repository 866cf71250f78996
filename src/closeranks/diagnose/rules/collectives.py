# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""What ranks of one group wait for in each other: operation, size, sequence, participant, stage."""

import re
from collections import Counter, defaultdict

from closeranks.diagnose.facts import Collective, Event, Thread
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places, stall_words, sure
from closeranks.diagnose.scene import EngineView, RankView, Scene
from closeranks.diagnose.stacks import mode_of
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding

_WAITS = ("collective", "collective_device")
_DEVICE = (
    "device_wait",
    "device_launch",
    "kernel_call",
    "module_load",
    "collective_device",
    "p2p_device",
    "implicit_sync",
)


def _rank_of(c: Collective) -> str:
    return c.who.label if c.who else c.dump or c.src.file


def _latest(items: list[Collective]) -> dict[tuple[str, int], dict[str, Collective]]:
    """(group, sequence) → rank → operation, for unfinished or timed-out collectives, not point-to-point."""
    out: dict[tuple[str, int], dict[str, Collective]] = defaultdict(dict)
    for c in items:
        if not c.p2p and c.state != "completed":
            out[c.group, c.seq][_rank_of(c)] = c
    return out


@rule(20, "DESYNC_DIFFERENT_COLLECTIVE", "one process group, one sequence number, different operations")
def different_operation(scene: Scene) -> Finding | None:
    for (group, seq), by in _latest(scene.collectives).items():
        ops = {c.op for c in by.values()}
        if len(ops) < 2 or "coalesced" in ops:
            continue
        absent = sorted(_members(scene, group) - {c.who.rank for c in by.values() if c.who and c.who.rank is not None})
        return finding(
            "DESYNC_DIFFERENT_COLLECTIVE",
            SHOWN,
            f"In group {group or 'default'}, collective #{seq} is {' on some ranks and '.join(sorted(ops))} on others.",
            by.values(),
            ranks={rank: f"{c.op} in {c.frames[-1].name}" if c.frames else c.op for rank, c in by.items()},
            missing=[f"rank {r}" for r in absent],
            mechanism="ranks took different branches; each waits for partners that will not come",
            shown=[f"same group and sequence number, operations {', '.join(sorted(ops))}"],
            likely=[f"the branch that the others did not take is in {f}" for f in _sites(by)],
            next_checks=[
                "the missing ranks' recorder files"
                if absent
                else "the condition around the call that only some ranks made"
            ],
            decoys=["no rank is behind: the sequence numbers are equal"],
        )
    return None


def _sites(by: dict[str, Collective]) -> list[str]:
    return sorted({str(c.frames[-1]) for c in by.values() if c.frames})[:2]


def _members(scene: Scene, group: str) -> set[int]:
    found = [s.members for s in scene.group_status if s.group == group and s.members]
    return set(found[0]) if found else set()


@rule(20, "DESYNC_SAME_OP_SHAPE_OR_SEQ", "one process group, one sequence number, one operation, different sizes")
def different_size(scene: Scene) -> Finding | None:
    for (group, seq), by in _latest(scene.collectives).items():
        ops = {c.op for c in by.values()}
        sizes = {(c.numel_in, c.numel_out) for c in by.values() if c.numel_in is not None}
        if len(ops) != 1 or len(sizes) < 2 or ops & {"alltoall", "gather", "scatter", "send", "recv"}:
            continue
        counts = Counter(c.numel_in for c in by.values())
        common, n = counts.most_common(1)[0]
        odd = [rank for rank, c in by.items() if c.numel_in != common] if n > len(by) - n else []
        aborts = scene.events("abort")
        silent = _not_among(scene, aborts)
        ratio = _widths(sorted(x for x in counts if x))
        timeout_env = scene.env("SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT")
        return finding(
            "DESYNC_SAME_OP_SHAPE_OR_SEQ",
            SHOWN,
            f"{next(iter(ops))} #{seq}{f' of group {group}' if group else ''}: sizes differ: "
            + "; ".join(f"{k} elements on {v} rank{'s' if v > 1 else ''}" for k, v in counts.most_common(4))
            + (f" (odd: {', '.join(odd[:8])})" if odd else "."),
            [*by.values(), *aborts[:2], timeout_env, *scene.events("failed_collective_frame")[-1:]],
            ranks={rank: f"{c.op} #{c.seq}, {c.numel_in} elements" for rank, c in by.items()},
            missing=[],
            mechanism="ranks built different batches, so the same operation has different sizes"
            + (f": {ratio}" if ratio else ""),
            trigger=f"an abort that {', '.join(silent)} did not log" if silent and aborts else "",
            shown=["same operation and sequence number, different sizes"],
            likely=["which rank-local decision made the batches differ"],
            decoys=[
                "time-outs of other process groups, health-check failures and the exit that follows are downstream"
            ],
            next_checks=[
                "batch composition of the odd rank and one other at that step",
                "aborts, chunk boundaries and prefetch results per rank just before",
            ],
            workaround="unset SGLANG_REQ_WAITING_TIMEOUT / SGLANG_REQ_RUNNING_TIMEOUT"
            if timeout_env and aborts
            else "",
        )
    sizes2 = scene.events("gloo_size")
    if sizes2:
        e = sizes2[0]
        return finding(
            "DESYNC_SAME_OP_SHAPE_OR_SEQ",
            SHOWN,
            f"A gloo collective met sizes that do not fit ({e.get('got')} against {e.get('want')} bytes): ranks entered it with different lengths, or different operations.",
            [*sizes2[:3], *scene.events("peer_closed")[:2]],
            mechanism="ranks' queues differ, so the vectors that they reduce differ in length; the shorter side can pass unharmed, the longer dies",
            shown=[f"{e.src}: op.preamble.length <= op.nbytes"],
            likely=["which rank-local decision made the queues differ"],
            decoys=["'Connection closed by peer' on the others is the echo of this death"],
            next_checks=[
                "the traceback above it: which queue is being polled",
                "aborts in the second before, per rank",
            ],
        )
    diverged = scene.events("rank_divergence")
    if diverged:
        return finding(
            "DESYNC_SAME_OP_SHAPE_OR_SEQ",
            SHOWN,
            "The engine's own checker found ranks that decided differently.",
            diverged[:4],
            mechanism="a decision that must be alike on all ranks was not; a collective of another shape or order follows",
            next_checks=["the first diverging event in the checker's output"],
        )
    return None


def _not_among(scene: Scene, events: list[Event]) -> list[str]:
    """Ranks that logged something, but none of `events`."""
    logged = {e.who.label for e in events if e.who}
    others = {f.who.rank for f in scene.collectives if f.who and f.who.rank is not None}
    if not logged or not all(re.fullmatch(r"TP\d+", x) for x in logged):
        return []
    size = scene.flag_number("tp", "tp-size") or (max(others, default=-1) + 1)
    return [f"TP{i}" for i in range(min(size, 1024)) if f"TP{i}" not in logged] if len(logged) > size // 2 else []


def _widths(sizes: list[int]) -> str:
    """`64 × 7168 against 5120 × 7168` when a common row width explains the sizes."""
    if len(sizes) != 2:
        return ""
    for width in (7168, 8192, 6144, 5120, 4096, 16384, 12288, 3584, 2048, 2880, 1024):
        if all(s % width == 0 for s in sizes):
            a, b = (s // width for s in sizes)
            return f"{a} × {width} against {b} × {width}"
    return ""


@rule(21, "UNDETERMINED DESYNC_SAME_OP_SHAPE_OR_SEQ", "one process group, one operation, sequence numbers apart")
def different_sequence(scene: Scene) -> Finding | None:
    late = [c for c in scene.collectives if c.origin == "watchdog" and not c.p2p]
    status = {s.who.label: s for s in scene.group_status if s.who and s.failed_seq is not None}
    by_group: dict[str, dict[str, Collective]] = defaultdict(dict)
    for c in late:
        rank = _rank_of(c)
        group = c.group or (status[rank].group if rank in status else "")
        by_group[group].setdefault(rank, c)
    for group, by in by_group.items():
        same_op = len({(c.op, c.numel_in) for c in by.values()}) == 1
        if not group or len(by) < 2 or not same_op or len({c.seq for c in by.values()}) < 2:
            continue
        enqueued = {status[r].enqueued for r in by if r in status}
        agree = len(enqueued) == 1 and sum(r in status for r in by) > 1
        return finding(
            "UNDETERMINED" if agree or len(enqueued) < 2 else "DESYNC_SAME_OP_SHAPE_OR_SEQ",
            UNDETERMINED if agree or len(enqueued) < 2 else LIKELY,
            f"Same operation and size in group {group}, sequence numbers apart"
            + (", and all hosts enqueued the same number of operations." if agree else "."),
            [*by.values(), *(s for s in scene.group_status[:4])],
            ranks={r: f"{c.op} #{c.seq}" for r, c in by.items()},
            mechanism="devices stand one operation apart; a root of a broadcast may finish before its peers, so this alone is no desync"
            if agree
            else "hosts enqueued different numbers of operations",
            likely=[
                "a stalled transport or root rather than a desync: the hosts agree"
                if agree
                else "a rank skipped or repeated an operation"
            ],
            next_checks=[
                "flight recorder of all ranks around the lower sequence number",
                "ncclras twice, a minute apart",
            ],
            workaround="",
        )
    return None


@rule(22, "MISSING_PARTICIPANT", "a recorder or desync report names ranks that did not join")
def not_joined(scene: Scene) -> Finding | None:
    missing = scene.events("fr_missing", "desync_not_joined")
    if not missing:
        return None
    last = missing[0].get("seq")
    mine = [e for e in missing if e.get("seq") == last]
    who = sorted({e.who.rank for e in mine if e.who and e.who.rank is not None})
    joined = scene.events("desync_joined")
    op = mine[0].get("op", "")
    of_group = f" of {mine[0].get('group')}" if mine[0].get("group") else ""
    dumps = len(scene.events("recorder_dump"))
    return finding(
        "MISSING_PARTICIPANT",
        SHOWN if joined or (mine[0].kind == "fr_missing" and not dumps) else LIKELY,
        f"Ranks {', '.join(map(str, who[:16]))} did not join {op or 'collective'} #{last}{of_group}.",
        [*mine[:4], *joined[:3]],
        missing=[f"rank {r}" for r in who],
        ranks={f"rank {e.who.rank}": f"joined #{e.get('seq')}" for e in joined[:16] if e.who},
        mechanism="the others wait in an operation that these ranks never entered: elsewhere, slower, or dead",
        shown=["the report compares all ranks' recorders"],
        likely=["'desync' is also printed for a dead rank: check that these processes live"],
        next_checks=[
            "py-spy dump of the missing ranks",
            "are recorder files of all ranks present? A missing file looks like a missing rank",
        ],
    )


@rule(23, "FRONTEND_OR_CPU_BOUND", "an entry rank blocked in I/O; the others wait for it at the head of the loop")
def blocked_entry_rank(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        blocked = engine.at("blocking_io")
        if not blocked:
            continue
        others = [r for r in engine.ranks.values() if r not in blocked]
        if any(r.at.kind in _WAITS and r.at.site != "loop_head" for r in others):
            # They wait for the blocked rank all the same: it has not skipped anything, it has not come yet.
            pass
        r = blocked[0]
        progress = scene.gen_after(None)
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            SHOWN if len(others) == 0 or all(o.at.kind in _WAITS for o in others) else LIKELY,
            f"{r.label} is blocked in I/O on its scheduler thread ({r.at.where}); {labels(others) or 'nobody else'} wait{'s' if len(others) == 1 else ''} for it. Not a desync: it has skipped nothing.",
            [
                *(x.stacks[-1] for x in engine.ranks.values()),
                *scene.batches[-2:],
                *scene.events("peer_fetch_failed")[:1],
            ],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            mechanism="a synchronous call to a peer that does not answer holds the loop for its time-out, again and again",
            shown=[f"{r.stacks[-1].src}: {r.at.op} under {r.at.path[min(3, len(r.at.path) - 1)]}"]
            + ([f"batch lines go on: {progress[-1].src}"] if progress else []),
            decoys=["broadcast on the others is only waiting for this rank"],
            next_checks=["the address it connects to: is that peer alive?", "a second dump: does the frame change?"],
            workaround="remove the dead peer's address; restore its route",
        )
    return None


@rule(
    24,
    "HOST_DEVICE_INTERLOCK UNDETERMINED",
    "a driver call that needs a quiet device (module load, free, alloc) does not return",
)
def driver_call_blocked(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        inside = engine.at("module_load", "implicit_sync")
        if not inside:
            continue
        others = [r for r in engine.ranks.values() if r not in inside]
        spin, rest = scene.spinning, scene.resting
        op = inside[0].at.op
        evidence = [*(r.stacks[-1] for r in [*inside[:2], *others[:2]]), *spin[:2], *rest[:2]]
        peers_wait = [r for r in others if r.at.kind in (*_WAITS, *_DEVICE, "p2p")]
        if spin and (peers_wait or not others):
            return finding(
                "HOST_DEVICE_INTERLOCK",
                LIKELY if not (peers_wait and rest) else SHOWN,
                f"{labels(inside)}: the host is blocked in {op} behind a kernel that spins on its own device{f'; {labels(peers_wait)} wait for it' if peers_wait else ''}.",
                evidence,
                engine=engine_name(engine),
                ranks=places(engine.ranks.values()),
                mechanism=f"{op} needs the device to come to rest; the spinning kernel waits for a peer whose data this very host would have to produce",
                shown=[f"GPU {spin[0].index} is fully busy while its host sits in {op}"],
                likely=["which posted operation spins"],
                decoys=["a slow compilation: the device would be at rest"],
                next_checks=["cuda-gdb 'info cuda kernels' on that device: an unmatched receive?"],
                workaround="load all modules before serving (warm up every kernel; CUDA_MODULE_LOADING=EAGER)",
            )
        return finding(
            "UNDETERMINED",
            UNDETERMINED,
            f"{labels(inside)} sit{'s' if len(inside) == 1 else ''} in {op}: the host is blocked, and stacks cannot say by what.",
            [*evidence, *scene.stalls[:1]],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            likely=[
                "a kernel spins in front of the driver call (an interlock), or the first use of a kernel is merely slow"
            ],
            next_checks=[
                "nvidia-smi utilisation and power per GPU: 100 % at low power is a spinning kernel",
                "cuda-gdb 'info cuda kernels'",
                "a second dump after 60 s",
            ],
        )
    return None


@rule(25, "CRASH_LOOKS_LIKE_HANG", "a worker raised, and its process tree stays up answering 503")
def raised_but_up(scene: Scene) -> Finding | None:
    raised = [e for e in scene.events("exception", "rank_exception") if e.who and e.who.is_rank]
    if not raised or scene.has("teardown", "child_crashed", "hard_kill"):
        return None
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


def _column(scene: Scene) -> list[int]:
    """DeepEP: local peers that are absent on every reporting rank."""
    absent: Counter[int] = Counter()
    reporting: set[int] = set()
    for e in scene.events("deepep_cell"):
        rank, peer, value = int(e.get("rank", -1)), int(e.get("peer", -1)), int(e.get("value", 0))
        reporting.add(rank)
        if value >= 1024 and peer != rank:
            absent[peer] += 1
    return sorted(p for p, n in absent.items() if reporting and n >= len(reporting))


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
    reporting = sorted({int(e.get("rank", -1)) for e in cells})
    alone = len(reporting) == 1 and len(column) > 1
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


@rule(27, "UNMATCHED_COLLECTIVE_OR_P2P PP_STALL", "pipeline stages that wait for each other in different slots")
def pipeline_slots(scene: Scene) -> list[Finding]:
    out = []
    for engine in scene.engines:
        stages = {pp: ranks for pp, ranks in engine.by_stage().items() if pp is not None}
        if len(stages) < 2:
            continue
        waits = {
            pp: [r for r in ranks if r.at.kind in ("p2p", "p2p_device", "collective", "collective_device")]
            for pp, ranks in stages.items()
        }
        if not all(waits[pp] for pp in stages):
            continue
        firsts = {pp: ranks[0] for pp, ranks in waits.items()}
        ats = [r.at for r in firsts.values()]
        if len({(a.op, a.path[1:4]) for a in ats}) == 1 and all(a.kind.startswith("collective") for a in ats):
            continue
        if not any(a.site == "pp" or a.kind.startswith("p2p") for a in ats):
            continue
        mixed = any(a.kind.startswith("collective") for a in ats) and any(a.kind.startswith("p2p") for a in ats)
        slots = [c for c in scene.collectives if c.p2p]
        receivers = all("recv" in a.op or a.op == "broadcast" for a in ats)
        cls = "UNMATCHED_COLLECTIVE_OR_P2P" if mixed else "PP_STALL"
        out.append(
            finding(
                cls,
                sure(scene, engine),
                (
                    "All stages wait to receive: a circular wait"
                    if receivers
                    else "Stages stand in different slots of the pipeline"
                )
                + ("; one of them in an operation that nobody answers." if mixed else "."),
                [*(r.stacks[-1] for r in firsts.values()), *slots[:2], *scene.stalls[:1]],
                engine=engine_name(engine),
                ranks=places(engine.ranks.values()),
                mechanism="a receive was posted whose send is missing on the other stage"
                if mixed
                else "each stage chose its own next micro-batch, so their sends and receives no longer pair",
                shown=[*(f"PP{pp}: {r.at.where}" for pp, r in firsts.items()), *stall_words(scene)[:1]],
                likely=[f"point-to-point sequences differ: {', '.join(str(c.seq) for c in slots[:4])}"]
                if len({c.seq for c in slots}) > 1
                else [],
                decoys=[
                    "no stage is slow: each waits for the other",
                    *(
                        ["'No available shared memory broadcast block' mentions compilation; it is only a symptom"]
                        if scene.has("shm_wait")
                        else []
                    ),
                ],
                next_checks=[
                    "batch lines of all stages aligned by order, not by time: the first that differs",
                    "aborts and prefetch completions per stage just before",
                ],
            )
        )
    return out


@rule(
    28,
    "DESYNC_DIFFERENT_COLLECTIVE MISSING_PARTICIPANT DESYNC_SAME_OP_SHAPE_OR_SEQ FRONTEND_OR_CPU_BOUND UNDETERMINED",
    "main threads of one group in different operations",
)
def different_places(scene: Scene) -> list[Finding]:
    out = []
    for engine in scene.engines:
        for ranks in _groups(engine):
            found = _compare(scene, engine, ranks)
            if found is not None:
                out.append(found)
                break
    return out


def _groups(engine: EngineView) -> list[list[RankView]]:
    """Ranks that share collectives: a pipeline stage's, or data-parallel engine cores."""
    stages = engine.by_stage()
    return [
        [r for r in ranks if (r.who.kind == "engine_core") == core]
        for ranks in stages.values()
        for core in (False, True)
        if sum((r.who.kind == "engine_core") == core for r in ranks) > 1
    ]


def _compare(scene: Scene, engine: EngineView, ranks: list[RankView]) -> Finding | None:
    waiting = [r for r in ranks if r.at.kind in _WAITS]
    if not waiting:
        return None
    places_of = _places(waiting)
    elsewhere = [r for r in ranks if r not in waiting]
    # An entry rank that polls for requests while the others wait for its broadcast is the picture of an idle engine.
    if set(places_of) <= {("broadcast", "loop_head")} and all(r.at.kind == "idle" for r in elsewhere):
        return None
    ep = [r for r in elsewhere if r.at.kind == "ep_dispatch"]
    if ep and len(places_of) == 1:
        return _split_by_group(scene, engine, ranks, waiting, ep)
    if len(places_of) > 1:
        modes = {mode_of(r.at) for r in waiting}
        if {k[1] for k in places_of} <= {"forward", ""} and len({k[0] for k in places_of}) == 1:
            return None if len(modes) < 2 else _desync(scene, engine, ranks, places_of, same_op=True)
        return _desync(scene, engine, ranks, places_of)
    (op, site), _inside = next(iter(places_of.items()))
    modes = {mode_of(r.at) for r in waiting if mode_of(r.at)}
    if site == "forward" and len(modes) > 1 and not elsewhere:
        return _desync(scene, engine, ranks, places_of, same_op=True)
    if not elsewhere or site in ("startup", "pp"):
        return None
    kinds = {r.at.kind for r in elsewhere}
    if kinds <= {"blocking_io", "compile", "unknown", "gil", "nccl_internal", "module_load", "implicit_sync"}:
        return None
    if site == "loop_head":
        return _late_for_the_loop(scene, engine, ranks, waiting, elsewhere)
    if kinds <= {"device_wait", "device_launch", "kernel_call"} and site == "forward":
        return None
    moving = [r for r in elsewhere if r.moving]
    return finding(
        "MISSING_PARTICIPANT",
        LIKELY,
        f"{labels(waiting)} wait{'s' if len(waiting) == 1 else ''} in {op} ({waiting[0].at.path[min(2, len(waiting[0].at.path) - 1)]}); {labels(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} elsewhere ({elsewhere[0].at.where}).",
        [*(r.stacks[-1] for r in [*waiting[:3], *elsewhere[:3]]), *scene.stalls[:1]],
        stage=29,
        engine=engine_name(engine),
        ranks=places(ranks),
        missing=[r.label for r in elsewhere],
        mechanism="part of the group entered a collective that the rest does not enter",
        shown=[f"{len(waiting)} of {len(ranks)} ranks are in {op}", *stall_words(scene)[:1]],
        likely=[f"{labels(elsewhere)} works on and never coordinates" if not moving else f"{labels(moving)} moves"],
        next_checks=[f"a second dump: does {elsewhere[0].label} move?", "ranks without a dump"]
        if engine.missing
        else [f"a second dump: does {elsewhere[0].label} move?"],
    )


def _places(waiting: list[RankView]) -> dict[tuple[str, str], list[RankView]]:
    """(operation, site) → ranks. A rank whose outer frames are unknown stands with others in the same operation."""
    out: dict[tuple[str, str], list[RankView]] = defaultdict(list)
    for r in sorted(waiting, key=lambda r: not r.at.site):
        op = re.sub(r"^_|_into_tensor|_object|_list|_base|_coalesced|_tensor(?=$|_)", "", r.at.op).replace("_", "")
        known = next((k for k in out if k[0] == op and (k[1] == r.at.site or not r.at.site)), None)
        out[known or (op, r.at.site)].append(r)
    return {(v[0].at.op, k[1]): v for k, v in out.items()}


def _desync(
    scene: Scene,
    engine: EngineView,
    ranks: list[RankView],
    where: dict[tuple[str, str], list[RankView]],
    same_op: bool = False,
) -> Finding:
    head = [r for k, v in where.items() if k[1] == "loop_head" for r in v]
    parts = "; ".join(f"{labels(v)} in {k[0]}{f' ({_site_words(v[0])})'}" for k, v in where.items())
    trigger = _trigger(scene)
    certainty = sure(scene, engine) if not same_op else LIKELY
    quiet = scene.silence(engine.name)
    return finding(
        "DESYNC_SAME_OP_SHAPE_OR_SEQ" if same_op else "DESYNC_DIFFERENT_COLLECTIVE",
        certainty,
        f"{(engine.name or 'The') + ' engine'}: ranks of one group stand in different {'batches' if same_op else 'collectives'}: {parts}.",
        [
            *(v[0].stacks[-1] for v in where.values()),
            *(r.stacks[-1] for r in ranks[:2]),
            *trigger[:3],
            quiet[0] if quiet else None,
            *scene.stalls[:1],
        ],
        engine=engine.name,
        ranks=places(ranks),
        missing=engine.missing,
        ahead=[r.label for r in head],
        mechanism="a rank-local condition decided whether a collective ran"
        + (
            f": {labels(head)} skipped what the others entered and went on to the next loop's broadcast" if head else ""
        ),
        trigger=f"likely: {trigger[0].says()} ({trigger[0].src})" if trigger else "",
        shown=stall_words(scene, engine.name),
        likely=(["the frame where ranks stand can be one or more collectives after the real divergence"])
        + (
            [
                f"the trigger: logged by {', '.join(sorted({t.who.label for t in trigger if t.who}))}"
                + (f" and not by {', '.join(absent)}" if (absent := _quiet_ranks(engine, trigger)) else "")
            ]
            if trigger
            else []
        ),
        decoys=_decoys(scene, engine, ranks),
        next_checks=[]
        if certainty == SHOWN
        else [
            "context switches and CPU time of all main threads over 2 s: zero on every rank proves it; dumps of a live loop can look like this"
        ],
    )


def _site_words(r: RankView) -> str:
    names = [n for n in r.at.path[1:] if n not in ("wrapper", "broadcast_pyobj", "_all_reduce_attn_groups")]
    return " ← ".join(names[:2]) if names else r.at.site or "unknown"


def _trigger(scene: Scene) -> list[Event]:
    kinds = ("transfer_worker_error", "helper_thread_dead", "transfer_error", "abort", "peer_blacklisted", "retract")
    return next((found for k in kinds if (found := scene.events(k))), [])


def _quiet_ranks(engine: EngineView, trigger: list[Event]) -> list[str]:
    logged = {t.who.label for t in trigger if t.who}
    return [label for label in engine.ranks if label not in logged] if logged & set(engine.ranks) else []


def _decoys(scene: Scene, engine: EngineView, ranks: list[RankView]) -> list[str]:
    out = []
    for r in ranks:
        for t in r.stacks[-1].threads:
            if not t.main and any(f.name in ("all_reduce", "broadcast", "all_gather") for f in t.frames[:2]):
                out.append(
                    f"{r.label}: helper thread running {_runs(t)} is in {t.frames[0].name}; only main threads decide"
                )
    if scene.has("health_failed"):
        out.append("the health check names the detokenizer; it only sees that nothing comes out")
    if [e for e in scene.events("http") if e.get("status") == 200 and str(e.get("path", "")).startswith("/health")]:
        out.append("/health answered 200: an answering port is no evidence")
    return out[:5]


def _runs(thread: Thread) -> str:
    """What a helper thread runs, by its outermost frame that is not threading's own."""
    own = ("run", "_bootstrap", "_bootstrap_inner", "<module>")
    return next((f.name for f in reversed(thread.frames) if f.name not in own), "?")


def _split_by_group(
    scene: Scene, engine: EngineView, ranks: list[RankView], waiting: list[RankView], ep: list[RankView]
) -> Finding:
    return finding(
        "MISSING_PARTICIPANT",
        sure(scene, engine),
        f"{labels(waiting)} wait in {waiting[0].at.op} ({_site_words(waiting[0])}); {labels(ep)} are past it in expert dispatch.",
        [*(r.stacks[-1] for r in [*waiting[:2], *ep[:2]]), *scene.stalls[:1]],
        stage=28,
        engine=engine_name(engine),
        ranks=places(ranks),
        missing=[r.label for r in ep],
        ahead=[r.label for r in ep],
        mechanism="a collective on a larger group than the ranks that run it: one data-parallel group enters it, the other has an empty batch and does not",
        shown=[f"the split runs along groups: {labels(waiting)} against {labels(ep)}"],
        likely=["the operation reduces over the whole tensor-parallel group instead of the attention group"],
        decoys=["a time-out of the expert dispatch is downstream"],
        next_checks=["ranks without a dump", "which process group the call uses"],
    )


def _late_for_the_loop(
    scene: Scene, engine: EngineView, ranks: list[RankView], waiting: list[RankView], elsewhere: list[RankView]
) -> Finding | None:
    device = [r for r in elsewhere if r.at.kind in _DEVICE]
    if device and len(device) == len(elsewhere):
        return finding(
            "UNDETERMINED",
            UNDETERMINED,
            f"{labels(waiting)} wait at the head of the loop; {labels(elsewhere)} wait{'s' if len(elsewhere) == 1 else ''} for the device ({elsewhere[0].at.where}).",
            [*(r.stacks[-1] for r in [*waiting[:2], *elsewhere[:2]]), *scene.stalls[:1]],
            stage=64,
            engine=engine_name(engine),
            ranks=places(ranks),
            ahead=[r.label for r in waiting],
            likely=["a device operation that only these ranks launched, or one long step"],
            next_checks=["nvidia-smi per GPU", "a second dump", "NCCL watchdog or recorder of all ranks"],
        )
    live = [r for r in elsewhere if r.at.kind in ("running", "host_work", "idle", "compile", "lock")]
    if len(live) == len(elsewhere) and not scene.stalls:
        return None
    if all(r.at.kind == "host_work" for r in elsewhere):
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            LIKELY,
            f"{labels(elsewhere)} works on the CPU ({elsewhere[0].at.where}); the others wait at the head of the loop.",
            [r.stacks[-1] for r in [*elsewhere[:2], *waiting[:2]]],
            stage=29,
            ranks=places(ranks),
            engine=engine_name(engine),
            next_checks=["a second dump: does it move?"],
        )
    if any(r.at.kind in ("p2p", "ep_dispatch", "transfer_wait", "lock") for r in elsewhere):
        return finding(
            "MISSING_PARTICIPANT",
            LIKELY,
            f"{labels(waiting)} wait at the head of the loop for {labels(elsewhere)} ({elsewhere[0].at.where}).",
            [*(r.stacks[-1] for r in [*elsewhere[:2], *waiting[:2]]), *scene.stalls[:1]],
            stage=29,
            ranks=places(ranks),
            missing=[r.label for r in elsewhere],
            engine=engine_name(engine),
            next_checks=["a second dump: does it move?"],
        )
    return None
