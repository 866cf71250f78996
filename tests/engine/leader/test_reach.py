"""Hand-overs that all fail: prefill goes first, then decode, each once, and nobody for failures that are mended."""

from closeranks.engine.leader.reach import FAILURES, LIMIT_S, NEVER_S, PATIENCE_S
from closeranks.supervise.engine import STORM_EPOCHS, STORM_S
from tests.engine.leader.drive import Driven
from tests.engine.leader.pair import RANKS, Pair


def attempts(pair: Pair, first: int, seconds: float) -> None:
    """One request after the other, two a second."""
    for number in range(int(seconds * 2)):
        pair.submit(first + number)
        pair.play(0.5)


def named(engine: Driven) -> list[str]:
    return [fault.name for fault in engine.faults]


def worked() -> Pair:
    pair = Pair()
    room = pair.submit(1)
    pair.play(1.0)
    assert pair.decode.ended[room].reason == "length"
    return pair


def successor(pair: Pair) -> None:
    """Prefill's next epoch: its connections are new, and have not worked yet."""
    pair.prefill = Driven(engine="p", role="prefill", instance=9, tp_size=RANKS, radix=False, overlap=False)
    pair.engines = (pair.prefill, pair.decode)
    pair.play(1.0)


def test_prefill_goes_when_what_worked_fails_again_and_again() -> None:
    pair = worked()
    pair.refused = True
    attempts(pair, 10, LIMIT_S - 0.5)
    assert not pair.prefill.faults + pair.decode.faults, "it may pass"
    attempts(pair, 20, 2.0)
    assert named(pair.prefill) == ["unreachable"]
    assert "nobody is there" in pair.prefill.faults[0].detail
    assert not pair.decode.faults


def test_decode_goes_when_the_successor_of_prefill_fares_no_better() -> None:
    pair = worked()
    successor(pair)
    pair.refused = True
    attempts(pair, 10, LIMIT_S - 0.5)
    assert not pair.prefill.faults + pair.decode.faults
    attempts(pair, 30, 1.5)
    assert named(pair.decode) == ["unreachable"]
    assert not pair.prefill.faults, "it has never worked: it waits longer"


def test_two_that_never_could_wait_so_long_that_it_is_no_storm() -> None:
    pair = Pair()
    pair.play(1.0)
    pair.refused = True
    attempts(pair, 10, STORM_S / (STORM_EPOCHS - 1) - 0.5)
    assert pair.prefill.leader.counters["failed_transfers"] > FAILURES
    assert not pair.prefill.faults + pair.decode.faults
    attempts(pair, 110, 2.0)
    assert named(pair.decode) == ["unreachable"], "nobody runs there"
    assert not pair.prefill.faults
    assert min(NEVER_S.values()) >= STORM_S / (STORM_EPOCHS - 1)


def test_a_hand_over_between_that_works_starts_the_count_anew() -> None:
    pair = worked()
    for number in range(8):
        pair.refused = number % 2 == 0
        attempts(pair, 10 * (number + 1), 1.0)
    assert not pair.prefill.faults + pair.decode.faults


def test_a_burst_that_fails_at_once_is_not_enough_nor_two_that_fail_late() -> None:
    pair = worked()
    pair.refused = True
    for number in range(3 * FAILURES):
        pair.submit(10 + number)
    pair.play(1.0)
    assert pair.prefill.leader.counters["failed_transfers"] >= FAILURES
    assert not pair.prefill.faults + pair.decode.faults
    pair = worked()
    pair.refused = True
    pair.submit(10)
    pair.play(5.0)
    pair.submit(11)
    pair.play(1.0)
    assert not pair.prefill.faults + pair.decode.faults


def test_decode_goes_last_if_a_prefill_that_could_does_not() -> None:
    """It serves another decode engine, say, for which all is well."""
    pair = worked()
    pair.refused = True
    pair.prefill.leader.reach.worked_at = 0.0
    attempts(pair, 10, PATIENCE_S - 0.5)
    assert not pair.prefill.faults + pair.decode.faults
    attempts(pair, 30, 1.5)
    assert named(pair.decode) == ["unreachable"]
