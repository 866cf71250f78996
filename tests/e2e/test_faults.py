"""Faults of different kinds in a served pair under eight streams; `bench/faults.py` has the whole table."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import faults as table
from tests.e2e.drill import ENDS, RESUMES, RIDES, Seen, expectations
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


def drill(name: str, tiny_model: Path, expected: Sequence[Expected], poison: Expected) -> Seen:
    """Run a row of the table; what holds for every row."""
    seen = table.run(ROWS[name], tiny_model, FLAGS, expected, poison)
    assert seen.outcome == ROWS[name].wanted, seen
    assert seen.wrong == 0, seen
    assert seen.left == 0, seen
    assert not seen.residue, seen
    assert seen.silence_s < 60, seen
    return seen


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("wrong digest, decode rank", "decode"),
        ("exception in forward, prefill rank", "prefill"),
        ("prefill rank killed while decode rank stands 2 s", "prefill"),
    ],
)
def test_streams_resume(
    name: str, engine: str, tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    assert ROWS[name].wanted == RESUMES
    seen = drill(name, tiny_model, expected, poison)
    assert seen.serving_s is not None
    assert len(seen.incidents) == 1, seen.reasons
    if ROWS[name].fault:
        assert seen.drills == list(ROWS[name].fault)


@pytest.mark.parametrize("name", ["transfer fails, is written 2 s later", "corrupted page"])
def test_a_bad_transfer_costs_its_request_another_attempt_and_nobody_else_anything(
    name: str, tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    seen = drill(name, tiny_model, expected, poison)
    assert not seen.incidents, seen.reasons


@pytest.mark.parametrize("name", ["control messages reordered", "disk full"])
def test_streams_ride_through(name: str, tiny_model: Path, expected: Sequence[Expected], poison: Expected) -> None:
    assert ROWS[name].wanted == RIDES
    seen = drill(name, tiny_model, expected, poison)
    assert not seen.incidents, seen.reasons


def test_a_poison_request_ends_alone_with_an_error_that_names_it(
    tiny_model: Path, expected: Sequence[Expected], poison: Expected
) -> None:
    name = "poison request (raises)"
    assert ROWS[name].wanted == ENDS
    seen = drill(name, tiny_model, expected, poison)
    assert seen.detail.startswith("1 of "), "only the poison request may fail"
    assert "in a step that failed 3 times, the last one alone" in seen.detail
    assert len(seen.incidents) == 3, "and the engine goes on after it"
