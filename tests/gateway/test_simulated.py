"""Real leaders and the real resume code under a simulated network, ranks and clock, from a seed."""

from collections import Counter

import pytest

from .simulated import RealRun


def play(seed: int, events: int, calm: bool) -> RealRun:
    run = RealRun(seed, events, calm)
    try:
        run.go()
    except Exception as error:
        trace = "\n".join(run.world.trace[-30:])
        raise AssertionError(f"seed {seed}, event {run.world.events}\n{trace}") from error
    return run


@pytest.mark.parametrize("seed", range(1, 5))
def test_each_token_once_whatever_breaks(seed: int) -> None:
    play(seed, 2000, calm=False)


def test_without_faults_all_are_served() -> None:
    run = play(1, 2000, calm=True)
    assert set(run.results) <= {"done", "aborted", "busy"}
    assert run.results["done"] > 20


@pytest.mark.slow
def test_many_seeds() -> None:
    results: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in range(100, 160):
        run = play(seed, 4000, calm=False)
        results.update(run.results)
        for gateway in run.network.gateways.values():
            reasons.update(gateway.table.counts)  # type: ignore[attr-defined]
    assert results["done"] > 1000
    for why in ("restart", "silence", "link", "fault", "retract"):
        assert reasons["resumed_" + why], f"{why} was never tried: {reasons}"
