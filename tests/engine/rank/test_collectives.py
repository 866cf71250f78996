"""Ranks in real processes: the same bits everywhere, every disagreement and every absence a named fault."""

from typing import Any

import pytest
import torch

from closeranks.engine.rank.collectives import Solo, choose
from tests.engine.rank import programs
from tests.engine.rank.members import run_group

KINDS = ["shm", pytest.param("gloo", marks=pytest.mark.slow)]


def values(outcomes: list[Any]) -> list[Any]:
    assert [o.fault for o in outcomes] == [""] * len(outcomes), outcomes
    return [o.value for o in outcomes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_the_same_bits_everywhere_and_added_in_rank_order(kind: str, size: int, dtype: str) -> None:
    # The last shape is larger than a slot of shared memory and goes in pieces.
    shapes = [(1, 576), (3, 5, 7), (1,), (64, 576), (2100, 1024), (100, 331)]
    found = values(run_group(programs.sums, size, kind, shapes=shapes, dtype=dtype))
    assert all(rank == found[0] for rank in found)
    for salt, shape in enumerate(shapes):
        parts = [programs.seeded(r, shape, getattr(torch, dtype), salt) for r in range(size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        assert found[0][salt] == total.to(parts[0].dtype).view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 24576), (64, 24576), (3, 0)])
def test_a_gather_takes_parts_of_different_width(kind: str, rows: int, width: int) -> None:
    found = values(run_group(programs.uneven, 3, kind, rows=rows, width=width))
    assert found[0][0] == rows * (3 * width + 3)
    assert len({tuple(f) for f in found}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_all_kinds_follow_each_other(kind: str) -> None:
    chains = values(run_group(programs.mixed, 4, kind, rounds=25 if kind == "gloo" else 200))
    assert len(set(chains)) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["size", "type", "kind", "skip", "step", "rows", "large"])
def test_ranks_that_disagree_all_fail_and_say_where(kind: str, how: str) -> None:
    outcomes = run_group(programs.odd_one, 3, kind, how=how, deadlines={"deadline_s": 60.0})
    assert {o.fault for o in outcomes} == {"CollectiveMismatch"}, outcomes
    assert all("rank 2 is at epoch 1 step" in o.text for o in outcomes), outcomes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["stopped", "left"])
def test_a_rank_that_is_not_there_is_a_fault_of_those_that_wait(kind: str, how: str) -> None:
    outcomes = run_group(programs.missing, 3, kind, how=how, absent=2, deadlines={"deadline_s": 0.7})
    for outcome in outcomes[:2]:
        assert outcome.fault in ("CollectiveTimeout", "CollectiveBroken"), outcomes
        assert "all_reduce" in outcome.text
    if kind == "shm":
        assert all(o.fault == "CollectiveTimeout" and "rank 2 did not advance" in o.text for o in outcomes[:2])


def test_a_killed_rank_is_named() -> None:
    outcomes = run_group(programs.missing, 2, "shm", how="killed", deadlines={"deadline_s": 1.0})
    assert outcomes[1].fault == "died"
    assert "rank 1 did not advance" in outcomes[0].text


@pytest.mark.slow
def test_a_slow_rank_that_advances_is_waited_for() -> None:
    assert values(run_group(programs.slow, 2, "shm", seconds=5.0, deadlines={"deadline_s": 2.0})) == [2, 2]


@pytest.mark.slow
def test_waiting_costs_no_core() -> None:
    spent = values(run_group(programs.cpu_while_waiting, 2, "shm", seconds=1.5))
    assert spent[1] < 0.3


@pytest.mark.slow
def test_ranks_of_different_epochs_do_not_form_a_group() -> None:
    outcomes = run_group(programs.mixed, 2, "shm", rounds=1, epoch_by_rank=[1, 2], deadlines={"join_deadline_s": 2.0})
    assert all(o.fault in ("CollectiveTimeout", "CollectiveMismatch") for o in outcomes), outcomes


def test_a_rank_that_never_comes_is_named() -> None:
    outcomes = run_group(programs.mixed, 1, "shm", rounds=1, deadlines={"join_deadline_s": 0.5}, as_if=3)
    assert outcomes[0].fault == "CollectiveTimeout"
    assert "ranks [1, 2] did not come" in outcomes[0].text


def test_a_group_of_one_does_nothing_but_count() -> None:
    group = Solo(1)
    t = torch.ones(3)
    group.all_reduce(t)
    group.broadcast(t)
    assert group.gather(t) == [t]
    assert t.tolist() == [1, 1, 1]
    assert group.ticks == 3


def test_the_group_is_chosen_by_device_and_place() -> None:
    assert choose("", "cpu", "/run/group") == "shm"
    assert choose("", "cpu", "10.0.0.1:2000") == "gloo"
    assert choose("", "cuda:0", "/run/group") == "nccl"
    assert choose("gloo", "cpu", "/run/group") == "gloo"
