"""One simulated run: two prefill and two decode engines and one that does both, clients, weather, from a seed."""

import re
from collections import Counter
from random import Random
from typing import Any

from closeranks.engine.leader.link import UP
from tests.simulation import invariants
from tests.simulation.coverage import Coverage
from tests.simulation.gateway import Client, Gateway
from tests.simulation.network import Network
from tests.simulation.poison import POISONS
from tests.simulation.trouble import TROUBLES
from tests.simulation.weather import ALWAYS, FAIR, WEATHERS, Weather, mixed
from tests.simulation.world import Violation, World

GRAMMARS = ["bad", *(f"grammar {number}" for number in range(8))]
PREFIXES = [[(i * 13 + k * 7 + k * k) % 89 for k in range(40)] for i in range(4)]


class Run:
    """Builds a deployment, loads it, torments it, lets it come to rest, and looks for residue.

    `skip`: numbers of the seed's choices (bursts of clients, changes of weather, troubles) that are drawn but not
    carried out; a failure is shortened by leaving out as many as possible.
    """

    def __init__(
        self,
        seed: int,
        events: int,
        calm: bool = False,
        coverage: Coverage | None = None,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        self.world = world = World(seed, calm)
        self.network = network = Network(world, coverage)
        self.events, self.skip = events, skip
        self.choices = 0
        random = self.plan = Random(f"plan {seed}")
        """Draws what is done to the deployment, apart from what follows: leaving one thing out leaves the rest."""
        tp = random.choice([2, 2, 2, 3])

        def config(**more: Any) -> dict[str, Any]:
            values = {
                "page_size": 4,
                "chunk": random.choice([5, 8, 16]),
                "max_running": random.choice([3, 4, 8]),
                "overlap": random.random() < 0.7,
                "radix": random.random() < 0.8,
                "bad_share_limit": 10,
                "tombstones": 2000,
                "transfer_deadline_s": 6.0,
                "promise_s": random.choice([1.0, 3.0]),
                "max_waiting": random.choice([8, 64, 1000]),
            }
            return {**values, **more}

        pages = random.choice([24, 32])
        network.add("prefill-1", "prefill", pages, **config(tp_size=tp, radix=True, chunk=5))
        network.add("prefill-2", "prefill", pages - random.choice([0, 4, 8]), **config(tp_size=tp))
        network.add("decode-1", "decode", pages, **config(tp_size=tp, overlap=True, radix=True))
        network.add("decode-2", "decode", pages - random.choice([0, 4, 8]), **config(tp_size=tp, chunk=5))
        network.add("both-1", "both", pages, **config(tp_size=random.choice([1, 2]), overlap=True, radix=True))
        network.pairs += [(p, d) for p in ("prefill-1", "prefill-2") for d in ("decode-1", "decode-2")]
        self.longest = min(engine.num_pages for engine in network.engines.values()) * 4
        self.gateways_made = 0
        self.results: list[list[str]] = []
        self.new_gateway()
        self.loading = True
        self.to_come: list[Weather] = []
        """Each weather comes once before any comes again; from the second round on two at a time."""
        self.rounds = 0
        world.chosen = self.chosen
        world.after(1.0, self.client)
        world.after(2.0, self.change)
        world.after(2.0, self.torment)

    def new_gateway(self) -> None:
        self.gateways_made += 1
        self.gateway = Gateway(self.network, f"gateway-{self.gateways_made}")
        self.network.gateways[self.gateway.name] = self.gateway
        self.results.append(self.gateway.results)

    def chosen(self, what: str) -> bool:
        """One more choice of the seed; False: it is left out."""
        self.choices += 1
        if self.choices in self.skip:
            return False
        self.world.note(f"choice {self.choices}", what)
        return True

    # ---------------------------------------------------------------------------------------------------------- load

    def client(self) -> None:
        """A burst of clients; some of them leave at a random moment, some all at once."""
        if not self.loading:
            return
        random, world, weather = self.plan, self.world, self.world.weather
        burst = 1 if random.random() < 0.93 else random.randint(4, 16)
        world.after(random.expovariate(1 / (weather.gap_s * burst)), self.client)
        clients = [self.draw_client() for _ in range(burst)]
        mass = burst > 1 and random.random() < weather.mass
        leave = []
        for number, client in enumerate(clients):
            if mass:
                leave.append((random.random() * 0.05 + 0.01 * (number % 7), client))
            elif random.random() < weather.aborts:
                leave.append((random.random() ** 3 * 1.5, client))
        if not self.chosen(f"{burst} clients, {len(leave)} of them leave"):
            return
        for client in clients:
            self.gateway.start(client)
        for delay, client in leave:
            world.after(delay, self.gateway.abort, client)

    def draw_client(self) -> Client:
        random, weather = self.plan, self.world.weather
        number = random.getrandbits(62)
        prefix = random.choice(PREFIXES)[: random.choice([0, 3, 8, 17, 32])]
        prompt = prefix + [random.randrange(89) for _ in range(random.choice([0, 1, 2, 4, 9, 15]) or not prefix)]
        new = random.choice([1, 2, 5, 12, 24])
        if weather.long:
            prompt += [random.randrange(89) for _ in range(16)]
            new += random.choice([8, 20])
        while len(prompt) + new > self.longest:
            prompt, new = prompt[: len(prompt) // 2 + 1], new // 2 + 1
        stops = [random.randrange(97) for _ in range(random.choice([0, 0, 3, 10]))]
        client = Client(self.gateway, number, prompt, new, stops)
        low, high = random.choice([(0.02, 3.0), (0.1, 30.0), (0.1, 30.0), (30.0, 30.0), (30.0, 30.0)])
        client.deadline += low * (high / low) ** random.random() if not self.world.calm else 30.0
        client.alone = random.random() < weather.lone
        if random.random() < weather.grammars:
            client.grammar = random.choice(GRAMMARS[1:] if self.world.calm else GRAMMARS)
        if random.random() < weather.poison and not self.world.calm:
            client.make_poison(random.choice(POISONS))
        return client

    # ------------------------------------------------------------------------------------------------------- weather

    def change(self) -> None:
        """The weather changes."""
        if not self.loading:
            return
        random, world = self.plan, self.world
        world.after(1.0 + random.random() * 2.0, self.change)
        if not self.to_come:
            self.to_come = random.sample(WEATHERS, len(WEATHERS))
            if self.rounds:
                others = random.sample(WEATHERS, len(WEATHERS))
                self.to_come = [mixed(a, b) if random.random() < 0.5 else a for a, b in zip(self.to_come, others)]
            self.rounds += 1
        weather = self.to_come.pop()
        if not world.calm and self.chosen(f"weather: {weather.name}"):
            world.weather = weather

    def torment(self) -> None:
        """Something breaks, as often as the weather says."""
        if not self.loading:
            return
        random, world = self.plan, self.world
        world.after(0.1, self.torment)
        troubles = {} if world.calm else {**ALWAYS, **world.weather.troubles}
        for kind, rate in troubles.items():
            if random.random() < rate * 0.1:
                engine = random.choice(list(self.network.engines.values()))
                if self.chosen(f"{kind} {engine.name}") and engine.life.alive:
                    TROUBLES[kind](self, engine.life)

    # --------------------------------------------------------------------------------------------------------- phases

    def go(self) -> None:
        """Run to the end. Raises Violation (or the assertion of a stand-in) with the world's trace at hand."""
        world, engines = self.world, self.network.engines
        while world.events < self.events and world.step():
            pass
        self.loading = False
        world.weather = FAIR
        world.partitions.clear()
        self.network.clear()
        self.network.restless = False
        for engine in engines.values():
            engine.life.mischief = ""
            engine.unlike = engine.broken = False
            if engine.odd:
                engine.odd = False
                engine.kill()
        until = world.now + 32
        while world.now < until and self.gateway.clients:
            world.run_until(world.now + 0.5)
        if self.gateway.clients:
            raise Violation(f"requests without an end: {[f'{x:016x}.1' for x in self.gateway.clients]}")
        world.run_until(world.now + 8)
        origins = {engine.origin for engine in engines.values()}
        for engine in engines.values():
            if any(gone.origin not in origins for gone in engine.life.leader.peers.gone.values()):
                engine.kill()  # nobody can say any more of those that they are dead
        # whatever is still open ends by a deadline, a lease, a promise or a fault
        until = world.now + 60
        while world.now < until and not self.at_rest():
            world.run_until(world.now + 0.5)
        for engine in engines.values():
            if not engine.life.alive or engine.life.leader.state != "ready":
                raise Violation(f"{engine.name} is not ready at the end")
            invariants.residue(engine.life.leader, engine.life.desk)

    def at_rest(self) -> bool:
        for engine in self.network.engines.values():
            leader = engine.life.leader
            if not engine.life.alive or leader.state != "ready" or leader.rooms.open or leader.rooms.closing:
                return False
            if any(link.fence and link.state == UP for link in leader.peers.links.values()):
                return False
            if leader.handover.transfers or any(gone.rooms for gone in leader.peers.gone.values()):
                return False
        return True

    def outcome(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(why for results in self.results for why in results)

    def faults(self) -> Counter[str]:
        return Counter(name for engine in self.network.engines.values() for name in engine.faults)

    def story(self, error: BaseException, last: int = 40) -> list[str]:
        """The trace: what the seed chose, and the last deliveries that concern the rooms of the failure."""
        names = re.findall(r"([0-9a-f]{16})\.\d", str(error))
        entries = list(self.world.said)
        marks = [str(int(name, 16)) for name in names] + names
        kept = [x for x in entries if not marks or is_trouble(x) or any(m in str(x[2]) for m in marks)]
        return [f"{at:9.3f} {where:12} {what!s:.400}" for at, where, what in kept[-last:]]


def is_trouble(entry: tuple[float, str, object]) -> bool:
    """A choice of the seed other than clients, or a fault that followed."""
    _, where, what = entry
    return (where.startswith("choice") and "clients" not in str(what)) or str(what).startswith("fault ")
