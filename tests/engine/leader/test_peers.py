"""Two leaders whose words to each other are lost or late."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.link import NAMED, UP
from closeranks.engine.leader.peers import UNPROVEN_SHARE
from closeranks.protocol import Abort, Attach, Beat, Dropped, End, Grant, Hello, Memory, RoomId
from tests.engine.leader.drive import FINGERPRINT, Driven
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


def of(origin: int, epoch: int, instance: int, role: str = "decode") -> Hello:
    return Hello(role, origin, role, epoch, instance, epoch - 1, FINGERPRINT, [Memory("shm", 0, [0], 16, 64, b"")])


def known(engine: Driven) -> set[int]:
    return {instance for instance, n in engine.leader.peers.known.items() if n}


def test_engines_of_one_name_are_two() -> None:
    """Two decode hosts, each in an epoch of its own counting."""
    engine = Driven(role="prefill")
    for _ in range(2):
        engine.desk.from_peer("peer:a", of(1, 1, 11), engine.now)
        engine.desk.from_peer("peer:b", of(2, 5, 22), engine.now)
        engine.run(3)
    assert {link.instance: link.state for link in engine.leader.peers.links.values()} == {11: UP, 22: UP}
    assert known(engine) == {11, 22}
    assert not engine.leader.peers.gone


def test_an_engine_that_has_lost_its_count_is_met() -> None:
    """Its run folder is gone: its epochs begin anew, and attest nothing of those before."""
    engine = Driven(role="decode", instance=8, max_running=4)
    room = engine.submit(1, 8, 4, peer="ipc://p")
    engine.desk.from_peer("ipc://p", of(1, 3, 33, "prefill"), engine.now)
    engine.answer()
    engine.desk.from_peer("ipc://p", Beat("prefill", 3, 33, []), engine.now)
    assert engine.leader.rooms.open[room].state == r.RESERVED
    engine.desk.from_peer("ipc://p", of(2, 1, 99, "prefill"), engine.now)
    engine.run(3)
    engine.rank(Dropped(1, 0, 33))
    link = engine.leader.peers.links["ipc://p"]
    assert (link.instance, link.epoch) == (99, 1)
    assert engine.ended[room].retryable
    assert engine.leader.pool.quarantined, "nobody said that instance 33 is dead"
    engine.desk.from_peer("ipc://p", of(1, 2, 32, "prefill"), engine.now)  # the count that is lost
    engine.desk.from_peer("ipc://p", of(1, 4, 34, "prefill"), engine.now)  # it was found again
    assert not engine.leader.pool.quarantined


def test_pages_that_nobody_vouches_for_end_the_epoch_when_they_are_many() -> None:
    engine = Driven(role="decode", instance=8, num_pages=20)
    engine.submit(1, 12, 4, peer="ipc://p")
    engine.desk.from_peer("ipc://p", of(1, 3, 33, "prefill"), engine.now)
    engine.answer()
    engine.desk.from_peer("ipc://p", Beat("prefill", 3, 33, []), engine.now)
    engine.desk.from_peer("ipc://p", of(2, 1, 99, "prefill"), engine.now)
    engine.run(3)
    assert len(engine.leader.pool.quarantined) > 20 // UNPROVEN_SHARE
    for _ in range(590):
        engine.tick(0.1)
        engine.run(1)
    assert not engine.faults
    engine.rank(Dropped(1, 0, 33))
    for _ in range(20):
        engine.tick(0.1)
        engine.run(1)
    assert [fault.name for fault in engine.faults] == ["unproven"]


def lapsed(engine: Driven) -> None:
    """Nothing is heard for a lease; ranks go on."""
    for _ in range(60):
        engine.tick(0.1)
        engine.run(1)


def test_a_peer_that_comes_back_before_the_ranks_were_told_to_drop_it_stays() -> None:
    engine = Driven(role="prefill", overlap=False)
    engine.desk.from_peer("peer:a", of(1, 1, 11), engine.now)
    engine.run(3)
    engine.tick(engine.config.lease_s + 1.5)  # a step is open all the time: the drop waits
    assert engine.leader.scheduler.drop == [11]
    engine.desk.from_peer("peer:a", of(1, 1, 11), engine.now)
    steps = [*engine.steps]
    while engine.steps:
        steps += engine.answer()
    assert not [step for step in steps if step.drop]
    assert known(engine) == {11}


def test_a_peer_that_comes_back_while_the_ranks_drop_it_is_met_again_after_that() -> None:
    engine = Driven(role="prefill")
    engine.desk.from_peer("peer:a", of(1, 1, 11), engine.now)
    engine.run(3)
    lapsed(engine)
    assert not engine.leader.peers.links
    assert not known(engine)
    engine.desk.from_peer("peer:a", of(1, 1, 11), engine.now)
    engine.run(3)
    assert not known(engine), "its connections are not closed yet"
    engine.rank(Dropped(1, 0, 11))
    engine.tick(1.5)
    engine.run(3)
    assert known(engine) == {11}


def test_no_room_waits_for_a_peer_that_fell_silent() -> None:
    """Neither one that is bound already, nor one for which pages are reserved after its peer said Hello again."""
    engine = Driven(role="decode", instance=8, num_pages=8, max_running=1)
    first = engine.submit(1, 20, 4, peer="ipc://p")
    engine.desk.from_peer("ipc://p", of(1, 1, 11, "prefill"), engine.now)
    engine.answer()
    engine.desk.from_peer("ipc://p", Beat("prefill", 1, 11, []), engine.now)
    second = engine.submit(2, 20, 4, peer="ipc://p")
    assert [engine.leader.rooms.open[room].state for room in (first, second)] == [r.RESERVED, r.WAITING]
    assert engine.leader.rooms.open[second].instance == 11
    engine.desk.from_peer("ipc://p", of(1, 1, 11, "prefill"), engine.now)
    assert engine.leader.peers.links["ipc://p"].state == NAMED
    for _ in range(120):
        engine.gateway(Attach("g"))
        engine.tick(0.1)
        engine.run(1)
    assert set(engine.ended) == {first, second}
    assert all(ended.retryable for ended in engine.ended.values())


def test_quiet_is_not_said_with_a_beat_of_a_room_that_is_still_written() -> None:
    pair = Pair()
    pair.holds = {(0, 1), (1, 1)}
    room = pair.submit(1)
    pair.play(1.0)
    pair.decode.gateway(Abort(room, "client"))
    pair.prefill.leader.peers.links["peer:d"].rooms.clear()  # as a link is that was made anew
    pair.play(1.0)
    assert room in pair.prefill.leader.rooms.closing
    assert pair.quarantined() == 3
