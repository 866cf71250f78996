# ruff: noqa: E501 - sentences stay in one piece, so that a search finds them
"""Recorders and watchdogs whose ranks agree, lag, or speak of point-to-point operations only."""

from collections import Counter, defaultdict

from closeranks.diagnose.facts import Collective, Fact, GroupStatus
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding


@rule(
    22, "MISSING_PARTICIPANT", "recorder dumps: ranks that enqueued fewer operations of a group than the others wait in"
)
def recorder_laggard(scene: Scene) -> Finding | None:
    by_group: dict[str, dict[str, GroupStatus]] = defaultdict(dict)
    twice: set[str] = set()  # groups of which one rank tells two counts: of two moments, or of two jobs
    for s in scene.group_status:
        if s.failed_seq is None and s.enqueued >= 0:
            rank = s.who.label if s.who else str(s.src)
            known = by_group[s.group].setdefault(rank, s)
            if (known.enqueued, known.members) != (s.enqueued, s.members):
                twice.add(s.group)
            by_group[s.group][rank] = s
    for group, ranks in by_group.items():
        if len({s.members for s in ranks.values() if s.members}) > 1:
            continue  # groups of one name with other members are several
        top = max(s.enqueued for s in ranks.values())
        behind = {r: s for r, s in ranks.items() if s.enqueued < top}
        waiting = [
            c
            for c in scene.collectives
            if c.origin == "recorder"
            and c.group == group
            and c.seq == top
            and c.state in ("started", "scheduled")
            and not c.p2p
        ]
        if not behind or len(behind) * 2 >= len(ranks) or not waiting:
            continue
        members = next((s.members for s in ranks.values() if s.members), ())
        whole = bool(members) and len(ranks) == len(members)
        return finding(
            "MISSING_PARTICIPANT",
            # Dumps are not simultaneous, and a live job's ranks are operations apart: a time-out tells them from that.
            SHOWN if whole and scene.stalls and group not in twice else LIKELY,
            f"{', '.join(behind)} enqueued {min(s.enqueued for s in behind.values())} operations of group {group}; the others wait in #{top}.",
            [*waiting[:3], *behind.values()],
            ranks={(c.who.label if c.who else c.dump): f"{c.op} #{c.seq}" for c in waiting},
            missing=list(behind),
            mechanism="these ranks never entered the operation that the others wait in",
            shown=["recorder dumps of all members of the group" if whole else f"{len(ranks)} recorder dumps"],
            next_checks=["py-spy dump of the missing ranks"]
            + ([] if whole else ["recorder dumps of the other members: a missing file looks like a missing rank"]),
        )
    return None


_OWN_SIZES = ("alltoall", "alltoallv", "gather", "scatter")  # operations to which each rank may bring its own size


@rule(
    61,
    "SYMMETRIC_WAIT MISSING_PARTICIPANT NETWORK_OR_TRANSPORT UNDETERMINED",
    "watchdogs agree on group, sequence number, operation and size",
)
def watchdogs_agree(scene: Scene) -> Finding | None:
    by: dict[tuple[str, int, str, int | None], dict[int, Collective]] = defaultdict(dict)
    for c in scene.collectives:
        if c.origin == "watchdog" and not c.p2p and c.who and c.who.rank is not None:
            size = None if c.op in _OWN_SIZES else c.numel_in
            by[c.group, c.seq, c.op, size][c.who.rank] = c
    if not by:
        return None
    (group, seq, op, _numel), ranks = max(by.items(), key=lambda kv: len(kv[1]))
    if len(ranks) < 2:
        return None
    size = scene.flag_number("tp", "tp-size", "tensor-parallel-size") or max(ranks) + 1
    absent = [r for r in range(min(size, 4096)) if r not in ranks]
    silent = [r for r in absent if not any(c.who and c.who.rank == r for c in scene.collectives)]
    size_words = "" if op in _OWN_SIZES else ", same size"
    where = f"{op} #{seq}{f' of group {group}' if group else ''}"
    evidence = [*list(ranks.values())[:5], *scene.group_status[:2]]
    if alone := _alone(scene, group, ranks):
        if all((c.seq, c.op) == (seq, op) for c in alone.values()):
            return None  # they are in it, with another size
        return _one_elsewhere(ranks, alone, where, group, evidence)
    if silent and len(silent) * 2 < size:
        return finding(
            "MISSING_PARTICIPANT",
            LIKELY,
            f"{len(ranks)} ranks time out in {where}; rank {', '.join(map(str, silent[:8]))} reports nothing.",
            evidence,
            ranks={f"rank {r}": where for r in list(ranks)[:64]},
            missing=[f"rank {r}" for r in silent],
            mechanism="a rank that did not join has nothing that could time out",
            likely=["or its watchdog is off, or its log is missing"],
            next_checks=["the missing rank: alive? its log, its stack"],
        )
    first = seq <= 1 or any(s.completed <= 0 for s in scene.group_status)
    if first and scene.has("nccl_ready", "nccl_p2p"):
        return finding(
            "NETWORK_OR_TRANSPORT",
            LIKELY,
            f"Initialisation completed on all ranks and the very first collective ({where}) never ends: the transport does not deliver.",
            [*evidence, *scene.events("nccl_p2p", "nccl_ready")[:2]],
            mechanism="data of the chosen transport does not arrive: peer-to-peer over PCIe, shared memory, or the network interface",
            next_checks=[
                "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_IB_DISABLE=1 one at a time",
                "lspci -vvv | grep ACSCtl",
            ],
            workaround="the switch that lets it pass",
        )
    return finding(
        "SYMMETRIC_WAIT",
        LIKELY,
        f"All {len(ranks)} ranks time out in the same {where}{size_words}: no desync among them.",
        evidence,
        ranks={f"rank {r}": where for r in list(ranks)[:64]},
        mechanism="undetermined: the transport, a device that does not reach the operation, or a member outside these ranks",
        shown=["same operation and sequence number on all ranks; each brings a size of its own to it"]
        if op in _OWN_SIZES
        else ["same operation, sequence number and size on all ranks"],
        next_checks=[
            "nvidia-smi utilisation and power per GPU",
            "ncclras twice",
            "NCCL WARN lines and link counters at that time",
        ],
    )


def _alone(scene: Scene, group: str, ranks: dict[int, Collective]) -> dict[int, Collective]:
    """Ranks that timed out in something else, each by itself, and that no line puts into another group: several that
    agree among themselves look like a group of their own."""
    others: dict[int, Collective] = {}
    for c in scene.collectives:
        rank = c.who.rank if c.who else None
        if c.origin != "watchdog" or c.p2p or rank is None or rank in ranks:
            continue
        if not group or not c.group or c.group == group:
            others.setdefault(rank, c)
    met = Counter((c.seq, c.op) for c in others.values())
    return {r: c for r, c in others.items() if met[c.seq, c.op] == 1}


def _one_elsewhere(
    ranks: dict[int, Collective], alone: dict[int, Collective], where: str, group: str, evidence: list[Fact]
) -> Finding:
    """Most ranks agree, and one or a few timed out elsewhere: those did not come, or were waiting in another group."""
    one_group = bool(group) and all(c.group == group and not c.unsure for c in alone.values())
    told = "; ".join(f"rank {r} in {c.op} #{c.seq}" for r, c in list(alone.items())[:8])
    return finding(
        "MISSING_PARTICIPANT" if one_group else "UNDETERMINED",
        LIKELY if one_group else UNDETERMINED,
        f"{len(ranks)} ranks time out in {where}, and elsewhere {told}.",
        [*evidence[:4], *list(alone.values())[:4]],
        ranks={f"rank {r}": where for r in list(ranks)[:63]}
        | {f"rank {r}": f"{c.op} #{c.seq}" for r, c in list(alone.items())[:16]},
        missing=[f"rank {r}" for r in list(alone)[:16]],
        mechanism="a rank that waits in another operation does not come to this one"
        if one_group
        else "undetermined: a rank that skipped or repeated an operation, or one that waits in another group",
        likely=[] if one_group else ["no line names the group of these time-outs"],
        next_checks=[
            "the lines under these that name the group (PG GUID), or a flight recorder of all ranks",
            f"py-spy dump of rank {next(iter(alone))}",
        ],
    )


@rule(
    61, "SYMMETRIC_WAIT", "recorder dumps of all members: the same operation of the same size, started and not finished"
)
def recorders_agree(scene: Scene) -> Finding | None:
    last: dict[str, dict[str, Collective]] = defaultdict(dict)
    for c in scene.collectives:
        rank = c.who.label if c.who else c.dump
        if c.origin == "recorder" and not c.p2p and c.seq >= last[c.group].get(rank, c).seq:
            last[c.group][rank] = c
    for group, by in last.items():
        alike = {(c.seq, c.op, c.numel_in) for c in by.values()}
        numbers = [c.who.rank for c in by.values() if c.who and c.who.rank is not None]
        told = next((s.members for s in scene.group_status if s.group == group and s.members), ())
        members = told or range(max(numbers, default=-1) + 1)
        open_ = all(c.state in ("started", "scheduled") for c in by.values())
        if len(by) < 2 or len(alike) > 1 or not open_ or len(members) != len(by) or scene.engines:
            continue
        ((seq, op, _size),) = alike
        return finding(
            "SYMMETRIC_WAIT",
            LIKELY,
            f"All {len(by)} ranks of group {group} are in the same {op} #{seq}, same size, and none has finished it: no desync among them.",
            list(by.values())[:5],
            ranks={rank: f"{c.op} #{c.seq} ({c.state})" for rank, c in by.items()},
            mechanism="undetermined: the transport, or a device that does not reach the operation",
            shown=["recorder dumps of all members of the group agree"],
            decoys=["a recorder that was dumped while the job ran shows the same for a moment"],
            next_checks=["a second dump: has the sequence number moved?", "nvidia-smi utilisation and power per GPU"],
        )
    return None


@rule(27, "PP_STALL UNMATCHED_COLLECTIVE_OR_P2P", "watchdogs or recorders: point-to-point operations that do not pair")
def unpaired_p2p(scene: Scene) -> Finding | None:
    late = [c for c in scene.collectives if c.p2p and c.state != "completed"]
    ranks = {c.who.label if c.who else c.dump for c in late}
    if len(ranks) < 2 or any(r.who.pp is not None for e in scene.engines for r in e.ranks.values()):
        return None
    ops = {c.op for c in late}
    odd = len({(c.seq, c.numel_in) for c in late}) > 1
    if not odd and ops == {"send", "recv"}:
        return None
    one_way = ops in ({"recv"}, {"send"})
    return finding(
        "UNMATCHED_COLLECTIVE_OR_P2P" if one_way and len(ranks) == 2 and not odd else "PP_STALL",
        LIKELY,
        f"Point-to-point operations do not pair: {'; '.join(c.says() for c in late[:4])}.",
        late[:6],
        ranks={c.who.label if c.who else c.dump: f"{c.op} #{c.seq}" for c in late},
        mechanism="all sides wait to receive"
        if ops == {"recv"}
        else "stages stand in different slots of the pipeline: sequence numbers or sizes differ",
        next_checks=[
            "batch lines of all stages aligned by order, not by time: the first that differs",
            "stacks of all stages",
        ],
    )


@rule(29, "PP_STALL", "pipeline stages logged different batches, then fell silent")
def batches_diverge(scene: Scene) -> Finding | None:
    stages: dict[int, list[tuple[float | None, float | None]]] = defaultdict(list)
    for b in scene.events("prefill_batch"):
        if b.who and b.who.pp is not None:
            stages[b.who.pp].append((b.num("new_seq"), b.num("new_tokens")))
    if len(stages) < 2 or not (scene.stalls or scene.hints):
        return None
    lengths = {pp: len(v) for pp, v in stages.items()}
    shortest = min(lengths.values())
    differ = next((i for i in range(shortest) if len({v[i] for v in stages.values()}) > 1), None)
    if differ is None and len(set(lengths.values())) == 1:
        return None
    at = differ if differ is not None else shortest
    ahead = [f"PP{pp}" for pp, n in lengths.items() if n > shortest]
    return finding(
        "PP_STALL",
        LIKELY,
        f"Stages agree on {at} batches, then diverge"
        + (f": {', '.join(ahead)} launched more." if differ is None else "."),
        [*scene.events("prefill_batch")[-4:], *scene.stalls[:1]],
        ranks={f"PP{pp}": f"{n} batches logged" for pp, n in lengths.items()},
        ahead=ahead,
        mechanism="each stage chose its own next micro-batch, so their sends and receives no longer pair",
        next_checks=["stacks of all stages", "aborts per stage in the second before"],
    )
