"""What must hold for one life of a leader: what it hears and says, held against what the simulation knows."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.protocol import Abort, Checked, Ended, Output, RankFault, RoomId, Submit
from tests.simulation import invariants
from tests.simulation.world import Violation

LOST_WORD_S = 6.0
"""A word that was said and lost must have been said again by then."""


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
        self.waits: dict[RoomId, float] = {}
        """Quarantined room -> since when its writer is done with it."""

    def before(self, message: Any) -> None:
        """A message (None: a tick) is about to reach the leader."""
        if type(message) is Checked and message.bad and message.room not in self.damaged:
            if self.life.leader.rooms.state_of(message.room) == r.CHECKING:
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
            if ended.reason == "invalid":
                raise Violation(f"{self.name} calls {ended.room} invalid: {ended.detail}")

    def look_for_lost_words(self, now: float) -> None:
        """A writer that is done with a room says so, and again until it is heard."""
        life = self.life
        lives, waits = life.engine.network.lives, {}
        for room in life.leader.rooms.closing.values():
            writer = lives.get(room.instance)
            if not room.quarantined or writer is None or not writer.alive or writer.leader.state != "ready":
                continue
            rooms, names = writer.leader.rooms, (life.engine.name, writer.engine.name)
            known = room.id in rooms.open or room.id in rooms.closing
            if not known and not life.world.cut(*names) and max(life.paused_until, writer.paused_until) < now:
                waits[room.id] = self.waits.get(room.id, now)
                if now - waits[room.id] > LOST_WORD_S:
                    raise Violation(f"{life.engine.name}: {room.id} stays in quarantine, though nobody writes to it")
        self.waits = waits
