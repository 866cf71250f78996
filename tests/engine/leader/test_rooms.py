"""The room table keeps its own rules."""

import pytest

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.rooms import Room, Rooms
from closeranks.protocol import RoomId

HAPPENINGS = (r.SUBMIT, r.GRANT, r.ADMIT, r.RESERVE, r.COMPUTED, r.JOIN, r.SETTLED, r.ARRIVED, r.CHECKED, *r.ENDINGS)


def test_ends_are_absorbing() -> None:
    assert not [pair for pair in r.TABLE if pair[0] == r.ENDED]


@pytest.mark.parametrize("state", r.OPEN)
def test_every_open_state_can_be_aborted_runs_out_of_time_and_ends_with_the_epoch(state: str) -> None:
    for happening in (r.ABORT, r.DEADLINE, r.FAULT):
        assert r.TABLE[state, happening] == r.ENDED


def test_every_state_is_reached_and_left() -> None:
    assert set(r.TABLE.values()) == {*r.OPEN, r.ENDED}
    assert {state for state, _ in r.TABLE} == {*r.OPEN, r.NEW}


def test_prefill_of_a_pair_computes_only_what_was_granted() -> None:
    into = {pair for pair, target in r.TABLE.items() if target == r.PREFILL}
    assert into == {(r.QUEUED, r.ADMIT), (r.WAITING, r.ADMIT)}
    assert {pair for pair, target in r.TABLE.items() if target == r.QUEUED} == {
        (r.WAITING, r.GRANT),
        (r.PROMISED, r.SUBMIT),
    }


@pytest.mark.parametrize("state", [*r.OPEN, r.NEW, r.ENDED])
@pytest.mark.parametrize("happening", HAPPENINGS)
def test_any_pair_either_moves_or_is_counted_and_changes_nothing(state: str, happening: str) -> None:
    rooms = Rooms(4)
    room = Room(RoomId(1, 1), 0.0)
    room.state = state
    if state in r.OPEN:
        rooms.open[room.id] = room
    moved = rooms.move(room, happening)
    assert moved == ((state, happening) in r.TABLE)
    if not moved:
        assert room.state == state
        assert rooms.stale == {(state, happening): 1}
        assert not rooms.tombs
    elif room.state == r.ENDED:
        assert room.id not in rooms.open
        assert room.id in rooms.tombs


def test_tombstones_are_bounded_and_the_oldest_goes() -> None:
    rooms = Rooms(3)
    for number in range(5):
        rooms.bury(RoomId(number, 1), r.ABORT)
    assert list(rooms.tombs) == [RoomId(2, 1), RoomId(3, 1), RoomId(4, 1)]


def test_a_tombstone_of_a_told_room_stays_told() -> None:
    rooms = Rooms(3)
    rooms.bury(RoomId(1, 1), r.ABORT)
    rooms.bury(RoomId(1, 1), r.TOLD)
    rooms.bury(RoomId(1, 1), r.PEER_END)
    assert rooms.tombs == {RoomId(1, 1): r.TOLD}
