"""What lies in wait: a room is struck, or a message said again, when the room has reached a state drawn beforehand.

Chance alone seldom meets states that last a few milliseconds. Drawing the state, and waiting for it, makes every
(state, event) pair about as likely as any other.
"""

from collections.abc import Callable
from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.protocol import Abort, Drain, RankFault, RoomId, Submit

STATES = {
    "prefill": [r.WAITING, r.PROMISED, r.QUEUED, r.PREFILL, r.SENDING, r.HANDED, r.ENDED],
    "decode": [r.WAITING, r.RESERVED, r.CHECKING, r.RUNNING, r.ENDED],
    "both": [r.WAITING, r.PREFILL, r.RUNNING, r.ENDED],
}
ACTS = ["abort", "submit", "submit", "submit"]
BRUTAL_ACTS = ["fault"] * 6 + ["kill", "stall", "pause", "drain", "partition", "gateway"]
PATIENCE_S = 5.0
MOST = 12
"""So many may lie in wait at one engine."""


class Ambush:
    """Of one life of a leader."""

    def __init__(self, life: Any) -> None:
        self.life, self.world = life, life.world
        self.waiting: list[tuple[RoomId, str, float, Callable[..., None], tuple[Any, ...]]] = []

    def lay(self, room: RoomId, call: Callable[..., None], *args: Any, state: str = "") -> None:
        """`call(*args)` once the room has reached a state: this one, or one drawn now."""
        state = state or self.world.random.choice(STATES[self.life.engine.role])
        self.waiting = [*self.waiting[-MOST + 1 :], (room, state, self.world.now + PATIENCE_S, call, args)]

    def befall(self, gateway: str, submit: Submit) -> None:
        """Something drawn happens to the room of this submit."""
        random = self.world.random
        act = random.choice(BRUTAL_ACTS if random.random() < self.world.weather.brutal else ACTS)
        self.lay(submit.room, self.act, act, gateway, submit)

    def look(self) -> None:
        """The leader has handled something: whoever waited for this strikes next."""
        rooms, now = self.life.leader.rooms, self.world.now
        kept = []
        for entry in self.waiting:
            room, state, until, call, args = entry
            if rooms.state_of(room) == state:
                self.world.after(0.0, call, *args)
            elif now < until:
                kept.append(entry)
        self.waiting = kept

    def act(self, what: str, gateway: str, submit: Submit) -> None:
        life, random = self.life, self.world.random
        if not life.alive or not life.engine.network.restless:
            return
        seconds = random.choice([0.5, 3.0, 8.0])
        if not self.world.chosen(f"{what} {life.engine.name} when {submit.room} is there"):
            return
        if what == "abort":
            life.hear_gateway("operator", Abort(submit.room, "operator"))
        elif what == "submit":
            life.hear_gateway(gateway, submit)
        elif what == "fault":
            life.raise_in(random.randrange(len(life.ranks)), in_step=random.random() < 0.7)
        elif what == "kill":
            life.engine.kill()
        elif what == "stall":
            life.stall(random.randrange(len(life.ranks)), seconds)
        elif what == "pause":
            life.pause(seconds)
        elif what == "drain":
            life.drain()
        elif what == "partition":
            life.engine.network.isolate(life.engine, seconds)
        else:
            life.engine.network.cut_off(life.engine, seconds)


class Trap:
    """Set at the door of every leader: the next message of a kind finds it draining, faulted, stopped or dead."""

    def __init__(self, kind: str, act: str) -> None:
        self.kind, self.act = kind, act

    def spring(self, life: Any) -> None:
        random = life.world.random
        if self.act == "drain":
            life.hand(life.desk.from_gateway, ("operator", Drain()))
        elif self.act == "fault":
            rank = random.randrange(len(life.ranks))
            life.stall(rank, 10_000.0)
            life.hand(life.desk.from_rank, (RankFault(life.epoch, rank, "ValueError", "trapped", in_step=True),))
        elif self.act == "pause":
            life.pause(random.choice([0.3, 2.0, 7.0]))
        else:
            life.engine.kill()


TRAP_KINDS = [
    "joined", "sent", "checked", "dropped", "progress", "report", "rankfault", "drain", "hello", "grant", "arrived",
    "end", "quiet", "beat", "submit", "abort", "compiled",
    "arrived", "arrived", "arrived", "checked", "dropped", "drain", "compiled", "compiled",
]  # fmt: skip
TRAP_ACTS = ["drain"] * 5 + ["fault"] * 5 + ["pause", "kill"]
