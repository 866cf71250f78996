"""Engines, gateways and who may talk to whom."""

from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.protocol import Abort, End, Output, RoomId, Submit
from tests.simulation.ambush import Trap
from tests.simulation.attempts import state_of
from tests.simulation.coverage import Coverage
from tests.simulation.engines import Engine
from tests.simulation.gateway import Gateway
from tests.simulation.life import Life
from tests.simulation.world import World

SILENT_S = 3.6
"""A word so late finds its request after seconds without any other."""


class Network:
    """Between engines messages are lost, doubled and overtake each other; between a gateway and an engine they keep
    their order, and what is lost is lost with the connection, of whose break the gateway hears (as with ZeroMQ), or
    while the link is cut or leaks, of which nobody hears.
    """

    def __init__(self, world: World, coverage: Coverage | None) -> None:
        self.world = world
        self.coverage = coverage
        self.lives: dict[int, Life] = {}
        self.identities: dict[str, Life] = {}
        self.engines: dict[str, Engine] = {}
        self.gateways: dict[str, Gateway] = {}
        self.pairs: list[tuple[str, str]] = []
        self.namesakes = world.random.random() < 0.6
        """Engines of a role have one name, as two hosts' have."""
        self.restless = not world.calm
        """Engines may fail at their start."""
        self.cuts: dict[tuple[str, str], float] = {}
        """(engine, "to" or "from" it) -> time until which nothing passes between it and the gateways that way."""
        self.thin: dict[str, float] = {}
        """Engine -> time until which most of what it says to gateways is lost."""
        self.fates: dict[RoomId, list[float]] = {}
        """Room -> what becomes of its next words to the gateway: that late, (0) lost, or (-1) all others, too."""
        self.trap: Trap | None = None
        self.poisons = 0
        """Poisonous requests so far."""
        self.unlucky: set[int] = set()
        """Requests that were charged for what was not a poisonous request's doing."""

    def add(self, name: str, role: str, num_pages: int, **config: Any) -> None:
        self.engines[name] = Engine(self, name, role, num_pages, **config)

    def route_peer(self, life: Life, link: str, message: Any) -> None:
        """Decode's links are endpoints, prefill's are identities."""
        if life.engine.role == "decode":
            engine = self.engines[link]
            self.echo(engine.life, life.identity, message)
            self.world.unreliable((life.engine.name, link), self.at_prefill, engine, life.identity, message)
        else:
            other = self.identities.get(link)
            if other is not None:
                if self.wait_until_it_runs(other, life.engine.name, message):
                    return
                self.echo(other, life.engine.name, message)
                ends = (other.engine.name, life.engine.name)
                self.world.unreliable(ends, other.hear_peer, life.engine.name, message)

    def echo(self, life: Life, link: str, message: Any) -> None:
        """A message that names a room is said again when the room has come further."""
        world, room = self.world, getattr(message, "room", None)
        if room is not None and life.engine.role == "prefill":
            life.engine.late[type(message).__name__] = (link, message)
        if room is not None and self.restless and world.random.random() < world.weather.echo:
            life.ambush.lay(room, life.hear_peer, link, message)

    def wait_until_it_runs(self, life: Life, link: str, message: Any) -> bool:
        """Prefill's end of a room that it has handed over is on its way until the room runs, or is lost."""
        if type(message) is not End or not self.restless or self.world.calm or self.world.random.random() > 0.1:
            return False
        life.ambush.lay(message.room, life.hear_peer, link, message, state=r.RUNNING)
        return True

    def at_prefill(self, engine: Engine, link: str, message: Any) -> None:
        engine.life.hear_peer(link, message)

    def to_gateway(self, engine: Engine, name: str, message: Any) -> None:
        gateway = self.gateways.get(name)
        if gateway is None or self.cut(engine, "from"):
            return
        random, leak = self.world.random, self.world.weather.leak
        delay = self.hop()
        if self.restless and random.random() < 0.4 and self.hold_back(gateway, engine, message):
            return
        if self.fates and type(message) is Output and self.fated(gateway, engine, message):
            return
        if self.thin and self.thin.get(engine.name, 0.0) > self.world.now:
            leak = 0.95
        if leak and not self.world.calm and random.random() < leak:
            if random.random() < 0.5:  # what comes late comes twice, or out of order
                self.world.after(0.005 * 1000 ** random.random(), gateway.hear, engine.name, message)
            if random.random() < 0.5 or leak > 0.9:
                return
        if self.lost():
            self.world.fifo((engine.name, name), delay, gateway.link_lost, engine.name)
        else:
            self.world.fifo((engine.name, name), delay, gateway.hear, engine.name, message)

    def fated(self, gateway: Gateway, engine: Engine, message: Output) -> bool:
        """Is this a word of which the fate is drawn already?"""
        for word in message.tokens:
            fates = self.fates.get(word.room)
            if fates:
                late = fates[0] if fates[0] < 0.0 else fates.pop(0)
                if late > SILENT_S:  # and from then on nothing
                    self.cuts[engine.name, "from"] = self.world.now + 7.0
                if late > 0.0:
                    self.world.after(late, gateway.hear, engine.name, message)
                return True
        return False

    def hold_back(self, gateway: Gateway, engine: Engine, message: Any) -> bool:
        """The last word of an engine that faulted, if it charges a request, is on its way until that has gone on."""
        room = next((x.room for x in message.ended if x.charged), None) if type(message) is Output else None
        if room is None:
            return False
        state = self.world.random.choice(["placed", "spoke", "spoke", "gap", "gap"])
        if state == "gap":
            self.fates[RoomId(room.id, room.generation + 1)] = [0.0]
        self.deliver_when(gateway, engine, message, room, state, self.world.now + 12.0)
        return True

    def deliver_when(
        self, gateway: Gateway, engine: Engine, message: Output, room: RoomId, state: str, until: float
    ) -> None:
        """When the next attempt has come so far, or it is too late for that."""
        request = gateway.table.open.get(room.id)
        there = request is None or (request.generation > room.generation and state_of(request) == state)
        if there or self.world.now > until:
            gateway.hear(engine.name, message)
        else:
            self.world.after(0.01, self.deliver_when, gateway, engine, message, room, state, until)

    def to_engine(self, gateway: Gateway, endpoint: str, message: Any) -> None:
        engine = self.engines[endpoint]
        if self.cut(engine, "to"):
            return
        random, weather = self.world.random, self.world.weather
        delay = self.hop()
        if type(message) is Submit and not self.world.calm:
            if random.random() < weather.double * 0.1:  # somebody else ends the room before it is there
                self.world.after(0.0, self.at_engine, engine, "operator", Abort(message.room, "operator"))
            if random.random() < weather.meddling:  # or later
                late = random.random() ** 2 * 2.0
                self.world.after(late, self.at_engine, engine, "operator", Abort(message.room, "operator"))
            if random.random() < weather.double * 0.5:  # and a submit that comes twice begins nothing
                self.world.after(0.001 * 2000 ** random.random(), engine.life.hear_gateway, gateway.name, message)
            if self.restless and random.random() < weather.ambush:
                engine.life.ambush.befall(gateway.name, message)
        if weather.leak and not self.world.calm and random.random() < weather.leak:
            return
        if type(message) is Submit and weather.unheard and random.random() < weather.unheard and not self.world.calm:
            return
        if self.lost():
            self.world.fifo((endpoint, gateway.name), delay, gateway.link_lost, endpoint)
        else:
            self.world.fifo((gateway.name, endpoint), delay, self.at_engine, engine, gateway.name, message)

    def at_engine(self, engine: Engine, gateway: str, message: Any) -> None:
        engine.life.hear_gateway(gateway, message)

    def cut(self, engine: Engine, way: str) -> bool:
        return bool(self.cuts) and self.cuts.get((engine.name, way), 0.0) > self.world.now

    def cut_off(self, engine: Engine, seconds: float) -> None:
        """No message between gateways and one engine for a while, both ways or one, and nobody is told."""
        for way in self.world.random.choice([["to", "from"], ["to"], ["from"]]):
            self.cuts[engine.name, way] = self.world.now + seconds

    def isolate(self, engine: Engine, seconds: float) -> None:
        """No message between an engine and its peers for a while."""
        for pair in self.pairs:
            if engine.name in pair:
                p, d = pair
                self.world.partitions[d, p] = self.world.partitions[p, d] = self.world.now + seconds

    def clear(self) -> None:
        """Everything gets through from now on."""
        self.cuts.clear()
        self.thin.clear()
        self.fates.clear()
        self.trap = None

    def hop(self) -> float:
        """Between a gateway and an engine: a millisecond or two, now and then more, for whatever follows, too."""
        random = self.world.random
        if random.random() < self.world.weather.slow * 0.2:
            return random.random() ** 2 * 0.5
        return random.random() * 0.002

    def lost(self) -> bool:
        return not self.world.calm and self.world.random.random() < self.world.weather.loss * 0.05
