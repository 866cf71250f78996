"""Engines, gateways and who may talk to whom."""

from typing import Any

from closeranks.protocol import Abort, Submit
from tests.simulation.coverage import Coverage
from tests.simulation.engines import Engine, Life
from tests.simulation.gateway import Gateway
from tests.simulation.world import World


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
        self.restless = not world.calm
        """Engines may fail at their start."""
        self.cuts: dict[str, float] = {}
        """Engine -> time until which no gateway reaches it."""

    def add(self, name: str, role: str, num_pages: int, **config: Any) -> None:
        self.engines[name] = Engine(self, name, role, num_pages, **config)

    def route_peer(self, life: Life, link: str, message: Any) -> None:
        """Decode's links are endpoints, prefill's are identities."""
        if life.engine.role == "decode":
            engine = self.engines[link]
            self.world.unreliable((life.engine.name, link), self.at_prefill, engine, life.identity, message)
        else:
            other = self.identities.get(link)
            if other is not None:
                ends = (other.engine.name, life.engine.name)
                self.world.unreliable(ends, other.hear_peer, life.engine.name, message)

    def at_prefill(self, engine: Engine, link: str, message: Any) -> None:
        engine.life.hear_peer(link, message)

    def to_gateway(self, engine: Engine, name: str, message: Any) -> None:
        gateway = self.gateways.get(name)
        if gateway is None or self.cut(engine):
            return
        random, leak = self.world.random, self.world.weather.leak
        delay = random.random() * 0.002
        if leak and not self.world.calm and random.random() < leak:
            if random.random() < 0.5:  # what comes late comes twice, or out of order
                self.world.after(random.random() ** 2 * 2.0, gateway.hear, engine.name, message)
            if random.random() < 0.5:
                return
        if self.lost():
            self.world.fifo((engine.name, name), delay, gateway.link_lost, engine.name)
        else:
            self.world.fifo((engine.name, name), delay, gateway.hear, engine.name, message)

    def to_engine(self, gateway: Gateway, endpoint: str, message: Any) -> None:
        engine = self.engines[endpoint]
        if self.cut(engine):
            return
        random, weather = self.world.random, self.world.weather
        delay = random.random() * 0.002
        if type(message) is Submit and not self.world.calm:
            if random.random() < weather.double * 0.1:  # somebody else ends the room before it is there
                self.world.after(0.0, self.at_engine, engine, "operator", Abort(message.room, "operator"))
            if random.random() < weather.meddling:  # or later
                late = random.random() ** 2 * 2.0
                self.world.after(late, self.at_engine, engine, "operator", Abort(message.room, "operator"))
            if random.random() < weather.double * 0.5:  # and a submit that comes twice begins nothing
                self.world.after(random.random() ** 4 * 2.0, engine.life.hear_gateway, gateway.name, message)
        if weather.leak and not self.world.calm and random.random() < weather.leak:
            return
        if self.lost():
            self.world.fifo((endpoint, gateway.name), delay, gateway.link_lost, endpoint)
        else:
            self.world.fifo((gateway.name, endpoint), delay, self.at_engine, engine, gateway.name, message)

    def at_engine(self, engine: Engine, gateway: str, message: Any) -> None:
        engine.life.hear_gateway(gateway, message)

    def cut(self, engine: Engine) -> bool:
        return bool(self.cuts) and self.cuts.get(engine.name, 0.0) > self.world.now

    def lost(self) -> bool:
        return not self.world.calm and self.world.random.random() < self.world.weather.loss * 0.05
