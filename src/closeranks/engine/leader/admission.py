"""Who is let in: a submit is admitted, refused with the reason, or ended at once because a tombstone waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Compiled, Ended
from . import rooms as r
from .events import SayEnded, Submitted
from .link import REFUSED, UP
from .rooms import Room

if TYPE_CHECKING:
    from .core import Leader


class Admission:
    """Turns submits into rooms."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader

    def submitted(self, event: Submitted) -> None:
        """Admit, refuse, or end at once what a tombstone waits for."""
        self.leader.gateways[event.gateway] = self.leader.at
        rooms, known = self.leader.rooms, self.leader.rooms.open.get(event.room)
        if known is not None and known.gateway:
            self.leader.stale("submit")  # doubled
            return
        if event.room in rooms.tombs:
            why = rooms.tombs[event.room]
            if why == r.TOLD:
                self.leader.stale("submit")  # doubled, after its end
                return
            self.refuse(
                event, "abort" if why == r.ABORT else "peer", f"ended before its submit ({why})", why != r.ABORT
            )
            return
        earlier = rooms.latest.get(event.room.id)
        if earlier is not None and earlier != event.room:
            if earlier.generation > event.room.generation:
                self.refuse(event, "abort", f"attempt {earlier.generation} is under way", False)
                return
            detail = f"superseded by attempt {event.room.generation}"
            self.leader.end(rooms.open[earlier], r.ABORT, "abort", detail, retryable=False)
        reason, detail, retryable, after = self.flaw(event)
        if reason:
            if known is not None:
                self.leader.end(known, r.ABORT, reason, detail, retryable)
            self.refuse(event, reason, detail, retryable, after)
            return
        self.leader.counters["requests"] += 1
        room = known or Room(event.room, self.leader.at)
        room.gateway, room.rid, room.alone = event.gateway, event.rid, event.alone
        room.length, room.max_new, room.hashes = event.length, event.max_new, list(event.hashes)
        room.form = event.form
        room.deadline = self.leader.at + event.deadline_s
        room.waiting_since = self.leader.at
        rooms.move(room, r.SUBMIT)
        if self.leader.config.role == "both":
            self.leader.scheduler.enqueue(room, self.leader.at)
        elif self.leader.config.role == "prefill":
            if room.state == r.QUEUED:
                self.leader.handover.queue(room, self.leader.at)
        else:
            link = self.leader.peers.dial(event.peer)
            room.link = link.name
            link.rooms[room.id] = room
            if link.state == REFUSED:
                self.leader.end(room, r.PEER_END, "peer", link.why, retryable=False)
            elif link.state == UP and link.met:
                self.leader.peers.bind(room, link)

    def compiled(self, message: Compiled) -> None:
        """A grammar is there: who waits for it may be scheduled, or ends with what is wrong with it."""
        for room in list(self.leader.rooms.open.values()):
            if room.form and room.form == message.number:
                room.form = 0
                if message.error:
                    self.leader.end(room, r.ABORT, "invalid", message.error, retryable=False)
        self.leader.scheduler.blocked_at = -1

    def flaw(self, event: Submitted) -> tuple[str, str, bool, float]:
        """(reason, detail, retryable, retry after s) for which a submit is refused; reason empty: it is not."""
        if event.flaw:
            return "invalid", event.flaw, False, 0.0
        if self.leader.state != "ready":
            return "unready", f"the engine is {self.leader.state}", True, 1.0
        if len(self.leader.rooms.open) - self.leader.occupied() >= self.leader.config.max_waiting:
            return "busy", f"{self.leader.config.max_waiting} requests are waiting", True, 1.0
        if event.length < 1 or event.max_new < 1:
            return "invalid", f"{event.length} tokens and {event.max_new} new ones: both must be at least 1", False, 0.0
        most, wanted = self.leader.max_request_tokens, event.length + event.max_new
        if self.leader.config.role == "prefill":
            wanted = event.length
        if wanted > most:
            return "invalid", f"the request may need {wanted} tokens, the engine holds at most {most}", False, 0.0
        pair = self.leader.config.role != "both"
        if pair != bool(event.peer):
            wrong = "needs the endpoint of its peer" if pair else "works without a peer"
            return "invalid", f"an engine of role {self.leader.config.role} {wrong}", False, 0.0
        return "", "", False, 0.0

    def refuse(self, event: Submitted, reason: str, detail: str, retryable: bool, after: float = 0.0) -> None:
        """End a room that never began here; the pair's other side is told if it is known."""
        self.leader.rooms.bury(event.room, r.TOLD)
        self.leader.out.append(SayEnded(event.gateway, Ended(event.room, reason, detail, retryable, after)))
        link = self.leader.peers.links.get(event.peer)
        if link is not None and link.state == UP:
            self.leader.peers.say_end(link, event.room, reason, detail, retryable)
