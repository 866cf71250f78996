"""Links to peer engines: introduction, leases, beats, and what becomes of a peer's instance that is gone.

Decode dials, prefill answers. A link's life, on the decode side:

    dialled --Hello(theirs)--> named --Beat(theirs)--> up --silence for a lease--> dialled (rooms end, retryable)
       ^          ^  other fingerprint: refused (rooms end, both values named)       |
       |          +--Hello (it may have forgotten us)---------------------------------+
       +--Hello with another instance: the old one is gone, its rooms end ------------+

Decode says Hello with every beat until prefill's beats show that it knows us. Prefill's links are `up` from the first
Hello on. Whoever hears an instance it does not know says Hello. Every message may be lost, doubled or reordered: beats
list the open rooms and each side says again what the other seems to have missed.

An instance that is gone may still write for a moment. Its pages stay quarantined until both hold: a Hello says that its
epoch is ended and reaped (`ended_epoch`), and every own rank has dropped it (`Dropped`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...protocol import Beat, Dropped, End, Grant, Hello, Memory, Peer, Quiet, RoomId
from . import rooms as r
from .events import ArrivedNote, Dial, Hangup, SayArrived, SayPeer
from .link import DIALLED, NAMED, REFUSED, UP, Gone, Link
from .reach import TRANSFER
from .rooms import Room

if TYPE_CHECKING:
    from .core import Leader

ENDED_BY_DECODE = "decode has ended the room"
UNPROVEN_S = 60.0
UNPROVEN_SHARE = 8
"""Pages that may still be written by instances of which for so long nobody has said that they are dead are lost to this
epoch. From this part of the pool on (one in eight) another epoch, with memory of its own, is better."""
SILENT_S = 1.5
"""A peer of which nothing was heard for so long (three beats) may be out of reach: writers to it are not blamed yet."""


class Peers:
    """All links of a leader."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.links: dict[str, Link] = {}
        self.gone: dict[int, Gone] = {}
        self.known: dict[int, int] = {}
        """Instance met by the ranks (or about to be) -> number of the step that introduces it; 0: not yet issued."""
        self.leaving: dict[int, int] = {}
        """Instance that a step has dropped -> bit per rank that has not done so yet; it is met again after that."""
        self.dials = leader.config.role == "decode"

    # ------------------------------------------------------------------------------------------------------- saying

    def say_hello(self, link: Link) -> None:
        leader, config = self.leader, self.leader.config
        if leader.fingerprint is None:
            return
        link.said_at = leader.at
        memories = [m for m in leader.memories if m is not None]
        hello = Hello(
            config.engine,
            config.origin,
            config.role,
            config.epoch,
            config.instance,
            config.ended_epoch,
            leader.fingerprint,
            memories,
        )
        leader.out.append(SayPeer(link.name, hello))

    def say_end(self, link: Link, room: RoomId, reason: str, detail: str, retryable: bool) -> None:
        self.leader.out.append(
            SayPeer(link.name, End(room, self.leader.config.instance, reason, detail, retryable)),
        )

    def say_beat(self, link: Link) -> None:
        config = self.leader.config
        if not self.dials:
            for room in link.suspects:
                self.leader.fences.say(link, room)
        listed = [(room.id, self.beat_state(room)) for room in link.rooms.values()]
        beat = Beat(config.engine, config.epoch, config.instance, [x for x in listed if x[1]])
        self.leader.out.append(SayPeer(link.name, beat))

    def beat_state(self, room: Room) -> str:
        """How a room stands in this side's beat; empty: not listed."""
        if room.state == r.ENDED:
            if not self.dials:
                return "settling"
            return "quarantined" if room.writable else ""
        if self.dials:
            return room.state if room.state in (r.RESERVED, r.CHECKING) else ""
        return room.state

    # ------------------------------------------------------------------------------------------------------ hearing

    def dial(self, endpoint: str) -> Link:
        """The link to a prefill engine, opened at the first room that names it."""
        link = self.links.get(endpoint)
        if link is None:
            link = self.links[endpoint] = Link(endpoint, self.leader.at)
            self.leader.out.append(Dial(endpoint))
            self.say_hello(link)
        return link

    def hear(self, name: str, message: Hello | Grant | ArrivedNote | End | Quiet | Beat, at: float) -> None:
        """One message of a peer."""
        link = self.links.get(name)
        if isinstance(message, Hello):
            if link is None:
                if self.dials:
                    self.leader.stale("hello")
                    return
                link = self.links[name] = Link(name, at)
            self.hello(link, message, at)
            return
        if link is None or message.instance != link.instance or link.state == REFUSED:
            self.leader.stale(type(message).__name__.lower())
            if not self.dials and isinstance(message, (Grant, Beat)) and (link is None or link.state != REFUSED):
                if link is None:
                    self.say_hello(Link(name, at))  # it talks to a predecessor of ours: say who we are
                else:
                    self.say_hello(link)
            elif isinstance(message, Quiet) and not message.torn:
                self.leader.handover.quiet(message.room, message.instance)
            elif self.dials and isinstance(message, Beat) and link is not None:
                self.say_hello(link)  # of a successor, whose Hello was lost: ask again who it is
            return
        self.heard(link, at)
        if link.state == DIALLED and not self.dials:
            link.state = UP  # it had lapsed
        if isinstance(message, Beat):
            self.beat(link, message)
        elif isinstance(message, Grant):
            if self.dials:
                self.leader.stale("grant")
            else:
                self.leader.handover.grant(link, message, at)
        elif isinstance(message, ArrivedNote):
            self.leader.handover.arrived(link, message, at)
        elif isinstance(message, End):
            self.end(link, message)
        elif not message.torn:
            self.leader.handover.quiet(message.room, message.instance)
        elif self.dials:
            self.leader.fences.torn(link, message.room)
        else:
            self.leader.fences.answered(link, message.room)

    def heard(self, link: Link, at: float) -> None:
        if at - link.heard_at > SILENT_S:
            link.back_at = at
        link.heard_at = at

    def hello(self, link: Link, hello: Hello, at: float) -> None:
        """Learn who is there; meet it, refuse it, or see that its predecessor is gone."""
        leader = self.leader
        self.heard(link, at)
        if hello.origin == link.origin and hello.epoch < link.epoch:
            leader.stale("hello")  # of a predecessor, late
            return
        if link.instance and link.instance != hello.instance:
            self.replace(link)
        if not self.dials:
            for other in list(self.links.values()):
                if other is not link and other.origin == hello.origin and other.epoch < hello.epoch:
                    self.replace(other)
                    del self.links[other.name]
        self.reap(hello)
        link.engine, link.origin, link.epoch = hello.engine, hello.origin, hello.epoch
        why = self.mismatch(hello)
        if why:
            link.instance, link.state, link.why = hello.instance, REFUSED, why
            for room in list(link.rooms.values()):
                leader.end(room, r.PEER_END, "peer", why, retryable=False)
            if not self.dials:
                self.say_hello(link)
            return
        fresh = link.instance != hello.instance
        link.instance = hello.instance
        link.num_pages = min((memory.num_pages for memory in hello.memories), default=0)
        if self.dials:
            link.state = NAMED  # also where it was up: whoever says Hello may have forgotten us; its beat tells
        else:
            link.state = UP
        if not link.fence and (link.peer is None or link.peer.instance != hello.instance):
            link.peer = Peer(hello.engine, hello.instance, list[Memory](hello.memories))
            self.introduce(link)
        if self.dials:
            if fresh:
                self.say_hello(link)
        else:
            self.say_hello(link)
            self.say_beat(link)

    def mismatch(self, hello: Hello) -> str:
        """What keeps the two engines from pairing, with both values; empty: nothing."""
        mine = self.leader.fingerprint
        if mine is None:
            return "this engine is not ready"
        if hello.role != ("prefill" if self.dials else "decode"):
            return f"the peer's role is {hello.role}, this engine's {self.leader.config.role}"
        differ = [
            f"{name} is {getattr(mine, name)!r} here and {getattr(hello.fingerprint, name)!r} there"
            for name in mine.__struct_fields__
            if getattr(mine, name) != getattr(hello.fingerprint, name)
        ]
        return f"engines {self.leader.config.engine} and {hello.engine} differ: {'; '.join(differ)}" if differ else ""

    def beat(self, link: Link, beat: Beat) -> None:
        """Compare the peer's view of the rooms with ours and say again what it missed."""
        leader = self.leader
        if self.dials:
            if link.state != UP:
                link.state = UP
                self.unpark(link)
            theirs = {room for room, _ in beat.rooms}
            for room in link.rooms.values():
                if room.state == r.RESERVED and room.id not in theirs and leader.at > room.said_at + 0.2:
                    leader.scheduler.say_grant(room)
            return
        listed = dict(beat.rooms)
        for room in list(link.rooms.values()):
            state = listed.pop(room.id, "")
            if room.state == r.HANDED:
                if state == r.RESERVED:
                    leader.out.append(SayArrived(link.name, room.id, room.targets, room.cached))
                else:
                    leader.handover.acknowledge(room)
            elif room.state != r.ENDED and state != r.RESERVED:
                leader.end(room, r.PEER_END, "peer", ENDED_BY_DECODE, retryable=True, tell_peer=False)
        for room_id, state in listed.items():  # rooms that this side does not hold any more, or never did
            if state == "quarantined":
                waiting = leader.rooms.open.get(room_id)  # its grant is lost or still to come: it must find no room
                if waiting is not None:
                    leader.end(waiting, r.PEER_END, "peer", ENDED_BY_DECODE, retryable=True, tell_peer=False)
                leader.rooms.bury(room_id, "quiet")
                if room_id not in leader.rooms.closing:  # its writes are not settled: the next beat asks again
                    leader.handover.say_quiet(link.name, room_id)
            elif room_id in leader.rooms.tombs:
                self.say_end(link, room_id, "peer", "the room has ended here", True)

    def end(self, link: Link, message: End) -> None:
        """The room has ended there, so it does here."""
        leader = self.leader
        room = leader.rooms.open.get(message.room)
        if room is None:
            if message.room not in leader.rooms.tombs:
                leader.rooms.bury(message.room, r.PEER_END)
            if not self.dials and message.room not in leader.rooms.closing:
                leader.handover.say_quiet(link.name, message.room)
            return
        if room.instance and room.instance != message.instance:
            leader.stale("end")
            return
        if room.state == r.HANDED:
            leader.handover.acknowledge(room)
            return
        leader.end(room, r.PEER_END, message.reason, message.detail, message.retryable, tell_peer=False)
        if message.reason == TRANSFER:
            leader.reach.failed(link, message.detail)

    # ------------------------------------------------------------------------------------------- instances, parking

    def issued(self, n: int, meet: list[Peer], drop: list[int]) -> None:
        """Step `n` introduces and drops these."""
        for peer in meet:
            self.known[peer.instance] = n
        for instance in drop:
            self.known.pop(instance, None)
            self.leaving[instance] = self.leader.steps.all_ranks
            for link in self.links.values():
                if link.instance == instance and link.undropped:
                    link.fence_n = n

    def agreed(self, n: int) -> None:
        """Step `n` ran: whom it introduced may be granted pages."""
        for link in self.links.values():
            if not link.met and link.instance and 0 < self.known.get(link.instance, 0) <= n:
                link.met = True
                self.leader.fences.met(link)
                self.unpark(link)

    def introduce(self, link: Link) -> None:
        """The ranks are to know the link's instance; at once, or when they have dropped what they knew of it."""
        scheduler = self.leader.scheduler
        if link.instance in scheduler.drop:  # not issued: they know it still
            scheduler.drop.remove(link.instance)
        link.met = False  # until the next step is agreed
        if link.instance not in self.known and link.instance not in self.leaving:
            self.leader.fences.meet(link)

    def part(self, instance: int) -> bool:
        """The ranks are to forget the instance. False: they do not know it."""
        scheduler = self.leader.scheduler
        if instance not in self.known:
            return False
        if self.known[instance] == 0:  # nobody has been told yet
            scheduler.meet = [peer for peer in scheduler.meet if peer.instance != instance]
            del self.known[instance]
            return False
        if instance not in scheduler.drop:
            scheduler.drop.append(instance)
        return True

    def left(self, message: Dropped) -> None:
        """A rank has dropped an instance; when all have, it may be met again."""
        instance = message.instance
        if instance not in self.leaving:
            return
        self.leaving[instance] &= ~(1 << message.rank)
        if self.leaving[instance]:
            return
        del self.leaving[instance]
        for link in self.links.values():
            if link.instance == instance and link.peer is not None and not link.fence and instance not in self.known:
                self.introduce(link)

    def unpark(self, link: Link) -> None:
        if link.state == UP and link.met and self.dials:
            for room in link.rooms.values():
                if room.state == r.WAITING and room.id not in self.leader.scheduler.queue:
                    self.bind(room, link)

    def bind(self, room: Room, link: Link) -> None:
        """The pair stands: the room may be reserved for."""
        room.instance = link.instance
        self.leader.scheduler.enqueue(room, room.waiting_since)

    def replace(self, link: Link) -> None:
        """The link's instance is gone: its open rooms end, its quarantined pages wait for proof."""
        leader, instance = self.leader, link.instance
        gone = self.gone[instance] = Gone(link, leader.at)
        if link.undropped:  # a fence has ordered it
            gone.undropped = link.undropped
        elif self.part(instance):
            gone.undropped = leader.steps.all_ranks
        leader.fences.clear(link)
        for room in list(link.rooms.values()):
            if room.state == r.WAITING:
                leader.scheduler.queue.pop(room.id, None)
                room.instance = 0
            elif room.state != r.ENDED:
                leader.end(room, r.PEER_END, "peer", f"engine {link.engine} was replaced", True, tell_peer=False)
        for room in list(link.rooms.values()):
            if room.state == r.ENDED:
                gone.rooms[room.id] = room
                del link.rooms[room.id]
        self.proof(instance)
        link.state, link.instance, link.peer, link.met, link.failures = DIALLED, 0, None, False, 0
        link.worked = False

    def reap(self, hello: Hello) -> None:
        """A Hello proves that its engine's epochs up to `ended_epoch` are dead."""
        for instance in list(self.gone):
            gone = self.gone[instance]
            if gone.origin == hello.origin and gone.epoch <= hello.ended_epoch:
                gone.reaped = True
                self.proof(instance)

    def dropped(self, message: Dropped) -> None:
        self.left(message)
        gone = self.gone.get(message.instance)
        if gone is None:
            if not self.leader.fences.dropped(message):
                self.leader.stale("dropped")
            return
        gone.undropped &= ~(1 << message.rank)
        self.proof(message.instance)

    def proof(self, instance: int) -> None:
        gone = self.gone[instance]
        if gone.undropped or (gone.rooms and not gone.reaped):
            return
        for room in list(gone.rooms.values()):
            if room.writable:
                self.leader.handover.quiet(room.id, instance)
        del self.gone[instance]

    def forget(self, room: Room) -> None:
        """The room holds nothing any more."""
        link = self.links.get(room.link)
        if link is not None:
            link.rooms.pop(room.id, None)
        gone = self.gone.get(room.instance)
        if gone is not None:
            gone.rooms.pop(room.id, None)

    # -------------------------------------------------------------------------------------------------------- clock

    def tick(self, at: float) -> None:
        """Beats, repeated Hellos, leases."""
        config = self.leader.config
        if self.dials and self.gone and self.is_short_of_proof(at):
            return
        for link in list(self.links.values()):
            if link.state in (NAMED, UP) and at - link.heard_at > config.lease_s:
                self.lapse(link)
            if link.state in (DIALLED, NAMED) and self.dials:
                for room in list(link.rooms.values()):
                    if room.state == r.WAITING and not room.instance and at - room.waiting_since > config.lease_s:
                        detail = f"no engine answers at {link.name}"
                        self.leader.end(room, r.PEER_END, "peer", detail, retryable=True)
            if link.state == DIALLED and self.dials and link.rooms:
                self.say_hello(link)  # somebody waits: with every tick
            elif at - link.said_at >= config.beat_s:
                link.said_at = at
                if self.dials and link.state in (DIALLED, NAMED):
                    self.say_hello(link)
                elif self.dials and link.state == REFUSED:
                    if at - link.heard_at > config.lease_s:
                        self.say_hello(link)
                elif link.state == UP:
                    self.say_beat(link)
            gone = link.state == DIALLED or (link.state == REFUSED and at - link.heard_at > config.lease_s)
            if not self.dials and gone and not link.rooms and not link.fence:
                self.remove(link)
            elif self.dials and not link.rooms and not link.fence and at - link.heard_at > 12 * config.lease_s:
                self.leader.out.append(Hangup(link.name))
                del self.links[link.name]

    def is_short_of_proof(self, at: float) -> bool:
        """Engines that never come back, or come back with another origin, prove nothing of their last epoch."""
        lost = {
            gone.engine: sum(len(room.targets) for room in gone.rooms.values() if room.quarantined)
            for gone in self.gone.values()
            if not gone.reaped and not gone.undropped and at - gone.at > UNPROVEN_S
        }
        if sum(lost.values()) * UNPROVEN_SHARE > self.leader.pool.total:
            detail = f"{sum(lost.values())} pages may still be written by a former life of {', '.join(sorted(lost))}"
            self.leader.fault("unproven", f"{detail}, of which nobody has said that it is dead")
        return self.leader.state == "faulted"

    def lapse(self, link: Link) -> None:
        """Nothing heard for a lease: the open rooms of the pair end, retryable."""
        self.leader.counters["lapsed_links"] += 1
        detail = f"nothing heard of engine {link.engine} for {self.leader.config.lease_s} s"
        for room in list(link.rooms.values()):
            if room.state not in (r.ENDED, r.WAITING):
                self.leader.end(room, r.PEER_END, "peer", detail, retryable=True)
        link.state = DIALLED
        if self.dials:
            for room in link.rooms.values():
                if room.state == r.WAITING:
                    self.leader.scheduler.queue.pop(room.id, None)
                    room.instance = 0
                    room.waiting_since = self.leader.at

    def remove(self, link: Link) -> None:
        """Prefill: a link that lapsed and holds nothing any more."""
        self.part(link.instance)
        del self.links[link.name]
