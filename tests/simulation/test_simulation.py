"""A short slice of the simulation; `python -m tests.simulation --seeds N --events M` runs more."""

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation import impossible
from tests.simulation.breaches import LISTED, found_by
from tests.simulation.coverage import Coverage, watching_pages
from tests.simulation.run import Run
from tests.simulation.shorten import fails, kind_of, shorten


def play(seed: int, events: int, calm: bool = False, coverage: Coverage | None = None) -> Run:
    run = Run(seed, events, calm, coverage)
    error = fails(run)
    if error is not None:
        again = f"event {run.world.events} of `python -m tests.simulation --first {seed} --seeds 1 --events {events}`"
        raise AssertionError("\n".join([again, *run.story(error)])) from error
    return run


@pytest.mark.parametrize("seed", range(1, 4))
def test_nothing_breaks_under_loss_faults_and_aborts(seed: int) -> None:
    play(seed, 10_000)


@pytest.mark.parametrize("seed", [1, 2])
def test_without_faults_every_request_that_is_not_aborted_is_served(seed: int) -> None:
    run = play(seed, 4000, calm=True)
    outcome = run.outcome()
    assert set(outcome) <= {"done", "aborted", "busy"}
    assert outcome["done"] > 50
    assert not run.faults()


def test_a_seed_gives_the_same_run() -> None:
    runs = [play(7, 5000) for _ in range(2)]
    assert runs[0].outcome() == runs[1].outcome()
    assert runs[0].world.events == runs[1].world.events
    assert runs[0].world.trace(1000) == runs[1].world.trace(1000)


@pytest.mark.parametrize("name", ["a page is lost at each end", "prefill's end ends the request"])
def test_a_planted_breach_is_found_at_once(name: str) -> None:
    assert found_by(name, 1, 20_000)[0]


def test_a_failure_is_shortened() -> None:
    """A run that fails for one of its choices only needs that one."""

    class Failing(Run):
        def chosen(self, what: str) -> bool:
            done = super().chosen(what)
            if done and self.choices == 20:
                self.broken = True
            return done

        def go(self) -> None:
            self.broken = False
            super().go()
            assert not self.broken, "the twentieth choice breaks it"

    whole = Failing(1, 1500)
    error = fails(whole)
    assert error is not None
    _, again, skip = shorten(lambda skip: Failing(1, 1500, skip=skip), kind_of(error), whole.choices, 120.0)
    assert again is not None
    assert 20 not in skip
    assert len(skip) > whole.choices // 2


def test_the_tables_name_every_pair_and_nothing_impossible_comes_up() -> None:
    coverage = Coverage()
    with watching_pages(coverage):
        for life in play(5, 8000, coverage=coverage).network.lives.values():
            coverage.moves(life.leader)
    for name, rows in coverage.tables():
        for state, event, count, why in rows:
            assert not (why and count), f"{name}: {state} x {event} was called impossible: {why}"
    states = {name: (set(states), set(events)) for name, states, events, _ in impossible.TABLES}
    for name, rows in coverage.tables():
        assert all(state in states[name][0] and event in states[name][1] for state, event, *_ in rows), name


def test_the_documented_breaches_are_the_planted_ones() -> None:
    """By law and mechanism: none of those that apply is without a breach."""
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for name, breach in LISTED.items():
        assert f"| {name} | {breach.law} | `{breach.cls.__name__}.{breach.attribute}` |" in page
    said = " ".join(breach.law for breach in LISTED.values())
    for mechanism in [f"M{number}" for number in range(1, 22) if number not in (15, 20)]:
        assert re.search(rf"\b{mechanism}\b", said), mechanism
    for law in (1, 2, 3, 4, 6, 7):  # 5 is the codec's
        assert f"law {law}" in said


@pytest.mark.slow
def test_a_minute_of_seeds() -> None:
    """Other seeds than the quick ones; how many depends on the machine, what they must hold does not."""
    outcome: Counter[str] = Counter()
    stop_at = time.monotonic() + 60
    for seed in range(1000, 1100):
        outcome += play(seed, 30_000).outcome()
        if time.monotonic() > stop_at:
            break
    assert outcome["done"] > 100


@pytest.mark.slow
def test_an_engine_that_vanishes_behind_a_fence_leaves_nothing_that_counts() -> None:
    """Prefill keeps the fence of a decode engine that is never heard again: no silence proves its pages freed."""
    play(1037, 30_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_a_planted_breach_is_found(name: str) -> None:
    """By one of a few seeds; `python -m tests.simulation.breaches` says by how many of ten within 200,000 events."""
    assert any(found_by(name, seed, 80_000)[0] for seed in range(1, 9))
