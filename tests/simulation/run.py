"""One simulated run: a pair or two and an engine that is both, clients that abort, faults, from a seed."""

from collections import Counter
from typing import Any

from closeranks.engine.leader import rooms as r
from tests.simulation import invariants
from tests.simulation.engines import Engine, Life
from tests.simulation.gateway import Gateway, Request
from tests.simulation.world import Violation, World

PREFIXES = [[(i * 13 + k * 7 + k * k) % 89 for k in range(40)] for i in range(4)]


class Network:
    """Engines, gateways and who may talk to whom."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lives: dict[int, Life] = {}
        self.identities: dict[str, Life] = {}
        self.engines: dict[str, Engine] = {}
        self.gateways: dict[str, Gateway] = {}
        self.pairs: list[tuple[str, str]] = []
        self.coverage: Counter[tuple[str, str]] = Counter()

    @property
    def endpoints(self) -> list[str]:
        return list(self.engines)

    def add(self, name: str, role: str, num_pages: int, **config: Any) -> None:
        self.engines[name] = Engine(self, name, role, name, num_pages, **config)

    def route_peer(self, life: Life, link: str, message: Any) -> None:
        """Decode's links are endpoints, prefill's are identities."""
        if life.engine.role == "decode":
            engine = self.engines[link]
            self.world.unreliable((life.engine.name, link), self.at_prefill, engine, life.identity, message)
        else:
            other = self.identities.get(link)
            if other is not None:
                ends = (other.engine.name, life.engine.name)
                self.world.unreliable(ends, other.hear_peer, life.engine.endpoint, message)

    def at_prefill(self, engine: Engine, link: str, message: Any) -> None:
        if engine.life is not None:
            engine.life.hear_peer(link, message)

    def to_gateway(self, engine: Engine, gateway: str, message: Any) -> None:
        target = self.gateways.get(gateway)
        if target is None or self.lost():
            return
        channel = (engine.endpoint, gateway)
        self.world.fifo(channel, self.world.random.random() * 0.002, target.hear, engine.endpoint, message)

    def to_engine(self, gateway: Gateway, endpoint: str, message: Any) -> None:
        if self.lost():
            return
        engine = self.engines[endpoint]
        delay = self.world.random.random() * 0.002
        self.world.fifo((gateway.name, endpoint), delay, self.at_engine, engine, gateway.name, message)

    def at_engine(self, engine: Engine, gateway: str, message: Any) -> None:
        if engine.life is not None:
            engine.life.hear_gateway(gateway, message)

    def lost(self) -> bool:
        return not self.world.calm and self.world.random.random() < self.world.loss * 0.05


class Run:
    """Builds a deployment from the seed, loads it, torments it, lets it come to rest, and looks for residue."""

    def __init__(self, seed: int, events: int, calm: bool = False) -> None:
        self.world = world = World(seed, calm)
        self.network = network = Network(world)
        self.events = events
        random = world.random
        tp = random.choice([1, 2, 2, 3])
        common: dict[str, Any] = {
            "tp_size": tp,
            "page_size": 4,
            "chunk": random.choice([5, 8, 16, 64]),
            "max_running": random.choice([2, 4, 8]),
            "overlap": random.random() < 0.7,
            "radix": random.random() < 0.8,
            "bad_share_limit": 10,
            "tombstones": 2000,
        }
        shape = random.choice(["pair", "both", "cross", "all", "all", "all"])
        pages = random.choice([24, 32, 48])
        if shape in ("pair", "all"):
            network.add("prefill-1", "prefill", pages, **common)
            network.add("decode-1", "decode", pages + random.choice([-8, 0, 8]), **common)
            network.pairs.append(("prefill-1", "decode-1"))
        if shape in ("both", "all"):
            network.add("both-1", "both", pages, **common)
            network.pairs.append(("both-1", "both-1"))
        if shape == "cross":
            for name in ("prefill-1", "prefill-2"):
                network.add(name, "prefill", pages, **common)
            for name in ("decode-1", "decode-2"):
                network.add(name, "decode", pages, **common)
            network.pairs += [(p, d) for p in ("prefill-1", "prefill-2") for d in ("decode-1", "decode-2")]
        self.longest = min(engine.num_pages for engine in network.engines.values()) * 4
        if not calm:
            world.loss = random.choice([0.0, 0.01, 0.05, 0.15])
            world.double = random.choice([0.0, 0.02, 0.1])
            world.failing = random.choice([0.0, 0.0, 0.02])
            world.damage = random.choice([0.0, 0.02, 0.05])
            self.trouble = random.choice([0.0, 0.1, 0.3, 0.5])
        else:
            self.trouble = 0.0
        self.abort_share = random.choice([0.1, 0.5, 0.7])
        self.gap = random.choice([0.02, 0.08, 0.3])
        self.gateways_made = 0
        self.new_gateway()
        self.loading = True
        self.made = 0
        self.results: Counter[str] = Counter()
        world.after(1.0, self.client)
        world.after(2.0, self.torment)

    def new_gateway(self) -> Gateway:
        self.gateways_made += 1
        gateway = Gateway(self.network, f"gateway-{self.gateways_made}")
        self.network.gateways[gateway.name] = gateway
        self.gateway = gateway
        return gateway

    # ---------------------------------------------------------------------------------------------------------- load

    def client(self) -> None:
        """A burst of clients; some of them leave at a random moment, some all at once."""
        if not self.loading:
            return
        random, world = self.world.random, self.world
        burst = 1 if random.random() < 0.9 else random.randint(4, 16)
        numbers = []
        for _ in range(burst):
            self.made += 1
            number = random.getrandbits(40)
            numbers.append(number)
            prefix = random.choice(PREFIXES)[: random.choice([0, 3, 8, 17, 32])]
            prompt = prefix + [random.randrange(89) for _ in range(random.choice([1, 2, 4, 9, 15]))]
            new = random.choice([1, 2, 5, 12, 24])
            while len(prompt) + new > self.longest:
                prompt, new = prompt[: len(prompt) // 2 + 1], new // 2 + 1
            stops = [random.randrange(97) for _ in range(random.choice([0, 0, 3, 10]))]
            request = Request(number, prompt, new, stops, world.now + random.choice([3.0, 30.0, 60.0]))
            request.alone = random.random() < 0.04
            self.gateway.start(request)
        if burst > 1 and random.random() < 0.5:  # a mass abort
            for number in numbers:
                world.after(random.random() * 0.05 + 0.01 * (number % 7), self.gateway.abort, number)
        else:
            for number in numbers:
                if random.random() < self.abort_share:
                    world.after(random.random() ** 3 * 1.5, self.gateway.abort, number)
        world.after(random.expovariate(1 / (self.gap * burst)), self.client)

    def torment(self) -> None:
        """Now and then something breaks."""
        if not self.loading:
            return
        random, world = self.world.random, self.world
        world.after(random.expovariate(1.0), self.torment)
        if random.random() > self.trouble:
            return
        engine = random.choice(list(self.network.engines.values()))
        life = engine.life
        assert life is not None
        kind = random.choice(
            ["kill", "kill", "stall", "long_stall", "pause", "digest", "raise", "partition", "gateway"]
        )
        world.note(f"torment {kind} {engine.name}")
        if not life.alive:
            return
        if kind == "kill":
            engine.kill()
        elif kind in ("stall", "long_stall"):
            rank = random.randrange(len(life.ranks))
            life.stalled[rank] = world.now + (random.random() * 2 if kind == "stall" else 5 + random.random() * 3)
        elif kind == "pause":
            life.paused_until = world.now + random.choice([0.3, 2.0, 7.0])
        elif kind in ("digest", "raise"):
            engine.mischief = kind
        elif kind == "partition":
            until = world.now + random.choice([0.5, 3.0, 8.0])
            for p, d in self.network.pairs:
                self.network.world.partitions[d, p] = self.network.world.partitions[p, d] = until
        elif kind == "gateway":
            for request in list(self.gateway.requests.values()):
                self.gateway.finish(request, "gateway died")
            self.gateway.alive = False
            self.new_gateway()

    # --------------------------------------------------------------------------------------------------------- phases

    def go(self) -> None:
        """Run to the end. Raises Violation (or the assertion of a stand-in) with the world's trace at hand."""
        world = self.world
        while world.events < self.events and world.step():
            pass
        self.loading = False
        damage, world.damage = world.damage, 0.0
        world.loss = world.double = world.failing = 0.0
        world.partitions.clear()
        for engine in self.network.engines.values():
            engine.mischief = ""
            engine.excuse = True  # what is under way may still end in a fault
        until = world.now + 70
        while world.now < until and any(g.requests for g in self.network.gateways.values() if g.alive):
            world.run_until(world.now + 1.0)
        for gateway in self.network.gateways.values():
            if gateway.alive and gateway.requests:
                raise Violation(f"requests without an end: {[str(x.room) for x in gateway.requests.values()]}")
        world.run_until(world.now + 65)  # every deadline, lease and promise is over
        for engine in self.network.engines.values():
            life = engine.life
            assert life is not None
            if not life.alive or life.leader.state != "ready":
                raise Violation(f"{engine.name} is not ready at the end")
            invariants.residue(life.leader, life.desk)
        for life in self.network.lives.values():
            if not damage and life.leader.counters["bad_shares"]:
                raise Violation(f"{life.engine.name} found damaged pages where nothing was damaged")
        for gateway in self.network.gateways.values():
            for request in gateway.finished:
                self.results[request.done] += 1

    def coverage(self) -> Counter[tuple[str, str]]:
        """(state, happening) pairs met, over all lives."""
        met: Counter[tuple[str, str]] = Counter()
        for life in self.network.lives.values():
            met.update(life.leader.rooms.met)
        return met


__all__ = ["Network", "Run", "r"]
