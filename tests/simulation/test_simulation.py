"""A short slice of the simulation; `python -m tests.simulation --seeds N --events M` runs more."""

import pytest

from tests.simulation.breaches import BREACHES, found_by
from tests.simulation.run import Run


@pytest.mark.parametrize("seed", range(1, 9))
def test_nothing_breaks_under_loss_faults_and_aborts(seed: int) -> None:
    run = Run(seed, 3000)
    try:
        run.go()
    except Exception as error:
        raise AssertionError(
            f"event {run.world.events} of `python -m tests.simulation --first {seed} --seeds 1 --events 3000`\n"
            + "\n".join(run.world.trace[-30:])
        ) from error


@pytest.mark.parametrize("seed", range(1, 5))
def test_without_faults_every_request_that_is_not_aborted_is_served(seed: int) -> None:
    run = Run(seed, 3000, calm=True)
    run.go()
    assert set(run.results) <= {"done", "aborted"}
    assert run.results["done"] > 20
    assert not [fault for engine in run.network.engines.values() for fault in engine.faults]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_gives_the_same_run(seed: int) -> None:
    runs = [Run(seed, 2000) for _ in range(2)]
    for run in runs:
        run.go()
    assert runs[0].results == runs[1].results
    assert runs[0].world.events == runs[1].world.events
    assert runs[0].world.trace == runs[1].world.trace


@pytest.mark.slow
@pytest.mark.parametrize("name", BREACHES)
def test_a_planted_breach_is_found(name: str) -> None:
    assert any(found_by(name, seed, 25_000) for seed in range(1, 31)), f"nobody noticed: {name}"
