"""Breaches between the engines of a pair: grants, transfers, arrival, quarantine, links."""

from typing import Any

import msgspec

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.desk import Desk
from closeranks.engine.leader.fences import CLOSED, Fences
from closeranks.engine.leader.handover import Handover
from closeranks.engine.leader.link import UP
from closeranks.engine.leader.peers import Peers
from closeranks.engine.leader.scheduler import Scheduler
from tests.simulation.breaches.breach import Breach

LET_GO, PROOF, PEERS_TICK, BEAT, LINK_END = Leader.let_go, Peers.proof, Peers.tick, Peers.beat, Peers.end
SETTLED, CHECKED, GRANT, HAND, QUIET = (
    Handover.settled,
    Handover.checked,
    Handover.grant,
    Handover.hand,
    Handover.quiet,
)
ARRIVED, HELLO, REPLACE, HOLD, DESK_PEER = Handover.arrived, Peers.hello, Peers.replace, Scheduler.hold, Desk.from_peer
SAY_END, SEND_FINISHED = Peers.say_end, Handover.send_finished
SAY_TORN, TORN = Fences.say, Fences.torn


def grants_reordered(self: Handover, link: Any, message: Any, at: float) -> None:
    GRANT(self, link, message, at)
    room = self.leader.rooms.open.get(message.room)
    if room is not None and room.state == r.QUEUED:
        room.targets = room.targets[::-1]


def settlements_in_order(self: Handover, event: Any) -> None:
    for number, transfer in self.transfers.items():
        if transfer.missing >> event.rank & 1:
            SETTLED(self, type(event)(event.at, event.epoch, event.rank, number, event.error))
            return


def settled_by_one_rank(self: Handover, event: Any) -> None:
    transfer = self.transfers.get(event.transfer)
    if transfer is not None and transfer.missing >> event.rank & 1:
        transfer.missing = 1 << event.rank
    SETTLED(self, event)


def failures_count_as_done(self: Handover, event: Any) -> None:
    SETTLED(self, type(event)(event.at, event.epoch, event.rank, event.transfer, ""))


def arrival_before_the_last_write(self: Handover, room: Any) -> None:
    if room.first and room.sent and room.unsettled <= 1:
        unsettled, room.unsettled = room.unsettled, 0
        HAND(self, room)
        room.unsettled = unsettled


def sources_reused_before_settled(self: Leader, room: Any) -> None:
    unsettled, room.unsettled = room.unsettled, 0
    LET_GO(self, room)
    room.unsettled = unsettled


def no_quarantine(self: Leader, room: Any) -> None:
    room.writable = False
    LET_GO(self, room)


def quarantine_ends_by_time(self: Peers, at: float) -> None:
    PEERS_TICK(self, at)
    for room in list(self.leader.rooms.closing.values()):
        if room.quarantined and at - room.said_at > 1.0:
            self.leader.handover.quiet(room.id, room.instance)


def failures_are_quiet(self: Fences, room: Any) -> None:
    return None


def torn_before_closed(self: Fences, link: Any, room: Any) -> None:
    fence, link.fence = link.fence, CLOSED
    SAY_TORN(self, link, room)
    link.fence = fence


def torn_is_quiet(self: Fences, link: Any, room_id: Any) -> None:
    if room_id in self.leader.rooms.closing:
        self.leader.handover.quiet(room_id, link.instance)
    TORN(self, link, room_id)


def quiet_of_anybody(self: Handover, room_id: Any, instance: int) -> None:
    room = self.leader.rooms.closing.get(room_id)
    QUIET(self, room_id, room.instance if room is not None else instance)


def quiet_said_too_early(self: Peers, link: Any, message: Any) -> None:
    LINK_END(self, link, message)
    if not self.dials:
        self.leader.handover.say_quiet(link.name, message.room)


def proof_without_drop(self: Peers, instance: int) -> None:
    self.gone[instance].undropped = 0
    PROOF(self, instance)


def quarantine_for_good(self: Peers, instance: int) -> None:
    if not self.gone[instance].rooms:
        PROOF(self, instance)


def same_address_same_peer(self: Peers, link: Any, hello: Any, at: float) -> None:
    if link.instance and link.instance != hello.instance:
        link.heard_at = at
        link.state = UP if not self.dials else link.state
        return
    HELLO(self, link, hello, at)


def epochs_of_a_name(self: Peers, link: Any, hello: Any, at: float) -> None:
    HELLO(self, link, msgspec.structs.replace(hello, origin=sum(hello.engine.encode())), at)


def beats_unread(self: Peers, link: Any, beat: Any) -> None:
    if self.dials and link.state != UP:
        BEAT(self, link, beat)


def silence_is_golden(self: Peers, link: Any) -> None:
    link.heard_at = self.leader.at


def ends_are_not_passed_on(self: Peers, link: Any, room: Any, *args: Any) -> None:
    return None


def any_fingerprint(self: Peers, hello: Any) -> str:
    return ""


def damage_ignored(self: Handover, message: Any) -> None:
    CHECKED(self, type(message)(message.epoch, message.rank, message.room, []))


def checked_by_one_rank(self: Handover, message: Any) -> None:
    room = self.leader.rooms.open.get(message.room)
    if room is not None and not message.bad:
        room.checked = self.leader.steps.all_ranks
    CHECKED(self, message)


def unchecked_pages_run(self: Handover, link: Any, message: Any, at: float) -> None:
    ARRIVED(self, link, message, at)
    room = self.leader.rooms.open.get(message.room)
    if room is not None and room.state == r.CHECKING and room in self.leader.scheduler.checks:
        self.leader.scheduler.checks.remove(room)
        self.leader.rooms.move(room, r.CHECKED)
        room.reported = room.length
        self.leader.scheduler.decoding[room.id] = room


def last_page_not_sent(self: Handover, room: Any, last: bool, sends: list[Any]) -> None:
    SEND_FINISHED(self, room, False, sends)


def nobody_is_stuck(self: Handover, at: float) -> None:
    return None


def grant_before_reservation(self: Scheduler, room: Any) -> bool:
    if self.leader.config.role == "decode" and not room.writable:
        self.leader.pool.freed += 1
    held = HOLD(self, room)
    if not held and self.leader.config.role == "decode" and len(room.pages) == 0:
        size = self.leader.page_size
        part = self.leader.pool.take(min(self.leader.pool.available, (room.length + size) // size))
        room.pages = part or []
    return held


BREACHES = [
    Breach("pages are written in another order than granted", "law 4, M3", Handover, "grant", grants_reordered),
    Breach("a settlement counts for the oldest transfer", "law 3, M4", Handover, "settled", settlements_in_order),
    Breach("pages run when one rank has checked them", "law 4, M10", Handover, "checked", checked_by_one_rank),
    Breach("arrival is said before the last write", "law 3, M11", Handover, "hand", arrival_before_the_last_write),
    Breach("beats are not read", "law 3, M13", Peers, "beat", beats_unread),
    Breach("a transfer is settled by one rank", "law 4, M14", Handover, "settled", settled_by_one_rank),
    Breach("a failed transfer counts as done", "law 4, M14", Handover, "settled", failures_count_as_done),
    Breach(
        "source pages are reused before the sends settle", "law 4, M14", Leader, "let_go", sources_reused_before_settled
    ),
    Breach("granted pages of an ended room are free at once", "law 4, M14", Leader, "let_go", no_quarantine),
    Breach("a failed write is taken to be quiet", "law 4, M14", Fences, "suspect", failures_are_quiet),
    Breach(
        "pages of a failed write are free before the writers closed", "law 4, M14", Fences, "say", torn_before_closed
    ),
    Breach("pages of a failed write are free before the targets closed", "law 4, M14", Fences, "torn", torn_is_quiet),
    Breach("quarantine ends after a second", "law 4, law 7, M14", Peers, "tick", quarantine_ends_by_time),
    Breach("quiet is said before the writes settle", "law 4, M14", Peers, "end", quiet_said_too_early),
    Breach("half a reservation is kept while waiting", "law 3, M16", Scheduler, "hold", grant_before_reservation),
    Breach("a dead writer is quiet before it is dropped", "law 4, M18", Peers, "proof", proof_without_drop),
    Breach("pages of a replaced peer never come back", "law 4, M18", Peers, "proof", quarantine_for_good),
    Breach("a peer under the same address is the same", "law 3, M18", Peers, "hello", same_address_same_peer),
    Breach("engines of one name are one engine", "law 3, M18", Peers, "hello", epochs_of_a_name),
    Breach("engines of other weights are peers", "law 4, M18", Peers, "mismatch", any_fingerprint),
    Breach("a stuck transfer is waited for", "law 2, M19", Handover, "tick", nobody_is_stuck),
    Breach("damaged pages are used", "law 4, M21", Handover, "checked", damage_ignored),
    Breach("pages are used unchecked", "law 4, M21", Handover, "arrived", unchecked_pages_run),
    Breach("the partial last page is not sent", "law 4, M21", Handover, "send_finished", last_page_not_sent),
]
