# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""What watchdogs, recorders and reports say about one collective: operation, size, sequence, who joined."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from closeranks.diagnose.facts import Collective, Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._groups import Meeting, jobs, meetings, one_group, rank_of
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding


@rule(20, "DESYNC_DIFFERENT_COLLECTIVE", "one process group, one sequence number, different operations")
def different_operation(scene: Scene) -> Finding | None:
    for m in meetings(scene):
        seq, by = m.seq, m.by
        ops = {c.op for c in by.values()}
        if len(ops) < 2 or "coalesced" in ops:
            continue
        absent = sorted(
            _members(scene, m.group) - {c.who.rank for c in by.values() if c.who and c.who.rank is not None}
        )
        return finding(
            "DESYNC_DIFFERENT_COLLECTIVE",
            SHOWN if m.named else LIKELY,
            f"In group {m.group or 'default'}, collective #{seq} is {' on some ranks and '.join(sorted(ops))} on others.",
            by.values(),
            ranks={rank: f"{c.op} in {c.frames[-1].name}" if c.frames else c.op for rank, c in by.items()},
            missing=[f"rank {r}" for r in absent],
            mechanism="ranks took different branches; each waits for partners that will not come",
            shown=[
                f"same {'group and ' if m.named else ''}sequence number, operations {', '.join(sorted(ops))}",
            ],
            likely=[*_group_words(m), *(f"the branch that the others did not take is in {f}" for f in _sites(by))],
            next_checks=[
                "the missing ranks' recorder files"
                if absent
                else "the condition around the call that only some ranks made"
            ],
            decoys=["no rank is behind: the sequence numbers are equal"],
        )
    return next((f for f in _fingerprints(scene) if f.cls == "DESYNC_DIFFERENT_COLLECTIVE"), None)


def _fingerprints(scene: Scene) -> Iterator[Finding]:
    """torch compared what two ranks were about to run, and refused it."""
    for e in scene.events("fingerprint_mismatch"):
        a, b = (f"rank {e.get(f'rank_{s}')}: {e.get(f'op_{s}')} [{e.get(f'shape_{s}')}]" for s in "ab")
        other = e.get("op_a") != e.get("op_b")
        yield finding(
            "DESYNC_DIFFERENT_COLLECTIVE" if other else "DESYNC_SAME_OP_SHAPE_OR_SEQ",
            SHOWN,
            f"Ranks of one group are about to run different {'collectives' if other else 'sizes of one collective'}: {a}; {b}.",
            [e],
            ranks={f"rank {e.get(f'rank_{s}')}": str(e.get(f"op_{s}")) for s in "ab"},
            mechanism="ranks took different branches, so the orders of their collectives no longer agree",
            shown=["torch compared the two ranks before it ran the operation"],
            next_checks=["the condition around the calls in the tracebacks of both ranks"],
        )


def _group_words(m: Meeting) -> list[str]:
    """What is to be said of a comparison that rests on ranks being of one group, which no line shows."""
    return (
        [] if m.named else ["that these ranks are of one group: sequence numbers of two groups mean nothing together"]
    )


def _sites(by: dict[str, Collective]) -> list[str]:
    return sorted({str(c.frames[-1]) for c in by.values() if c.frames})[:2]


def _members(scene: Scene, group: str) -> set[int]:
    found = [s.members for s in scene.group_status if s.group == group and s.members]
    return set(found[0]) if found else set()


@rule(20, "DESYNC_SAME_OP_SHAPE_OR_SEQ", "one process group, one sequence number, one operation, different sizes")
def different_size(scene: Scene) -> Finding | None:
    for m in meetings(scene):
        group, seq, by = m.group, m.seq, m.by
        ops = {c.op for c in by.values()}
        sizes = {c.numel_in for c in by.values() if c.numel_in is not None}
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
            LIKELY if "coalesced" in ops or not (m.named or m.implied) else SHOWN,
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
            likely=["which rank-local decision made the batches differ", *_group_words(m)],
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
    return next((f for f in _fingerprints(scene) if f.cls == "DESYNC_SAME_OP_SHAPE_OR_SEQ"), None)


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
    late = [c for c in scene.collectives if c.origin == "watchdog" and not c.p2p and c.group]
    by_group: dict[str, dict[str, Collective]] = defaultdict(dict)
    for c in late:
        by_group[c.group].setdefault(rank_of(c), c)
    for group, by in by_group.items():
        calls = [c for c in late if c.group == group]
        if jobs(calls) != [calls] or not one_group(scene, calls):
            continue
        status = {s.who.label: s for s in scene.group_status if s.who and s.failed_seq is not None and s.group == group}
        same_op = len({(c.op, c.numel_in) for c in by.values()}) == 1
        if len(by) < 2 or not same_op or len({c.seq for c in by.values()}) < 2:
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


@rule(22, "MISSING_PARTICIPANT UNDETERMINED", "a recorder or desync report names ranks that did not join")
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
    blocks = {(e.get("group"), e.get("seq")) for e in missing}  # a dump that was not read is missing from all of them
    files = {e.get("rank") for e in scene.events("recorder_file")}
    unread = [r for r in who if r not in files] if files or scene.has("recorder_files_incomplete") else []
    if mine[0].kind == "fr_missing" and unread and not joined:
        return _not_read(mine, scene, unread)
    return finding(
        "MISSING_PARTICIPANT",
        SHOWN if joined or (files and not dumps and len(blocks) == 1) else LIKELY,
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


def _not_read(missing: list[Event], scene: Scene, unread: list[int]) -> Finding:
    """Ranks that the comparison of recorders calls missing because it had no file of theirs."""
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        f"The report calls ranks {', '.join(map(str, unread[:16]))} missing, and their recorder files were not among those that it read: it says nothing about them.",
        [*missing[:2], *scene.events("recorder_files_incomplete", "recorder_file")[:3]],
        missing=[f"rank {r}" for r in unread],
        decoys=["a file that is not there looks like a rank that did not join"],
        next_checks=["recorder files of all ranks", "py-spy dump of the ranks without one: alive, and where?"],
    )
