"""Sequence numbers of two process groups, jobs or lives are never compared; those of one group are."""

import json

import pytest

from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.readers.nccl import group_name

DESYNC = ("DESYNC_DIFFERENT_COLLECTIVE", "DESYNC_SAME_OP_SHAPE_OR_SEQ")


def late(rank: int, place: int, seq: int, op: str, numel: int, group: str = "", number: bool = True) -> str:
    """A watchdog's line and, if the group is given (`PG ID 2 PG GUID 7(tp)`), the one under it that names the group."""
    mark = f"[rank{rank}]:" if number else ""
    out = f"{mark}[E1003 07:11:09.10293{rank}475 ProcessGroupNCCL.cpp:685] [Rank {place}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"  # noqa: E501
    if group:
        out += f"{mark}[E1003 07:11:09.30293{rank}475 ProcessGroupNCCL.cpp:2241] [{group} Rank {place}]  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {seq + 1}, last completed work: {seq - 1}\n"  # noqa: E501
    return out


def found(text: str | dict[str, str]) -> set[tuple[str, str]]:
    named = [*text.items()] if isinstance(text, dict) else [("w.log", text)]
    return {(f.cls, f.certainty) for f in diagnose_texts(named).findings}


def desync(text: str | dict[str, str]) -> list[str]:
    return [certainty for cls, certainty in found(text) if cls in DESYNC]


@pytest.mark.parametrize("op", ["ALLREDUCE", "BROADCAST"])
@pytest.mark.parametrize("words", ["", "(TENSOR_MODEL_PARALLEL_GROUP)"])
@pytest.mark.parametrize("named", [True, False])
def test_two_groups_beside_each_other(op: str, words: str, named: bool) -> None:
    """Ranks 0-1 and 2-3 are groups of their own: by GUID, or because two ranks have the same place."""
    guid = [f"PG ID 3 PG GUID {n}{words}" if named else "" for n in (41, 43)]
    text = "".join(
        late(r, r % 2, 77, "ALLREDUCE" if r < 2 else op, 4096 if r < 2 else 8192, guid[r // 2]) for r in range(4)
    )
    assert not desync(text)


def test_one_group_whose_sizes_differ_is_shown() -> None:
    text = "".join(late(r, r, 77, "ALLREDUCE", 4096 << (r == 3), "PG ID 3 PG GUID 41(tp)") for r in range(4))
    assert desync(text) == ["shown"]


def test_one_group_on_other_ranks_than_the_first() -> None:
    """The second node's group: places are not the job's numbers, and the GUID tells."""
    text = "".join(late(4 + r, r, 77, "ALLREDUCE", 4096 << (r == 3), "PG ID 3 PG GUID 41") for r in range(4))
    assert desync(text) == ["shown"]


def test_unnamed_groups_are_at_most_likely_for_operations() -> None:
    text = "".join(late(r, r, 900, "ALLREDUCE" if r else "BROADCAST", 4096) for r in range(4))
    assert desync(text) == ["likely"]


def test_unnamed_first_operations_of_overlapping_groups() -> None:
    assert desync("".join(late(r, r, 1, "ALLREDUCE", 1 + r) for r in range(2))) == ["likely"]


def test_lines_without_a_rank_of_the_job() -> None:
    """Old torch: only the place in the group is printed, and nothing tells of which group."""
    assert desync("".join(late(r, r, 900, "ALLREDUCE", 4096 << r, number=False) for r in range(2))) == ["likely"]


def test_two_jobs_in_two_folders() -> None:
    group = "PG ID 0 PG GUID 0"
    text = {
        "a/0.log": late(0, 0, 1, "ALLREDUCE", 1, group) + late(1, 1, 1, "ALLREDUCE", 1, group),
        "b/1.log": late(1, 1, 1, "BROADCAST", 8, group),
    }
    assert not desync(text)
    assert desync({"w.log": "".join(text.values())}) == []  # nothing tells them apart, so nothing is compared


def test_two_lives_of_one_job() -> None:
    """Each life counts from 1: what timed out in the morning says nothing of the afternoon."""
    group = "PG ID 0 PG GUID 0"
    text = late(0, 0, 60, "ALLREDUCE", 1, group).replace("07:11:", "02:11:") + late(1, 1, 60, "BROADCAST", 8, group)
    assert not desync(text)


def record(rank: int, members: str, numel: int, name: str, desc: str) -> str:
    return json.dumps(
        {
            "version": "2.10",
            "pg_config": {name: {"name": name, "desc": desc, "ranks": members}},
            "pg_status": {"1": {"last_enqueued_collective": 9, "last_completed_collective": 8}},
            "entries": [
                {
                    "record_id": 1, "pg_id": 1, "process_group": [name, desc], "collective_seq_id": 9, "p2p_seq_id": 0,
                    "op_id": 1, "profiling_name": "nccl:all_reduce",
                    "input_sizes": [[numel]], "output_sizes": [[numel]],
                    "state": "started", "retired": False, "timeout_ms": 600000, "is_p2p": False,
                }
            ],
        }
    )  # fmt: skip


@pytest.mark.parametrize(("names", "desc"), [("45", "tp"), ("45", "undefined"), ("44", "tp")])
def test_recorders_of_two_groups_with_one_description(names: str, desc: str) -> None:
    """Told apart by their names, or where those are alike (of two jobs) by their members."""
    text = {
        f"nccl_trace_rank_{r}": record(r, "[0, 1]" if r < 2 else "[2, 3]", 64 << (r > 1), names[r // 2], desc)
        for r in range(4)
    }
    assert not desync(text)


def test_recorders_of_one_group() -> None:
    text = {f"nccl_trace_rank_{r}": record(r, "[0, 1]", 64 << r, "4", "tp") for r in range(2)}
    assert desync(text) == ["shown"]


def test_names_of_groups() -> None:
    assert group_name("0", "default_pg") == "default_pg"
    assert group_name("41", "TENSOR_MODEL_PARALLEL_GROUP") != group_name("43", "TENSOR_MODEL_PARALLEL_GROUP")
    assert group_name("7", "undefined") == group_name("7", "") == "guid 7"
