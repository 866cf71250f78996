"""The hand-over of one room between a prefill and a decode engine: grant, sends, settlement, arrival, check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Check, Checked, Ended, Grant, Progress, Quiet, RoomId, Send
from . import rooms as r
from .events import ArrivedNote, ReleaseFirst, SayArrived, SayEnded, SayPeer, Settled
from .peers import SILENT_S
from .reach import TRANSFER
from .rooms import Room

if TYPE_CHECKING:
    from .core import Leader
    from .link import Link


class Transfer:
    """A `Send` that some rank has not settled."""

    __slots__ = ("at", "missing", "moved", "n", "room")

    def __init__(self, room: Room, n: int, ranks: int, at: float) -> None:
        self.room = room
        self.n = n
        """The step that orders it."""
        self.missing = (1 << ranks) - 1
        self.at = at
        self.moved = [at] * ranks
        """When each rank's part last advanced."""


class Handover:
    """Both sides; an engine uses the half of its role."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.transfers: dict[int, Transfer] = {}
        self.last_transfer = 0
        self.bad_rooms = 0
        self.checks_moved = [0.0] * leader.config.tp_size
        """When each rank's checks last advanced."""

    # ------------------------------------------------------------------------------------------------- prefill side

    def grant(self, link: Link, message: Grant, at: float) -> None:
        """Decode reserved pages: the room may be computed, at once or when its submit comes."""
        leader = self.leader
        if message.writer != leader.config.instance:
            leader.stale("grant")  # meant for a predecessor: its pages are freed when that is proven dead
            leader.peers.say_hello(link)
            return
        room = leader.rooms.open.get(message.room)
        if room is None:
            if message.room in leader.rooms.tombs:
                leader.stale("grant")
                leader.peers.say_end(link, message.room, "peer", "the room has ended here", True)
                if message.room not in leader.rooms.closing:
                    self.say_quiet(link.name, message.room)
                return
            room = Room(message.room, at)
            room.deadline = at + leader.config.promise_s
        elif room.instance:
            leader.stale("grant")  # said again: it is known
            return
        if not leader.rooms.move(room, r.GRANT):
            return
        room.link, room.instance = link.name, link.instance
        room.skip, room.targets = message.cached_pages, message.pages
        link.rooms[room.id] = room
        if room.state == r.QUEUED:
            self.queue(room, at)

    def queue(self, room: Room, at: float) -> None:
        """Both submit and grant are in: check that they fit together, then wait for pages."""
        size = self.leader.page_size
        pages = (room.length + size - 1) // size
        flaw = ""
        if not 0 <= room.skip < pages or len(room.targets) != pages - room.skip:
            flaw = f"granted {len(room.targets)} pages from page {room.skip} on for {pages} pages"
        elif min(room.targets) < 0 or max(room.targets) >= self.leader.peers.links[room.link].num_pages:
            flaw = "granted pages that the peer's pool does not have"
        elif len(dict.fromkeys(room.targets)) != len(room.targets):
            flaw = "granted a page twice"
        if flaw:
            self.leader.end(room, r.PEER_END, "peer", flaw, retryable=False)
        elif self.leader.peers.links[room.link].fence:
            room.waiting_since = at  # until the connection stands again
        else:
            self.leader.scheduler.enqueue(room, at)

    def send_finished(self, room: Room, last: bool, sends: list[Send]) -> None:
        """Add the pages that are whole after this step's rows (the last chunk: all) to the step's sends."""
        leader = self.leader
        done = len(room.pages) if last else room.planned // leader.page_size
        if done <= room.sent:
            return
        pairs = [(room.pages[i], room.targets[i - room.skip]) for i in range(room.sent, done)]
        room.sent = done
        self.last_transfer += 1
        self.transfers[self.last_transfer] = Transfer(room, leader.steps.last + 1, leader.config.tp_size, leader.at)
        room.unsettled += 1
        leader.counters["transfers"] += 1
        leader.counters["transfer_bytes"] += len(pairs) * leader.page_bytes
        sends.append(Send(self.last_transfer, room.id, room.instance, pairs))

    def settled(self, event: Settled) -> None:
        """A rank's part of a transfer has ended."""
        leader = self.leader
        transfer = self.transfers.get(event.transfer)
        bit = 1 << event.rank
        if transfer is None or not transfer.missing & bit:
            leader.stale("sent")
            return
        transfer.missing &= ~bit
        room = transfer.room
        if event.unsure:
            leader.fences.suspect(room)
        if event.error and room.state in (r.PREFILL, r.SENDING):
            detail = f"transfer {event.transfer} of rank {event.rank} failed: {event.error}"
            leader.counters["failed_transfers"] += 1
            leader.end(room, r.BAD, TRANSFER, detail, retryable=True)
            link = leader.peers.links.get(room.link)
            if link is not None and link.instance == room.instance:
                leader.reach.failed(link, detail)
                if leader.state == "faulted":
                    return
        if transfer.missing:
            return
        del self.transfers[event.transfer]
        room.unsettled -= 1
        if room.state == r.SENDING:
            self.hand(room)
        elif room.state == r.ENDED:
            leader.let_go(room)

    def hand(self, room: Room) -> None:
        """Say `Arrived` once every write is settled and the first token agreed."""
        leader = self.leader
        if room.unsettled or not room.first or not leader.rooms.move(room, r.SETTLED):
            return
        leader.retire(room)
        leader.counters["handed"] += 1
        leader.out.append(SayArrived(room.link, room.id, room.targets, room.cached))

    def acknowledge(self, room: Room) -> None:
        """Decode has the pages: the prefill side of the room is over."""
        leader = self.leader
        if leader.rooms.move(room, r.ACK):
            link = leader.peers.links.get(room.link)
            if link is not None:
                leader.reach.worked(link)
            leader.peers.forget(room)
            ended = Ended(room.id, "stop", "handed over", False, cached_tokens=room.cached)
            leader.out.append(SayEnded(room.gateway, ended))

    # -------------------------------------------------------------------------------------------------- decode side

    def arrived(self, link: Link, message: ArrivedNote, at: float) -> None:
        """Every write is settled; the first token goes out, the pages are checked before they are used."""
        leader = self.leader
        room = leader.rooms.open.get(message.room)
        if room is None or room.instance != message.instance:
            closing = leader.rooms.closing.get(message.room)
            if closing is not None and closing.writable and closing.instance == message.instance:
                self.quiet(message.room, message.instance)  # settled writes are proof, too
            else:
                leader.stale("arrived")
            return
        if not leader.rooms.move(room, r.ARRIVED):
            return
        leader.reach.worked(link)
        room.writable = False
        if message.flaw:
            leader.end(room, r.BAD, "peer", message.flaw, retryable=True)
            return
        room.sampled = room.emitted = 1
        room.planned = room.length
        room.cached = max(message.cached_tokens, room.skip * leader.page_size)
        leader.counters["cached_tokens"] += room.skip * leader.page_size
        if message.filled:
            room.hashes.append(message.filled)
        leader.counters["decode_tokens"] += 1
        leader.out.append(ReleaseFirst(room.id))
        if message.stop:
            leader.end(room, r.FINISH, "stop", "", retryable=False)
        elif room.max_new == 1:
            leader.end(room, r.FINISH, "length", "", retryable=False)
        else:
            room.check_at = at
            leader.scheduler.checks.append(room)

    def take_checks(self) -> list[Check]:
        """Checks for the next step; the shell fills in the sums."""
        rooms, self.leader.scheduler.checks = self.leader.scheduler.checks, []
        checks = []
        for room in rooms:
            if room.state == r.CHECKING:
                room.check_n = self.leader.steps.last + 1
                checks.append(Check(room.id, room.targets, []))
        return checks

    def checked(self, message: Checked) -> None:
        """A rank compared its shares of a room's pages."""
        leader = self.leader
        room = leader.rooms.open.get(message.room)
        if room is None or room.state != r.CHECKING:
            leader.stale("checked")
            return
        if message.bad:
            leader.counters["bad_shares"] += len(message.bad)
            self.bad_rooms += 1
            page, share = message.bad[0]
            detail = f"rank {message.rank}: {len(message.bad)} shares arrived damaged, first page {page} share {share}"
            leader.end(room, r.BAD, "peer", detail, retryable=True)
            if self.bad_rooms >= leader.config.bad_share_limit:
                leader.fault("bad_shares", f"{self.bad_rooms} rooms with damaged pages, last: {detail}", message.rank)
            return
        room.checked |= 1 << message.rank
        if room.checked != leader.steps.all_ranks:
            return
        leader.rooms.move(room, r.CHECKED)
        room.reported = room.length
        if leader.config.radix:
            leader.pool.publish(room.pages, room.hashes, room.length // leader.page_size)
        leader.scheduler.decoding[room.id] = room

    def quiet(self, room_id: RoomId, instance: int) -> None:
        """The writers of `instance` are proven quiet in a room's pages."""
        leader = self.leader
        room = leader.rooms.closing.get(room_id)
        if room is None or not room.writable or room.instance != instance:
            leader.stale("quiet")
            return
        room.writable = False
        leader.let_go(room)

    def say_quiet(self, name: str, room: RoomId) -> None:
        """Say what is proven of the writes into a room's pages."""
        leader = self.leader
        link = leader.peers.links.get(name)
        if link is not None and room in link.suspects:
            leader.fences.say(link, room)
        elif link is not None:
            leader.out.append(SayPeer(name, Quiet(room, leader.config.instance)))

    # ------------------------------------------------------------------------------------------------------- clock

    def advanced(self, message: Progress) -> None:
        """A rank's transfer thread got on with its work."""
        at = self.leader.at
        for number in message.moving:
            transfer = self.transfers.get(number)
            if transfer is not None:
                transfer.moved[message.rank] = at
        if message.checking:
            self.checks_moved[message.rank] = at

    def forgive(self, gap: float) -> None:
        """This process slept: nobody could be heard meanwhile."""
        for transfer in self.transfers.values():
            transfer.moved = [moved + gap for moved in transfer.moved]
        self.checks_moved = [moved + gap for moved in self.checks_moved]
        for room in self.leader.rooms.open.values():
            room.check_at += gap

    def tick(self, at: float) -> None:
        """A transfer or check that does not advance is a fault of this engine: its thread or connection is stuck."""
        config, links, expected = self.leader.config, self.leader.peers.links, self.leader.steps.expected
        for number, transfer in self.transfers.items():
            link = links.get(transfer.room.link)
            near = link is not None and link.instance == transfer.room.instance and at - link.heard_at <= SILENT_S
            limit = config.transfer_stall_s if near else config.transfer_deadline_s
            since = link.back_at if near and link is not None else transfer.at
            for rank, moved in enumerate(transfer.moved):
                if expected[rank] <= transfer.n:
                    transfer.moved[rank] = at  # it begins after its step, which has a deadline of its own
                elif transfer.missing >> rank & 1 and at - max(moved, since) > limit:
                    detail = f"rank {rank}: transfer {number} of room {transfer.room.id} has not advanced for {limit} s"
                    self.leader.fault("transfer_stuck", detail, rank)
                    return
        for room in self.leader.rooms.open.values():
            if room.state != r.CHECKING:
                continue
            if not room.check_n or min(expected) <= room.check_n:
                room.check_at = at
                continue
            for rank, moved in enumerate(self.checks_moved):
                if not room.checked >> rank & 1 and at - max(moved, room.check_at) > config.transfer_stall_s:
                    detail = (
                        f"rank {rank}: the check of room {room.id} has not advanced for {config.transfer_stall_s} s"
                    )
                    self.leader.fault("check_stuck", detail, rank)
                    return
