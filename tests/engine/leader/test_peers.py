"""Two leaders whose words to each other are lost or late."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.protocol import Abort, Beat, End, Grant, Hello, RoomId
from tests.engine.leader.drive import Driven
from tests.engine.leader.test_core import hello
from tests.engine.leader.test_fences import Pair


def test_pages_that_a_beat_proves_quiet_are_not_written_by_a_grant_that_comes_late() -> None:
    """Decode granted and ended, both words are late; its beat names the quarantined pages to a prefill that waits."""
    pair = Pair()
    pair.submit(1)
    pair.play(2.0)
    late: list[Any] = []
    room = pair.submit(2)
    pair.decode.answer()  # the idle step, so that it can grant
    pair.decode.gateway(Abort(room, "client"))
    for name, message in list(pair.decode.peer):
        if isinstance(message, Grant | End):
            late.append(message)
            pair.decode.peer.remove((name, message))
    assert [type(message) for message in late] == [Grant, End]
    assert pair.quarantined() == 3
    assert pair.prefill.leader.rooms.open[room].state == r.WAITING
    pair.play(1.0)
    assert pair.quarantined() == 0, "the beat asked, and prefill has not written"
    assert pair.prefill.ended[room].retryable
    pair.prefill.desk.from_peer("peer:d", late[0], pair.prefill.now)
    pair.play(1.0)
    assert not pair.prefill.leader.rooms.open
    assert pair.prefill.leader.counters["transfers"] == 1, "a late grant finds no room"


def test_a_grant_for_its_predecessor_is_not_taken_up() -> None:
    """Decode frees those pages once the predecessor is proven dead; it waits for nobody else's writes."""
    engine = Driven(role="prefill", instance=7)
    engine.desk.from_peer("peer:x", hello(), engine.now)
    engine.answer()
    room = engine.submit(1, 8, 4, peer="ipc://d")
    engine.desk.from_peer("peer:x", Grant(RoomId(1, 1), 8, 0, [5, 6], 6), engine.now)
    engine.desk.from_peer("peer:x", Beat("other", 1, 8, []), engine.now)
    assert engine.leader.rooms.open[room].state == r.WAITING
    assert sum(isinstance(message, Hello) for _, message in engine.peer) == 2, "it says again who it is"
    assert not [step for step in engine.steps if step.rows]
    engine.desk.from_peer("peer:x", Grant(RoomId(1, 1), 8, 0, [5, 6], 7), engine.now)
    assert [step for step in engine.steps if step.rows]


def test_a_successor_whose_hello_was_lost_is_asked_who_it_is() -> None:
    engine = Driven(role="decode", instance=8)
    engine.submit(1, 8, 4, peer="ipc://p")
    engine.desk.from_peer("ipc://p", hello("prefill"), engine.now)
    engine.desk.from_peer("ipc://p", Beat("other", 1, 8, []), engine.now)
    engine.peer.clear()
    engine.desk.from_peer("ipc://p", Beat("other", 2, 9, []), engine.now)
    assert [type(message) for _, message in engine.peer] == [Hello]
