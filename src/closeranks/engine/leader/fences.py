"""After a write failed: both sides close their connections before its pages are used again, then they connect anew.

A backend that reports a failure may be wrong about its own end: bytes of the write may be under way, or follow. Only
closed connections prove that they do not: the writers' first, for what they might still send, then the targets', for
what is on its way. Until then the pages stay in decode's quarantine, prefill sends nothing to that engine, and what it
was sending ends retryable. Everything else goes on.

    prefill                                               decode
    "" --a rank's `Sent` is unsure--> closing             its room has ended, pages in quarantine
       (drop ordered of the ranks; rooms end)
    closing --all ranks Dropped--> closed
       --Quiet(torn), with every beat-->                  "" --> closing (drop ordered of the ranks)
                                                          closing --all ranks Dropped--> meeting: pages free
    closed <--Quiet(torn) for each room--                 meeting --they have met again--> ""
    closed --all answered--> "" (meet ordered, granted rooms go on)

A rank that has not dropped within `transfer_stall_s` in which its transfer thread did not advance is a fault: the end
of its process is the other proof. An instance that is replaced meanwhile takes its fence with it (`Peers.replace`).
Prefill keeps the fence of a decode engine that is not heard again, since no silence proves that its pages were freed:
one link without rooms, until that engine or its successor says Hello.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Dropped, Quiet, RoomId
from . import rooms as r
from .events import SayPeer
from .rooms import Room

if TYPE_CHECKING:
    from .core import Leader
    from .link import Link

CLOSING = "closing"
CLOSED = "closed"
MEETING = "meeting"


class Fences:
    """Both sides; an engine uses the half of its role."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader

    # ------------------------------------------------------------------------------------------------- prefill side

    def suspect(self, room: Room) -> None:
        """A write into the room's pages failed after it had begun."""
        leader = self.leader
        link = leader.peers.links.get(room.link)
        if link is None or link.instance != room.instance:
            return  # the target's pages died with their instance
        leader.counters["torn_writes"] += 1
        link.suspects[room.id] = None
        if link.fence:
            return
        self.close(link)
        for other in list(link.rooms.values()):
            leader.scheduler.queue.pop(other.id, None)
            if other is not room and other.state in (r.PREFILL, r.SENDING):
                detail = f"the connection to engine {link.engine} broke"
                leader.end(other, r.BAD, "peer", detail, retryable=True)
        leader.scheduler.blocked_at = -1

    def say(self, link: Link, room: RoomId) -> None:
        """What is known of a room with a failed write: nothing before the own ranks have closed their connections."""
        if link.fence == CLOSED:
            self.leader.out.append(SayPeer(link.name, Quiet(room, self.leader.config.instance, True)))

    def answered(self, link: Link, room: RoomId) -> None:
        """Decode's ranks have closed and met again: its pages are free; after the last room the pair goes on."""
        leader = self.leader
        if link.fence != CLOSED or link.suspects.pop(room, 0) is not None:
            leader.stale("quiet")
            return
        if link.suspects:
            return
        link.fence = ""
        self.meet(link)
        for waiting in link.rooms.values():
            if waiting.state == r.QUEUED:
                leader.scheduler.enqueue(waiting, waiting.waiting_since)

    # -------------------------------------------------------------------------------------------------- decode side

    def torn(self, link: Link, room_id: RoomId) -> None:
        """Prefill's ranks have closed their connections after a write into this room's pages had failed."""
        leader = self.leader
        room = leader.rooms.open.get(room_id)
        if room is not None and room.state == r.RESERVED and room.instance == link.instance:
            leader.end(room, r.PEER_END, "peer", "a write to its pages failed", True, tell_peer=False)
        closing = leader.rooms.closing.get(room_id)
        if closing is not None and closing.writable and closing.instance == link.instance:
            link.suspects[room_id] = None
            if not link.fence:
                self.close(link)
                link.met = False
        elif not link.fence:
            leader.out.append(SayPeer(link.name, Quiet(room_id, leader.config.instance, True)))

    # ------------------------------------------------------------------------------------------------------ both sides

    def close(self, link: Link) -> None:
        leader = self.leader
        link.fence, link.fence_at, link.fence_n = CLOSING, leader.at, 0
        link.undropped = leader.steps.all_ranks
        leader.peers.known.pop(link.instance, None)
        leader.scheduler.drop.append(link.instance)

    def dropped(self, message: Dropped) -> bool:
        """A rank closed its connection. False: no fence waits for it."""
        leader = self.leader
        for link in leader.peers.links.values():
            if link.fence == CLOSING and link.instance == message.instance:
                break
        else:
            return False
        link.undropped &= ~(1 << message.rank)
        if link.undropped:
            return True
        if not leader.peers.dials:
            link.fence = CLOSED
            for room in link.suspects:
                self.say(link, room)
            return True
        link.fence = MEETING
        for room in list(link.suspects):
            leader.handover.quiet(room, link.instance)
        self.meet(link)
        return True

    def meet(self, link: Link) -> None:
        assert link.peer is not None
        self.leader.peers.known[link.instance] = 0
        self.leader.scheduler.meet.append(link.peer)

    def met(self, link: Link) -> None:
        """Decode: the step that introduces the peer again is agreed."""
        if link.fence != MEETING:
            return
        link.fence = ""
        suspects, link.suspects = link.suspects, {}
        for room in suspects:
            self.leader.out.append(SayPeer(link.name, Quiet(room, self.leader.config.instance, True)))

    def advanced(self, rank: int) -> None:
        """A rank's transfer thread got on with work that the drop waits for."""
        for link in self.leader.peers.links.values():
            if link.undropped >> rank & 1:
                link.fence_at = self.leader.at

    def forgive(self, gap: float) -> None:
        for link in self.leader.peers.links.values():
            link.fence_at += gap

    def clear(self, link: Link) -> None:
        """The link's instance is gone."""
        link.suspects, link.fence, link.undropped = {}, "", 0

    def tick(self, at: float) -> None:
        """A rank that cannot close its connection ends its epoch."""
        leader = self.leader
        limit = leader.config.transfer_stall_s
        for link in leader.peers.links.values():
            if link.fence != CLOSING:
                continue
            if not link.fence_n or min(leader.steps.expected) <= link.fence_n:
                link.fence_at = at  # its step has a deadline of its own
            elif at - link.fence_at > limit:
                rank = (link.undropped & -link.undropped).bit_length() - 1
                detail = f"rank {rank} has not closed its connection to engine {link.engine} within {limit} s"
                leader.fault("fence_stuck", detail, rank)
                return
