"""Specs are checked when they are given; a fault acts exactly when its spec says."""

import pytest

from closeranks import faults


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rank.nowhere:raise", "points: rank.forward"),
        ("rank.forward:explode", "actions: raise, loop"),
        ("rank.forward", "no action ''"),
        ("rank.forward:raise,after=0", "too small"),
        ("rank.forward:raise,after=x", "after=x"),
        ("rank.forward:raise,rank", "expected key=value"),
    ],
)
def test_bad_specs_say_what_there_is(spec: str, says: str) -> None:
    with pytest.raises(faults.FaultSpecError, match=says):
        faults.parse(spec)


def test_acts_at_its_count_and_for_its_times() -> None:
    injector = faults.Injector(["rank.digest:wrong,rank=1,after=3,times=2"], rank=1)
    assert [injector.due("rank.digest") is not None for _ in range(6)] == [False, False, True, True, False, False]


def test_facts_of_process_and_point_must_match() -> None:
    injector = faults.Injector(["peer.send:drop,engine=decode,message=Grant,times=0"], engine="decode")
    assert injector.due("peer.send", message="End") is None
    assert injector.due("peer.send", message="Grant") is not None
    assert faults.Injector(["peer.send:drop,engine=decode"], engine="prefill").due("peer.send") is None


def test_raise_names_the_drill() -> None:
    with pytest.raises(faults.InjectedFault, match=r"injected: rank\.forward:raise"):
        faults.Injector(["rank.forward:raise"]).act("rank.forward")


def test_nothing_given_nothing_held() -> None:
    assert faults.injector([]) is None
