"""A write that failed after it began: its pages are used by nobody before both sides have closed their connections."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.protocol import Dropped, Progress
from tests.engine.leader.pair import ATTACH, RANKS, Pair


def test_a_failed_write_ends_its_attempt_and_frees_its_pages_once_both_sides_have_closed() -> None:
    pair = Pair()
    pair.fails = {(1, 1)}
    room = pair.submit(1)
    pair.play(1.0)
    assert pair.decode.ended[room].retryable
    assert pair.dropped == [("p", 0), ("p", 1), ("d", 0), ("d", 1)], "the writers first, then the targets"
    assert pair.quarantined() == 0
    assert pair.decode.leader.pool.owned == pair.prefill.leader.pool.owned == 0
    again = pair.submit(2)
    pair.play(2.0)
    assert pair.decode.ended[again].reason == "length", "the pair goes on"
    assert pair.prefill.leader.counters["torn_writes"] == 1
    assert not pair.prefill.faults + pair.decode.faults


def test_pages_stay_in_quarantine_and_granted_rooms_wait_until_the_targets_have_closed() -> None:
    pair = Pair()
    pair.fails = {(0, 1)}
    pair.closes["d"] = False
    pair.submit(1)
    pair.play(1.0)
    waiting = pair.submit(2)
    pair.play(1.0)
    assert pair.quarantined() == 3
    assert waiting not in pair.decode.ended
    assert pair.prefill.leader.rooms.open[waiting].state in (r.WAITING, r.QUEUED), "nothing is sent meanwhile"
    for rank in range(RANKS):
        pair.decode.rank(Dropped(1, rank, 7))
    pair.play(2.0)
    assert pair.quarantined() == 0
    assert pair.decode.ended[waiting].reason == "length"


def test_what_was_being_sent_over_the_connection_ends_retryable_and_the_rest_goes_on() -> None:
    pair = Pair()
    pair.holds = {(0, 2), (1, 2)}
    running = pair.submit(1, new=30)
    pair.play(0.1)
    beside = pair.submit(2)
    pair.turn()
    pair.fails = {(0, 3)}
    failed = pair.submit(3)
    pair.play(0.5)
    assert [pair.decode.ended[room].reason for room in (beside, failed)] == ["peer", "transfer"]
    assert all(pair.decode.ended[room].retryable for room in (beside, failed))
    pair.play(1.0)
    assert pair.decode.ended[running].reason == "length"


def test_a_rank_that_does_not_close_its_connection_ends_its_epoch() -> None:
    for engine, name in (("p", "prefill"), ("d", "decode")):
        pair = Pair()
        pair.fails = {(0, 1)}
        pair.closes[engine] = False
        pair.submit(1)
        pair.play(3.5)
        assert not pair.prefill.faults + pair.decode.faults
        pair.play(2.0)
        (fault,) = pair.prefill.faults + pair.decode.faults
        assert fault.name == "fence_stuck"
        assert getattr(pair, name).faults == [fault]
        assert pair.quarantined() == (3 if name == "prefill" else pair.quarantined())


def test_a_lost_word_of_the_fence_is_said_again() -> None:
    for side in ("prefill", "decode"):
        pair = Pair()
        pair.fails = {(0, 1)}
        engine, lost = getattr(pair, side), []
        keep = engine.to_peer

        def lose(link: str, message: Any, keep: Any = keep, lost: list[Any] = lost) -> None:
            if getattr(message, "torn", False) and len(lost) < 2:
                lost.append(message)
            else:
                keep(link, message)

        engine.to_peer = lose
        pair.submit(1)
        pair.play(4.0)
        again = pair.submit(2)
        pair.play(2.0)
        assert len(lost) == 2
        assert pair.decode.ended[again].reason == "length"
        assert pair.quarantined() == 0


def test_a_transfer_is_stuck_when_it_does_not_advance_and_not_when_it_is_slow() -> None:
    pair = Pair()
    pair.holds = {(0, 1)}
    pair.submit(1)
    pair.play(1.0)
    for _ in range(12):
        pair.prefill.rank(Progress(1, 0, 0, 0, [1]))
        pair.play(1.0)
    assert not pair.prefill.faults
    pair.play(2.5)
    assert not pair.prefill.faults
    pair.play(2.5)
    assert [(fault.name, fault.rank) for fault in pair.prefill.faults] == [("transfer_stuck", 0)]


def test_while_the_target_is_out_of_reach_its_writers_are_not_blamed() -> None:
    pair = Pair()
    pair.holds = {(0, 1)}
    pair.submit(1)
    pair.play(1.0)
    for _ in range(150):  # nothing is heard of decode, whose room ends by its lease
        pair.prefill.now += 0.1
        pair.prefill.gateway(ATTACH)
        pair.prefill.desk.tick(pair.prefill.now)
        pair.prefill.answer(9)
    assert not pair.prefill.faults
    for _ in range(70):
        pair.prefill.now += 0.1
        pair.prefill.desk.tick(pair.prefill.now)
        pair.prefill.answer(9)
    assert [fault.name for fault in pair.prefill.faults] == ["transfer_stuck"]


def test_checks_of_other_ranks_that_advance_hide_no_rank_whose_check_is_stuck() -> None:
    pair = Pair()
    pair.silent = {1}
    pair.submit(1)
    pair.play(1.0)
    for _ in range(5):
        pair.decode.rank(Progress(1, 0, 0, 0, [], True))
        pair.play(0.5)
    assert not pair.decode.faults, "its own time is not over yet"
    for _ in range(4):
        pair.decode.rank(Progress(1, 0, 0, 0, [], True))
        pair.play(0.5)
    assert [(fault.name, fault.rank) for fault in pair.decode.faults] == [("check_stuck", 1)]


def test_a_check_that_advances_slowly_is_not_stuck() -> None:
    pair = Pair()
    pair.silent = {1}
    pair.submit(1)
    for _ in range(20):
        pair.play(0.5)
        pair.decode.rank(Progress(1, 1, 0, 0, [], True))
    assert not pair.decode.faults
