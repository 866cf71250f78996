"""What must hold after every event, whatever happened."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.link import UP
from closeranks.protocol import Send
from tests.simulation.world import Violation


def after_event(leader: Leader, number: int) -> None:
    """Conservation always; users of every page now and then."""
    pool = leader.pool
    try:
        pool.check()
    except AssertionError as error:
        raise Violation(f"{leader.config.engine}: {error}") from error
    if number % 8:
        return
    users = [0] * pool.total
    for rooms in (leader.rooms.open, leader.rooms.closing):
        for room in rooms.values():
            for page in room.pages:
                users[page] += 1
            if room.quarantined:
                for page in room.targets:
                    if page not in pool.quarantined:
                        raise Violation(f"page {page} of {room.id} is not in quarantine")
    if users != pool.refs:
        raise Violation(f"{leader.config.engine}: users of pages {users} but counted {pool.refs}")
    slots = [
        room.slot for rooms in (leader.rooms.open, leader.rooms.closing) for room in rooms.values() if room.slot >= 0
    ]
    if sorted(slots + leader.scheduler.slots) != list(range(leader.config.max_running)):
        raise Violation(f"{leader.config.engine}: slots {slots} in use, {leader.scheduler.slots} free")
    for room in leader.rooms.open.values():
        if room.state in (r.WAITING, r.PROMISED, r.QUEUED, r.HANDED) and (room.pages or room.slot >= 0):
            raise Violation(f"{room.id} holds pages or a slot in state {room.state}")
    if leader.scheduler.alone != sum(
        room.alone for rooms in (leader.rooms.open, leader.rooms.closing) for room in rooms.values() if room.slot >= 0
    ):
        raise Violation("count of lone requests is wrong")


def rows(leader: Leader) -> None:
    """A lone request shares no open step with another; no row lies beyond a length stop."""
    for room in leader.steps.open[-1].rooms:
        if room.sampled > room.max_new:
            raise Violation(f"{room.id}: row {room.sampled} of at most {room.max_new}")
    rooms = {room.id: room for step in leader.steps.open for room in step.rooms}
    if len(rooms) > 1 and any(room.alone for room in rooms.values()):
        raise Violation(f"a lone request is open together with others: {[str(x) for x in rooms]}")


def may_write(target: Leader, life: Any, send: Send) -> None:
    """A page that is written to is the room's, granted to this writer, or in quarantine; nobody else's."""
    writer = life.instance
    if target.fingerprint != life.leader.fingerprint:
        raise Violation(f"{life.engine.name} writes to {target.config.engine}, whose fingerprint differs")
    for _, page in send.pages:
        if page in target.pool.quarantined:
            continue
        room = target.rooms.open.get(send.room)
        if room is None or page not in room.targets or room.instance != writer or not room.writable:
            raise Violation(f"instance {writer} writes page {page} of room {send.room}, which is in use or free")


def residue(leader: Leader, desk: object) -> None:
    """After the last request nothing is left."""
    name, pool, scheduler = leader.config.engine, leader.pool, leader.scheduler
    left = {
        "open rooms": [f"{x.id} {x.state}" for x in leader.rooms.open.values()],
        "closing rooms": [f"{x.id} busy {x.busy} unsettled {x.unsettled}" for x in leader.rooms.closing.values()],
        "owned pages": pool.owned,
        "quarantined pages": len(pool.quarantined),
        "queue": list(scheduler.queue),
        "prefilling": list(scheduler.prefilling),
        "decoding": list(scheduler.decoding),
        "used slots": leader.config.max_running - len(scheduler.slots),
        "lone": scheduler.alone,
        "transfers": list(leader.handover.transfers),
        "rooms of links": [list(link.rooms) for link in leader.peers.links.values() if link.rooms],
        "rooms of gone instances": [list(gone.rooms) for gone in leader.peers.gone.values() if gone.rooms],
        "entries of the book": list(desk.book.entries),  # type: ignore[attr-defined]
        "transfers of the book": list(desk.book.transfers),  # type: ignore[attr-defined]
        "fences": [link.name for link in leader.peers.links.values() if link.fence and link.state == UP],
        "users of grammars": [x.text for x in desk.grammars.known.values() if x.users],  # type: ignore[attr-defined]
        "latest": leader.rooms.latest,
    }
    found = {key: value for key, value in left.items() if value}
    if found:
        raise Violation(f"{name} has residue: {found}")
