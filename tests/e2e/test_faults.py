"""Faults of different kinds in a served pair under eight streams; `bench/faults.py` has the whole table."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import faults as table
from tests.e2e import link, memory
from tests.e2e.drill import ENDS, RESUMES, RIDES, Seen, as_wanted, expectations
from tests.e2e.reference import Expected, Reference

pytestmark = pytest.mark.slow
ROWS = {row.name: row for row in table.rows()}
FLAGS = ("--num-pages", "500", "--threads", "1", "--tp-size", "2", "--no-spares")


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Sequence[Expected]:
    return expectations(Reference(tiny_model).continue_, 5, table.POISON, 120)


@pytest.fixture(scope="module")
def poison(tiny_model: Path) -> Expected:
    return Reference(tiny_model).continue_([table.POISON, 7, 8], 4)


def drill(row: table.Row, tiny_model: Path, expected: Sequence[Expected], poison: Expected) -> Seen:
    """Run a row of the table; what holds for every row."""
    seen = table.run(row, tiny_model, FLAGS, expected, poison)
    assert as_wanted(row.wanted, seen.outcome), seen
    assert seen.wrong == 0, seen
    assert seen.left == 0, seen
    assert not seen.residue, seen
    assert seen.silence_s < 60, seen
    return seen


@pytest.mark.parametrize("name", ["wrong digest, decode rank", "prefill rank killed while decode rank stands 2 s"])
def test_streams_resume(name: str, tiny_model: Path, expected: Sequence[Expected], poison: Expected) -> None:
    row = ROWS[name]
    assert row.wanted == RESUMES
    seen = drill(row, tiny_model, expected, poison)
    assert seen.serving_s is not None
    assert len(seen.incidents) == 1, seen.reasons
    assert seen.drills == list(row.fault)


def test_a_gateway_that_stands_still_is_replaced(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    row = ROWS["SIGSTOP, gateway"]
    assert row.wanted == ENDS, "streams are cut with the process that held them"
    seen = drill(row, tiny_model, expected, poison)
    assert seen.serving_s is not None, "new ones are served"
    assert seen.reasons == ["gateway has been stopped by a signal for 3 s"], "with evidence, and no engine noticed"


def test_bad_transfers_and_lost_words_cost_an_attempt_and_nobody_else_anything(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    faults = (
        *table.LATE,
        "rank.arrived:corrupt,engine=decode,rank=0,after=12",
        "peer.send:drop,message=Grant,after=4,times=2",
        "peer.send:drop,message=Arrived,after=6,times=2",
        "peer.send:double,after=40,times=50",
        "peer.send:delay,message=Grant,after=8,times=3,seconds=0.5",
    )
    seen = drill(table.Row("small faults", RESUMES, faults), tiny_model, expected, poison)
    assert not seen.incidents, seen.reasons


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted, which needs root")
def test_a_full_disk_is_ridden_through(tiny_model: Path, expected: Sequence[Expected], poison: Expected) -> None:
    row = ROWS["disk full"]
    assert row.wanted == RIDES
    assert not drill(row, tiny_model, expected, poison).incidents


@pytest.mark.skipif(not link.possible(), reason="a network device is made, which needs root and TUN")
def test_ranks_find_each_other_again_after_their_network_device_has_gone(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    """What it takes depends on the other devices of the host: nothing, prefill's successor, or decode's as well
    (`tests/engine/leader/test_reach.py`)."""
    row = ROWS["network device of the ranks removed"]
    assert row.wanted == RESUMES
    seen = drill(row, tiny_model, expected, poison)
    assert len(seen.incidents) <= 3, seen.reasons


@pytest.mark.skipif(not memory.possible(), reason="needs a memory cgroup of its own")
def test_a_rank_that_the_kernel_kills_for_its_memory_is_replaced(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    row = ROWS["memory pressure, the kernel kills a decode rank"]
    assert row.wanted == RESUMES
    assert len(drill(row, tiny_model, expected, poison).incidents) == 1


def test_a_request_that_crashes_ranks_ends_alone_with_an_error_that_names_it(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    row = ROWS["poison request (crashes)"]
    assert row.wanted == ENDS
    seen = drill(row, tiny_model, expected, poison)
    assert seen.detail.startswith("1 of "), "only the poison request may fail"
    assert "in a step that failed 3 times, the last one alone" in seen.detail
    assert len(seen.incidents) == 3, "and the engine goes on after it"
