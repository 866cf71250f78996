"""The real resume and router code as a gateway's process, and clients who hold each token against the right one."""

from collections.abc import Callable
from typing import Any

from closeranks.gateway.resume import End, Request, Requests
from closeranks.gateway.router import Pair, Router
from closeranks.protocol import Attach, Output, RoomId, Sampling, Status, Submit, TopLogprobs
from tests.engine.leader.stand_in import continuation
from tests.simulation.ledger import Ledger
from tests.simulation.world import Violation, World


class Careless(Router):
    """Now and then pairs engines that do not match: they have to refuse each other."""

    def __init__(self, world: World, always: bool, *args: Any) -> None:
        super().__init__(*args)
        self.world, self.always = world, always

    def _match(self, pair: Pair) -> bool:
        return self.always or self.world.weather.careless or super()._match(pair)


class Client:
    """One client's request, its only right answer, and what has come of it."""

    def __init__(self, gateway: "Gateway", number: int, prompt: list[int], new: int, stops: list[int]) -> None:
        self.gateway, self.world = gateway, gateway.world
        self.id, self.prompt, self.new, self.stops = number, prompt, new, stops
        self.deadline = self.began = gateway.world.now
        self.alone = self.poison = False
        self.grammar = ""
        self.got: list[int] = []
        self.done = ""
        self.right = self.answer()

    def answer(self) -> list[int]:
        right = continuation(self.prompt, self.new)
        for index, token in enumerate(right):
            if token in self.stops:
                return right[: index + 1]
        return right

    def make_poison(self, token: int) -> None:
        """Its prompt begins with this."""
        self.poison = True
        self.prompt = [token, *self.prompt[1:]]
        self.right = self.answer()
        self.gateway.network.poisons += 1

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None:
        self.got += tokens
        if self.done:
            raise Violation(f"{self.id:016x}.1: tokens after its end")
        if self.got != self.right[: len(self.got)]:
            raise Violation(f"{self.id:016x}.1: wrong tokens {self.got}, right: {self.right}")

    def on_end(self, end: End) -> None:
        name, calm = f"{self.id:016x}.1", self.world.calm
        if end.reason in ("stop", "length"):
            if self.got != self.right:
                raise Violation(f"{name}: ended by {end.reason} after {len(self.got)} of {len(self.right)} tokens")
        elif end.reason == "busy":
            if self.got:
                raise Violation(f"{name}: refused after its first token")
        elif end.reason == "deadline":
            if self.world.now < self.deadline - 0.02 * (self.deadline - self.began):
                raise Violation(f"{name}: ended {self.deadline - self.world.now:.1f} s before its deadline")
        elif end.reason == "invalid":
            if self.grammar != "bad" or self.got:
                raise Violation(f"{name}: called invalid: {end.detail}")
        elif end.reason not in ("poison", "fault", "no_engine", "peer") or calm:
            raise Violation(f"{name}: ended by {end.reason}: {end.detail}")
        elif end.reason == "peer" and "differ" not in end.detail:
            raise Violation(f"{name}: ended by the pair: {end.detail}")
        elif end.reason == "poison" and not self.poison and self.id not in self.gateway.network.unlucky:
            raise Violation(f"{name}: ended as poison, and every fault was another's: {end.detail}")
        self.gateway.finish(self, "done" if end.reason in ("stop", "length") else end.reason)


class Gateway:
    """Sends what the table wants sent, ten times a second, and checks it against what the clients know."""

    def __init__(self, network: Any, name: str) -> None:
        self.network, self.world, self.name = network, network.world, name
        self.watch = network.coverage
        self.alive = True
        self.clients: dict[int, Client] = {}
        self.results: list[str] = []
        engines = network.engines.values()
        roles = {role: [e.name for e in engines if e.role == role] for role in ("prefill", "decode", "both")}
        self.submitted: set[tuple[str, RoomId]] = set()
        always = self.world.random.random() < 0.3
        router = Careless(self.world, always, roles["prefill"], roles["decode"], roles["both"], 5.0)
        self.table = Requests(router, gap_s=1.0, engine_wait_s=15.0)
        self.ledger = Ledger(self.table)
        self.attached = -1.0
        self.world.after(0.0, self.tick)

    def drive(self, call: Callable[..., None], *args: Any) -> None:
        """An event, and the messages that follow from it."""
        if not self.alive:
            return
        if self.watch is not None:
            self.watch.gateway(self.table, call.__name__, args)
        call(*args)
        table = self.table
        if table.outbox:
            outbox, table.outbox = table.outbox, []
            for endpoint, message in outbox:
                if type(message) is Submit:
                    if (endpoint, message.room) in self.submitted:
                        raise Violation(f"{message.room} is submitted to {endpoint} twice")
                    self.submitted.add((endpoint, message.room))
                    self.ledger.submitted(message)
                self.network.to_engine(self, endpoint, message)
        if self.world.events % 4 == 0:
            self.check()

    def check(self) -> None:
        """The table's books."""
        table = self.table
        if table.open.keys() != self.clients.keys():
            raise Violation("the table's open requests are not the clients'")
        open_on = dict.fromkeys(table.router.engines, 0)
        placed = 0
        for request in table.open.values():
            if request.pair is not None:
                placed += 1
                for endpoint in request.pair.endpoints:
                    open_on[endpoint] += 1
        if table.waiting + placed != len(table.open):
            raise Violation("a request neither waits nor runs")
        for endpoint, engine in table.router.engines.items():
            if engine.open != open_on[endpoint]:
                raise Violation(f"{endpoint}: counts {engine.open} open attempts of {open_on[endpoint]}")

    def tick(self) -> None:
        if not self.alive:
            return
        now = self.world.now
        if now - self.attached >= 1.0:
            self.attached = now
            for endpoint in self.network.engines:
                self.network.to_engine(self, endpoint, Attach(self.name))
        self.drive(self.table.on_time, now)
        engines = self.network.engines
        for request in self.table.open.values():
            name = f"{request.id:016x}.{request.generation}"
            if now > request.deadline + 0.2:
                raise Violation(f"{name}: open {now - request.deadline:.1f} s after its deadline")
            if request.pair is not None:
                for endpoint in request.pair.endpoints[request.spoke :] or request.pair.endpoints:
                    heard = self.table.router.engines[endpoint].heard
                    if now - max(heard, request.began) > 6.0:
                        raise Violation(f"{name}: waits for {endpoint}, silent for {now - heard:.1f} s")
                life = engines[request.pair.decode].life
                known = self.table.router.engines[request.pair.decode].status
                if known is not None and known.instance == life.instance and life.born > request.began + 0.1:
                    raise Violation(f"{name}: waits for {known.engine}, which has been replaced since")
        self.world.after(0.1, self.tick)

    def start(self, client: Client) -> None:
        self.clients[client.id] = client
        request = Request(
            id=client.id,
            rid=str(client.id),
            tokens=list(client.prompt),
            prompt_length=len(client.prompt),
            max_new_tokens=client.new,
            sampling=Sampling(grammar=client.grammar),
            stop_ids=client.stops,
            deadline=client.deadline,
            sink=client,
        )
        request.charges = {0: ("", client.id), -1: ("", client.id)} if client.alone else {}
        self.ledger.opened(request)
        self.drive(self.table.start, request, self.world.now)

    def abort(self, client: Client) -> None:
        """The client has gone."""
        if self.alive and not client.done:
            self.finish(client, "aborted")
            self.drive(self.table.abort, client.id, "client")

    def finish(self, client: Client, why: str) -> None:
        client.done = why
        del self.clients[client.id]
        self.results.append(why)

    def die(self) -> None:
        self.alive = False
        for client in self.clients.values():
            client.done = "gateway died"
            self.results.append(client.done)
        self.clients.clear()
        del self.network.gateways[self.name]

    def hear(self, endpoint: str, message: Output | Status) -> None:
        if not self.alive:
            return
        if isinstance(message, Status):
            self.drive(self.table.on_status, endpoint, message, self.world.now)
            return
        self.world.note(self.name, message)
        self.ledger.before(endpoint, message)
        self.drive(self.table.on_output, endpoint, message, self.world.now)
        self.ledger.after()

    def link_lost(self, endpoint: str) -> None:
        self.drive(self.table.on_link_lost, endpoint, self.world.now)
