"""The planner: rules that hold whatever comes in, and the ladder of the cases that matter."""

from collections import Counter

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from closeranks.watch.recover_state import (
    NOT_OURS,
    Case,
    Over,
    Plan,
    Policy,
    Refusal,
    Restart,
    Result,
    Side,
    anew,
    lying,
    may_replace_alone,
    next_step,
    ordered,
    plan,
)

VERDICTS = (
    "DESYNC_DIFFERENT_COLLECTIVE", "KV_TRANSFER", "STALE_PEER", "DEAD_PEER", "UNDETERMINED", "DEVICE_HANG", *NOT_OURS,
)  # fmt: skip
NAMES = ("prefill-1", "prefill-2", "decode-1", "decode-2", "both-1")

sides = st.lists(
    st.builds(
        Side,
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(["sglang", "vllm", "trtllm", "closeranks"]),
        role=st.sampled_from(["prefill", "decode", "both"]),
        group=st.sampled_from(["", "m"]),
        version=st.sampled_from(["", "0.5.13.post1", "0.5.23", "0.32.0", "v1.2rc3", "main"]),
        loop=st.sampled_from(["lives", "stands", "unknown"]),
        obstacle=st.sampled_from(["", "", "", "renamed itself"]),
    ),
    max_size=5,
    unique_by=lambda side: side.name,
)
cases = st.builds(
    Case, blamed=st.lists(st.sampled_from(NAMES), max_size=3, unique=True).map(tuple), verdict=st.sampled_from(VERDICTS)
)
policies = st.builds(
    Policy,
    sides=st.sampled_from(["auto", "wedged", "both"]),
    cooldown_s=st.floats(0, 4000),
    per_hour=st.integers(0, 4),
    peers=st.lists(st.sampled_from(NAMES), max_size=2).map(tuple),
)
pasts = st.lists(st.builds(Restart, st.sampled_from(NAMES), st.floats(0, 8000)), max_size=8)


def test_what_somebody_is_ending_is_left_to_them_for_a_while_and_never_held_against_an_operator() -> None:
    ends = Side(name="decode-1", kind="sglang", role="decode", wanted="somebody is stopping it")
    case = Case(blamed=("decode-1",), verdict="DEAD_PEER")
    made = plan(case, [ends], Policy())
    assert isinstance(made, Refusal)
    assert made.wait_s, "it may be a crash that takes its time"
    by_hand = plan(msgspec.structs.replace(case, by_hand=True), [ends], Policy())
    assert isinstance(by_hand, Plan)
    peer = Side(name="prefill-1", kind="sglang", role="prefill")
    other = plan(Case(blamed=("prefill-1",), verdict="DEAD_PEER"), [peer, ends], Policy())
    assert isinstance(other, Plan)
    assert "decode-1" not in {a.engine for a in other.actions}


@settings(deadline=None)
@given(cases, sides, policies, pasts)
def test_the_rules_hold(case: Case, seen: list[Side], policy: Policy, past: list[Restart]) -> None:
    made = plan(case, seen, policy, past)
    if isinstance(made, Refusal):
        assert made.reason
        assert made.wait_s is None or made.wait_s >= 0
        return
    by_name = {side.name: side for side in seen}
    assert case.verdict not in NOT_OURS
    ended = Counter(a.engine for a in made.actions if a.kind == "end")
    started = Counter(a.engine for a in made.actions if a.kind == "start")
    assert ended == started, "what is ended is started, and the other way round"
    assert set(ended.values()) <= {1}, "an engine is ended twice"
    assert set(case.blamed) <= set(ended)
    for name in ended:
        ages = [r.age_s for r in past if r.engine == name]
        assert not [age for age in ages if age < policy.cooldown_s], "within its cool-down"
        assert len([age for age in ages if age < 3600]) < policy.per_hour, "above the ceiling"
        assert not by_name[name].obstacle, "could not be started again"
    for rung in made.rungs:
        assert rung.actions[-1].kind == "verify"
        order = [a.kind for a in rung.actions if a.kind in ("end", "start", "ready")]
        assert order == sorted(order, key=["end", "start", "ready"].index), "all end before the first starts"
    assert all(a.engine in by_name for a in made.actions if a.engine)
    assert all(a.deadline_s > 0 for a in made.actions if a.kind != "verify")


@settings(deadline=None)
@given(cases, sides, policies, pasts, st.data())
def test_every_plan_comes_to_an_end_and_does_each_step_at_most_once(
    case: Case, seen: list[Side], policy: Policy, past: list[Restart], data: st.DataObject
) -> None:
    made = plan(case, seen, policy, past)
    if isinstance(made, Refusal):
        return
    results: dict[int, Result] = {}
    while not isinstance(step := next_step(made, results), Over):
        assert step not in results
        assert all(n < step for n in results), "steps go forward only"
        results[step] = data.draw(st.sampled_from(["done", "done", "failed"]))
    passed = [n for n, a in enumerate(made.actions) if a.kind == "verify" and results.get(n) == "done"]
    assert bool(passed) >= (step.outcome == "recovered"), "recovered without a check that passed"
    fatal = [
        a for n, a in enumerate(made.actions) if results.get(n) == "failed" and a.kind in ("end", "start", "ready")
    ]
    assert not fatal or step.outcome == "failed"
    # Nothing of a later rung was done once a check had passed.
    if passed:
        after = [n for n in results if n > passed[0]]
        assert all(made.actions[n].kind == "admit" for n in after)


def pair(**changes: object) -> list[Side]:
    base = {"kind": "sglang", "version": "0.5.23", "loop": "stands"}
    return [
        Side(name="decode-31022", role="decode", **(base | changes)),  # type: ignore[arg-type]
        Side(name="prefill-31021", role="prefill", **(base | changes | {"loop": "lives"})),  # type: ignore[arg-type]
    ]


def kinds(made: Plan | Refusal, kind: str) -> list[str]:
    assert isinstance(made, Plan)
    return [a.engine for a in made.actions if a.kind == kind]


DESYNC = Case(blamed=("decode-31022",), verdict="DESYNC_DIFFERENT_COLLECTIVE")


def test_sglang_keeps_what_it_knows_of_a_peer_so_both_sides_are_restarted_prefill_first() -> None:
    made = plan(DESYNC, pair(), Policy())
    assert kinds(made, "end") == ["prefill-31021", "decode-31022"]
    assert kinds(made, "start") == ["prefill-31021", "decode-31022"]
    assert isinstance(made, Plan)
    assert "keeps what it knows" in made.notes[0]
    assert [r.name for r in made.rungs] == ["restart"]


def test_a_wedged_side_alone_where_the_operator_says_so() -> None:
    assert kinds(plan(DESYNC, pair(), Policy(sides="wedged")), "end") == ["decode-31022"]


def test_closeranks_forgets_a_peer_that_was_replaced() -> None:
    made = plan(DESYNC, pair(kind="closeranks", version="0.1.0"), Policy())
    assert isinstance(made, Plan)
    assert [r.name for r in made.rungs] == ["restart", "peers"]
    assert [a.engine for a in made.rungs[0].actions if a.kind == "end"] == ["decode-31022"]


def test_of_several_prefills_none_is_ended_on_a_guess() -> None:
    sides = [*pair(), Side(name="prefill-31031", role="prefill", kind="sglang", version="0.5.23", loop="lives")]
    made = plan(DESYNC, sides, Policy())
    assert kinds(made, "end") == ["decode-31022"]
    assert isinstance(made, Plan)
    assert "prefill-31021, prefill-31031" in made.notes[0]
    named = plan(DESYNC, sides, Policy(peers=("prefill-31021", "prefill-31031")))
    assert isinstance(named, Plan)
    assert [[a.engine for a in r.actions if a.kind == "end"] for r in named.rungs] == [
        ["decode-31022"],
        ["prefill-31021", "prefill-31031"],
    ]


def test_an_engine_of_another_service_is_no_peer() -> None:
    other = [msgspec.structs.replace(s, name=s.name + "9", group="another model") for s in pair()]
    assert kinds(plan(DESYNC, [*pair(), *other], Policy()), "end") == ["prefill-31021", "decode-31022"]
    same = [msgspec.structs.replace(s, name=s.name + "9") for s in pair()]
    assert kinds(plan(DESYNC, [*pair(), *same], Policy()), "end") == ["decode-31022"]


def test_live_loops_are_told_to_abort_before_anything_is_ended() -> None:
    made = plan(Case(blamed=("decode-31022",), verdict="KV_TRANSFER"), pair(loop="lives"), Policy())
    assert isinstance(made, Plan)
    assert [r.name for r in made.rungs] == ["abort", "restart"]
    assert kinds(made, "abort")[:2] == ["decode-31022", "prefill-31021"]
    standing = plan(Case(blamed=("decode-31022",), verdict="KV_TRANSFER"), pair(), Policy())
    assert isinstance(standing, Plan)
    assert [r.name for r in standing.rungs] == ["restart"]


def test_vllm_is_ended_reader_first() -> None:
    made = plan(DESYNC, pair(kind="vllm", version="0.32.0"), Policy())
    assert kinds(made, "end") == ["decode-31022", "prefill-31021"]
    assert kinds(made, "start") == ["prefill-31021", "decode-31022"]


@pytest.mark.parametrize("verdict", NOT_OURS)
def test_what_is_no_wedge_is_left_alone(verdict: str) -> None:
    made = plan(Case(blamed=("decode-31022",), verdict=verdict), pair(), Policy())
    assert isinstance(made, Refusal)
    assert verdict in made.reason


def test_a_refusal_says_when_it_would_be_taken() -> None:
    held = plan(DESYNC, pair(), Policy(cooldown_s=300), [Restart("decode-31022", 100.0)])
    assert isinstance(held, Refusal)
    assert held.wait_s == 200.0
    full = plan(DESYNC, pair(), Policy(per_hour=2), [Restart("decode-31022", 400.0), Restart("decode-31022", 3000.0)])
    assert isinstance(full, Refusal)
    assert full.wait_s == 600.0


def test_a_peer_in_its_cooldown_is_left_and_said() -> None:
    made = plan(DESYNC, pair(), Policy(), [Restart("prefill-31021", 10.0)])
    assert kinds(made, "end") == ["decode-31022"]
    assert isinstance(made, Plan)
    assert "cool-down" in made.notes[0]


def test_what_could_not_be_started_is_not_ended() -> None:
    made = plan(DESYNC, pair(obstacle="it has renamed itself"), Policy())
    assert isinstance(made, Refusal)
    assert "renamed itself" in made.reason


def test_nobody_is_ended_without_blame() -> None:
    assert isinstance(plan(Case(blamed=()), pair(), Policy()), Refusal)
    assert isinstance(plan(Case(blamed=("decode-9",)), pair(), Policy()), Refusal)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
@example("¹")
@example("--1")
def test_any_version_is_read(version: str) -> None:
    assert may_replace_alone("closeranks", version) in (True, False)
    assert not may_replace_alone("sglang", version)
    assert not may_replace_alone("unknown", version)


def test_order_is_the_same_whatever_order_came_in() -> None:
    assert ordered(pair(), "end") == ordered(pair()[::-1], "end")


def test_a_failed_step_leaves_no_ended_engine_untried() -> None:
    made = plan(DESYNC, pair(), Policy())
    assert isinstance(made, Plan)
    number = {(a.kind, a.engine): n for n, a in enumerate(made.actions)}
    prefill, decode = (number["start", name] for name in ("prefill-31021", "decode-31022"))
    before: dict[int, Result] = dict.fromkeys(range(prefill), "done")
    one_stays = {**before, number["end", "decode-31022"]: "failed"}
    assert next_step(made, one_stays) == prefill
    assert isinstance(next_step(made, {**one_stays, prefill: "done"}), Over)
    assert next_step(made, {**before, prefill: "failed"}) == decode
    both: dict[int, Result] = {**before, prefill: "failed", decode: "done"}
    assert isinstance(next_step(made, both), Over)
    assert lying(made, both) == {"prefill-31021": prefill}
    assert next_step(made, anew(made, both)) == prefill
