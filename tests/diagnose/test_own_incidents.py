# ruff: noqa: E501 - evidence stays in one piece, as it is printed
"""Incident folders of closeranks' own engines: what their supervisor and leader saw is the verdict."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.diagnose.judge import judge
from closeranks.evidence.bundle import from_texts

SECRET = "the user said xyzzy"


def manifest(engine: str = "decode", *, at: float = 1.79e9, **more: Any) -> str:
    found = {
        "schema": 1,
        "reason": f"stuck: {SECRET} (leader exited with 70 (fault))",
        "pids": {"leader": 1, "rank0": 2, "rank1": 3},
        "exit_codes": {"leader": 70, "rank0": None, "rank1": None},
        "engine": engine,
        "epoch": 4,
        "fault": {},
        "detected": at,
        "files": {},
    }
    return json.dumps(found | more, indent=1)


def fault(name: str, rank: int = 1) -> dict[str, Any]:
    return {"schema": 1, "name": name, "detail": SECRET, "rank": rank, "step": 20, "charged": ["6a.1"], "culprit": ""}


@pytest.mark.parametrize(
    ("name", "cls", "certainty", "words"),
    [
        ("digest", "DESYNC_SAME_OP_SHAPE_OR_SEQ", "shown", "rank 1 of decode computed something else"),
        ("transfer_stuck", "KV_TRANSFER", "shown", "a transfer that neither ends nor fails"),
        ("bad_shares", "KV_TRANSFER", "shown", "damaged pages"),
        ("unreachable", "KV_TRANSFER", "shown", "hand-overs that all failed at once"),
        ("unlike_ranks", "STARTUP", "shown", "another model"),
        ("grammar_stuck", "RUNTIME_LIBRARY_DEADLOCK", "likely", "compiling a grammar"),
        ("stuck", "MISSING_PARTICIPANT", "likely", "or for another that stood still"),
        ("CollectiveFault", "MISSING_PARTICIPANT", "likely", "waited in vain"),
        ("OutOfMemoryError", "CRASH_LOOKS_LIKE_HANG", "shown", "rank 1 of decode raised OutOfMemoryError in step 20"),
        ("crash", "CRASH_LOOKS_LIKE_HANG", "shown", "rank 1 of decode crashed"),
    ],
)
def test_the_leaders_word_is_the_verdict(name: str, cls: str, certainty: str, words: str) -> None:
    main = judge(from_texts([("manifest.json", manifest(fault=fault(name)))])).findings[0]
    assert (main.cls, main.certainty, main.engine) == (cls, certainty, "decode")
    assert words in main.summary
    assert "in step 20" in main.summary
    assert SECRET not in repr(main)


@pytest.mark.parametrize(
    ("codes", "cls", "words"),
    [
        ({"leader": 70, "rank0": None, "rank1": -9}, "DEAD_PEER", "rank 1 of decode was ended from outside (SIGKILL)"),
        ({"leader": -11, "rank0": 70, "rank1": None}, "CRASH_LOOKS_LIKE_HANG", "leader of decode crashed (SIGSEGV)"),
        ({"leader": None, "rank0": 1, "rank1": None}, "CRASH_LOOKS_LIKE_HANG", "rank 0 of decode exited with 1"),
    ],
)
def test_how_a_process_ended_is_the_verdict(codes: dict[str, int | None], cls: str, words: str) -> None:
    main = judge(from_texts([("manifest.json", manifest(exit_codes=codes))])).findings[0]
    assert (main.cls, main.certainty) == (cls, "shown")
    assert words in main.summary


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ("has been stopped by a signal for 3 s", "was stopped by a signal"),
        ("has not beaten for 10.2 s, in which it used 9.8 s of CPU", "went round within one turn"),
        ("has not beaten for 30.1 s, in which it slept within one turn", "slept within one turn"),
        ("has not beaten for 5.0 s and does not run", "does not run any more"),
        ("has not begun to beat within 120 s and does not run", "does not run any more"),
    ],
)
@pytest.mark.parametrize(("engine", "cls"), [("gateway", "FRONTEND_OR_CPU_BOUND"), ("both", "MISSING_PARTICIPANT")])
def test_what_stands_still_is_the_verdict(seen: str, words: str, engine: str, cls: str) -> None:
    who = "gateway" if engine == "gateway" else "leader"
    found = manifest(engine, reason=f"{who} {seen}", exit_codes={who: None}, fault={})
    main = judge(from_texts([("manifest.json", found)])).findings[0]
    assert (main.cls, main.certainty) == (cls, "shown")
    assert words in main.summary


def test_each_engine_is_told_by_the_first_incident_of_its_last_trouble() -> None:
    killed = {"leader": None, "rank0": -9, "rank1": None}
    folder = [
        ("prefill/b/manifest.json", manifest("prefill", at=1.79e9, exit_codes=killed)),
        ("decode/old/manifest.json", manifest("decode", at=1.79e9 - 86400, fault=fault("unlike_ranks"))),
        ("decode/c/manifest.json", manifest("decode", at=1.79e9 + 1, fault=fault("stuck"))),
        ("decode/a/manifest.json", manifest("decode", at=1.79e9 + 9, fault=fault("digest"))),
    ]
    findings = judge(from_texts(folder)).findings
    assert [(f.cls, f.engine) for f in findings] == [("DEAD_PEER", "prefill"), ("MISSING_PARTICIPANT", "decode")]


def test_the_stacks_tell_who_the_stuck_rank_waited_for() -> None:
    """The leader sees a rank without progress; the one that it waits for may be another."""
    busy = 'Process 2: closeranks::rank decode TP0\nPython v3.11.7 (python3)\n\nThread 2 (active+gil): "MainThread"\n    spin (closeranks/faults.py:211)\n    launch (closeranks/engine/rank/loop.py:176)\n    run (closeranks/engine/rank/loop.py:150)\n'
    waits = 'Process 3: closeranks::rank decode TP1\nPython v3.11.7 (python3)\n\nThread 3 (idle): "MainThread"\n    wait (closeranks/engine/rank/collectives/futex.py:33)\n    _await (closeranks/engine/rank/collectives/shm.py:203)\n    all_reduce (closeranks/engine/rank/collectives/shm.py:101)\n    forward (closeranks/engine/rank/models/llama.py:104)\n    run (closeranks/engine/rank/loop.py:150)\n'
    folder = [
        ("manifest.json", manifest(fault=fault("stuck"))),
        ("rank0.stacks.txt", busy),
        ("rank1.stacks.txt", waits),
    ]
    main = judge(from_texts(folder)).findings[0]
    assert (main.cls, main.engine, main.missing) == ("MISSING_PARTICIPANT", "decode", ["TP0"])


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["schema", "reason", "exit_codes", "engine", "epoch", "fault", "detected", "drill"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["decode", "leader"]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["name", "rank", "rank0", "step", "x"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
def test_no_manifest_makes_it_raise(changed: dict[str, Any]) -> None:
    judge(from_texts([("manifest.json", manifest(**changed))]))
