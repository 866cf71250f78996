"""What must hold for one life of a leader: what it hears and says, held against what the simulation knows."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.link import DIALLED, NAMED, UP
from closeranks.engine.leader.rooms import Room
from closeranks.protocol import Abort, Checked, Ended, Output, RankFault, RoomId, Step, Submit
from tests.simulation import invariants
from tests.simulation.world import Violation

LOST_WORD_S = 4.0
"""A word that was said and lost must have been said again by then."""
ASLEEP_S = 1.0
LOSSY = 0.06
"""With more loss than that it may take any time."""
BAD_GRAMMAR = "cannot be compiled"
PASSED_OVER = 30
"""So many steps may pass over the oldest request before it has pages again."""
STARVED_S = 1.0
"""So long may running requests be without a step."""


class Witness:
    """Of one life."""

    def __init__(self, life: Any) -> None:
        self.life, self.name = life, life.engine.name
        self.ends: dict[RoomId, Ended] = {}
        self.damaged: set[RoomId] = set()
        """Rooms of which a page was changed on its way."""
        self.aborted: dict[RoomId, float] = {}
        self.bad_step = 0
        """Number of a step of which some rank reports another digest or too few tokens."""
        self.waits: dict[object, float] = {}
        """Room or link -> since when the two sides do not agree on it."""
        self.proven: dict[int, float] = {}
        """Dead instance -> since when nothing is waited for that could free its pages."""
        self.sound: dict[RoomId, int] = {}
        """Room -> bit per rank that found its pages sound."""
        self.passed_over = 0
        """Steps in a row without a row of the oldest running request."""
        self.computed_at = self.looked_at = life.world.now

    def before(self, message: Any) -> None:
        """A message (None: a tick) is about to reach the leader."""
        if type(message) is Checked:
            if not message.bad:
                self.sound[message.room] = self.sound.get(message.room, 0) | 1 << message.rank
            elif message.room not in self.damaged and self.life.leader.rooms.state_of(message.room) == r.CHECKING:
                raise Violation(f"{self.name}: pages of {message.room} came incomplete, and were said to be whole")
        elif type(message) is Abort:
            self.aborted[message.room] = self.life.world.now

    def after(self, message: Any) -> None:
        """The leader has answered."""
        life, leader = self.life, self.life.leader
        invariants.after_event(leader, life.world.events)
        if life.dying:
            if leader.state != "faulted":
                raise Violation(f"{self.name} goes on after its fault")
            return
        if type(message) is RankFault:
            raise Violation(f"{self.name} goes on after {message}")
        runs = type(message) is Checked and leader.rooms.state_of(message.room) == r.RUNNING
        if runs and self.sound.get(message.room) != leader.steps.all_ranks:
            raise Violation(f"{self.name} runs {message.room}, which not every rank has found sound")
        begun = type(message) is Submit and message.room in leader.rooms.open
        if begun and life.world.now - self.aborted.get(message.room, -9.0) < 5.0:
            raise Violation(f"{self.name} begins {message.room}, which was aborted before")
        if self.bad_step:
            opened = leader.steps.open
            if not opened or opened[0].n > self.bad_step:
                raise Violation(f"{self.name} settled step {self.bad_step}, on which its ranks do not agree")

    def said(self, message: Output) -> None:
        """The leader said this to a gateway."""
        for tokens in message.tokens:
            if tokens.room in self.ends:
                raise Violation(f"{self.name} sent tokens of {tokens.room} after its end")
            if self.life.engine.role == "prefill":
                raise Violation(f"{self.name} sent tokens of {tokens.room}")
        for ended in message.ended:
            if ended.room in self.ends:
                raise Violation(f"{self.name} ended {ended.room} twice: {self.ends[ended.room]}, {ended}")
            self.ends[ended.room] = ended
            if ended.reason == "invalid" and ended.detail != BAD_GRAMMAR:
                raise Violation(f"{self.name} calls {ended.room} invalid: {ended.detail}")

    def issued(self, step: Step) -> None:
        """A step goes out. The oldest running request takes part, or soon will: nobody younger holds what it needs."""
        if not step.rows:
            return
        self.computed_at = self.life.world.now
        leader = self.life.leader
        running = leader.scheduler.decoding
        if not running or leader.scheduler.alone:
            self.passed_over = 0
            return
        oldest = min(running.values(), key=lambda room: room.order)
        taking_part = any(room is oldest for room in leader.steps.open[-1].rooms)
        self.passed_over = 0 if taking_part or oldest.sampled >= oldest.max_new else self.passed_over + 1
        if self.passed_over > PASSED_OVER:
            raise Violation(f"{self.name}: {oldest.id}, the oldest, is passed over by {self.passed_over} steps")

    def look(self, now: float) -> None:
        """Now and then: what takes time to become wrong."""
        life, leader = self.life, self.life.leader
        asleep, self.looked_at = now - self.looked_at > ASLEEP_S, now
        if asleep or leader.state not in ("ready", "draining") or life.held or life.paused_until > now:
            self.waits, self.computed_at = {}, now  # nothing could be said or heard meanwhile
            return
        scheduler = leader.scheduler
        steps = leader.steps.open
        turning = steps and scheduler.turn()[0] != scheduler.group  # open steps end first; each has a deadline
        if any(step.rows for step in steps) or turning or len(scheduler.decoding) + len(scheduler.prefilling) < 2:
            self.computed_at = now
        elif now - self.computed_at > STARVED_S:
            raise Violation(f"{self.name}: {[str(x) for x in scheduler.decoding]} run without a step")
        for room in leader.rooms.open.values():
            grammar = life.desk.grammars.numbers.get(room.form)
            if room.form and (grammar is None or not grammar.pending):
                raise Violation(f"{self.name}: {room.id} waits for a grammar that is not being compiled")
        if leader.config.role != "both":
            self.look_at_peers()
            self.look_at_silence()
            self.look_at_the_gone(now)
            self.look_for_lost_words(now)

    def look_at_peers(self) -> None:
        """Whoever is paired fits."""
        lives = self.life.engine.network.lives
        for link in self.life.leader.peers.links.values():
            peer = lives.get(link.instance)
            if peer is not None and link.state in (NAMED, UP) and peer.fingerprint != self.life.fingerprint:
                raise Violation(f"{self.name} is paired with {peer.engine.name}, whose fingerprint differs")

    def look_at_silence(self) -> None:
        """No room waits for a peer of which nothing is heard, longer than a lease."""
        leader = self.life.leader
        for link in leader.peers.links.values():
            known = link.instance in leader.peers.known or link.instance in leader.peers.leaving
            if link.state == UP and not link.fence and not known:
                raise Violation(f"{self.name}: {link.name} is up, and its ranks are not to know it")
            for room in link.rooms.values():
                if room.state == r.WAITING and room.instance and link.state == DIALLED:
                    raise Violation(f"{self.name}: {room.id} is bound to {link.name}, which has fallen silent")
                since = link.heard_at if room.state == r.RESERVED else max(room.waiting_since, link.heard_at)
                waits = room.state == r.RESERVED or (room.state == r.WAITING and link.state != UP)
                if waits and leader.at - since > leader.config.lease_s + 1.5:
                    raise Violation(
                        f"{self.name}: {room.id} is {room.state} for {link.name}, of which nothing is heard"
                    )

    def look_at_the_gone(self, now: float) -> None:
        """An instance that is proven dead, and that every rank has dropped, holds no pages any more."""
        lives, proven = self.life.engine.network.lives, {}
        for instance, gone in self.life.leader.peers.gone.items():
            if not self.life.leader.peers.dials and lives[instance].alive:
                raise Violation(f"{self.name} takes {lives[instance].engine.name}, which lives, for replaced")
            if gone.reaped and not gone.undropped and any(room.writable for room in gone.rooms.values()):
                proven[instance] = self.proven.get(instance, now)
                if now - proven[instance] > 1.0:
                    raise Violation(f"{self.name}: pages of {gone.engine}'s epoch {gone.epoch} stay, though it is dead")
        self.proven = proven

    def look_for_lost_words(self, now: float) -> None:
        """What was said and lost is said again until it is heard, so the two sides of a room soon agree."""
        life, waits = self.life, dict[object, float]()
        if life.world.weather.loss > LOSSY:
            self.waits = waits
            return
        network, leader = life.engine.network, life.leader
        for room in (*leader.rooms.open.values(), *leader.rooms.closing.values()):
            if not room.instance or (room.state == r.ENDED and not room.quarantined):
                continue
            flaw = self.disagreement(room, network.lives.get(room.instance), now)
            if flaw:
                waits[room.id] = self.waits.get(room.id, now)
                if now - waits[room.id] > LOST_WORD_S:
                    raise Violation(f"{self.name}: {room.id} stays {room.state}, though {flaw}")
        for link in leader.peers.links.values():
            peer = network.lives.get(link.instance)
            if link.state == UP and not link.met and not link.fence and peer is not None and self.reaches(peer, now):
                waits[link.name, "met"] = self.waits.get((link.name, "met"), now)
                if now - waits[link.name, "met"] > LOST_WORD_S + leader.config.step_deadline_s:
                    raise Violation(f"{self.name} never introduces {link.name} to its ranks")
        for link in leader.peers.links.values() if leader.peers.dials else ():
            peer = network.engines[link.name].life
            other = (
                link.instance != peer.instance if link.state in (NAMED, UP) else link.state == DIALLED and link.rooms
            )
            if other and self.reaches(peer, now):
                waits[link.name] = self.waits.get(link.name, now)
                if now - waits[link.name] > LOST_WORD_S:
                    raise Violation(f"{self.name} does not know {link.name} as what it is")
        self.waits = waits

    def reaches(self, peer: Any, now: float) -> bool:
        """Does what this engine says reach that life of another, and is it heard?"""
        life = self.life
        if not peer.alive or peer.leader.state != "ready" or peer.held:
            return False
        return max(life.paused_until, peer.paused_until) <= now and not life.world.cut(self.name, peer.engine.name)

    def disagreement(self, room: Room, peer: Any, now: float) -> str:
        """What of the peer's part of a room this side should have heard by now."""
        life = self.life
        if peer is None:
            return ""
        if not peer.alive:
            dropped = all(peer.instance in ranks for ranks in life.transfers.dropped)
            successor = peer.engine.life
            met = any(x.state == UP and x.instance == successor.instance for x in life.leader.peers.links.values())
            told = successor.leader.config.origin == peer.leader.config.origin
            if room.state == r.ENDED and told and dropped and met and self.reaches(successor, now):
                return "its writer is dead and dropped"
            return ""
        fences = [x.fence for x in life.leader.peers.links.values() if x.instance == peer.instance]
        fences += [x.fence for x in peer.leader.peers.links.values() if x.instance == life.instance]
        if any(fences) or not self.reaches(peer, now):
            return ""
        rooms = peer.leader.rooms
        there = rooms.open[room.id].state if room.id in rooms.open else ""
        if life.engine.role == "decode":
            if room.state == r.RESERVED and there == r.HANDED:
                return "its pages have arrived"
            if room.state == r.RESERVED and not there:
                return "nobody fills its pages"
            if room.state == r.ENDED and not there and room.id not in rooms.closing:
                return "nobody writes to its pages"
        elif room.state != r.ENDED and there != r.RESERVED:
            return "nobody waits for its pages"
        return ""
