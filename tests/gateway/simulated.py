"""The real router and resume code in the simulated deployment, in place of its stand-in gateway.

What the simulation's network loses between a gateway and a leader is lost as ZeroMQ loses: with the connection, of
whose break the gateway hears.
"""

from collections.abc import Callable
from typing import Any

from closeranks.gateway.resume import End, Request, Requests
from closeranks.gateway.router import Router
from closeranks.protocol import Attach, Output, Sampling, Status, TopLogprobs
from tests.simulation.gateway import Request as Wanted
from tests.simulation.run import Network, Run
from tests.simulation.world import Violation


class Client:
    """Holds each token against the right one."""

    def __init__(self, gateway: "RealGateway", wanted: Wanted) -> None:
        self.gateway, self.wanted = gateway, wanted
        self.got: list[int] = []

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None:
        self.got += tokens
        if self.wanted.done:
            raise Violation(f"tokens after the end of {self.wanted.id}")
        if self.got != self.wanted.right[: len(self.got)]:
            raise Violation(f"wrong tokens {self.got}, right: {self.wanted.right}")

    def on_end(self, end: End) -> None:
        wanted = self.wanted
        if end.reason in ("stop", "length"):
            if self.got != wanted.right:
                raise Violation(f"ended by {end.reason} after {len(self.got)} of {len(wanted.right)} tokens")
        elif end.reason == "busy":
            if self.got:
                raise Violation("refused after its first token")
        elif end.reason == "deadline":
            if self.gateway.world.now < wanted.deadline:
                raise Violation("ended before its deadline")
        elif end.reason != "poison":
            raise Violation(f"ended by {end.reason}: {end.detail}")
        self.gateway.finish(wanted, "done" if end.reason in ("stop", "length") else end.reason)


class RealGateway:
    """What `tests.simulation.gateway.Gateway` is to the simulation."""

    def __init__(self, network: Any, name: str) -> None:
        self.network, self.world, self.name = network, network.world, name
        self.alive = True
        self.requests: dict[int, Wanted] = {}
        self.finished: list[Wanted] = []
        roles = {role: [e.name for e in network.engines.values() if e.role == role] for role in ("prefill", "decode")}
        both = [e.name for e in network.engines.values() if e.role == "both"]
        self.table = Requests(Router(roles["prefill"], roles["decode"], both, 5.0), gap_s=1.0, engine_wait_s=60.0)
        self.attached = -1.0
        self.world.after(0.0, self.tick)

    def drive(self, call: Callable[..., None], *args: Any) -> None:
        """An event, and the messages that follow from it."""
        if self.alive:
            call(*args)
            outbox, self.table.outbox = self.table.outbox, []
            for endpoint, message in outbox:
                self.network.to_engine(self, endpoint, message)
            self.check()

    def check(self) -> None:
        table = self.table
        if set(table.open) != set(self.requests):
            raise Violation("the table's open requests are not the clients'")
        placed = [r for r in table.open.values() if r.pair is not None]
        if table.waiting + len(placed) != len(table.open):
            raise Violation("a request neither waits nor runs")
        for endpoint, engine in table.router.engines.items():
            if engine.open != sum(endpoint in r.pair.endpoints for r in placed if r.pair):
                raise Violation(f"{endpoint}: counts {engine.open} open attempts")

    def tick(self) -> None:
        if not self.alive:
            return
        now = self.world.now
        if now - self.attached >= 1.0:
            self.attached = now
            for endpoint in self.network.endpoints:
                self.network.to_engine(self, endpoint, Attach(self.name))
        self.drive(self.table.on_time, now)
        self.world.after(0.1, self.tick)

    def start(self, wanted: Wanted) -> None:
        self.requests[wanted.id] = wanted
        request = Request(
            id=wanted.id,
            rid=str(wanted.id),
            tokens=list(wanted.prompt),
            prompt_length=len(wanted.prompt),
            max_new_tokens=wanted.new,
            sampling=Sampling(),
            stop_ids=wanted.stops,
            deadline=wanted.deadline,
            sink=Client(self, wanted),
        )
        request.charged = 2 if wanted.alone else 0
        self.drive(self.table.start, request, self.world.now)

    def abort(self, number: int) -> None:
        wanted = self.requests.get(number)
        if wanted is not None and self.alive:
            self.finish(wanted, "aborted")
            self.drive(self.table.abort, number, "client")

    def finish(self, wanted: Wanted, why: str) -> None:
        wanted.done = why
        del self.requests[wanted.id]
        self.finished.append(wanted)

    def hear(self, endpoint: str, message: Output | Status) -> None:
        on = self.table.on_output if isinstance(message, Output) else self.table.on_status
        self.drive(on, endpoint, message, self.world.now)

    def link_lost(self, endpoint: str) -> None:
        self.drive(self.table.on_link_lost, endpoint, self.world.now)


class LinkedNetwork(Network):
    """Loses messages of gateways together with their connection."""

    def to_gateway(self, engine: Any, gateway: str, message: Any) -> None:
        target: Any = self.gateways.get(gateway)
        if target is not None:
            lost = self.lost()
            call = target.link_lost if lost else target.hear
            arguments = (engine.endpoint,) if lost else (engine.endpoint, message)
            self.world.fifo((engine.endpoint, gateway), self.world.random.random() * 0.002, call, *arguments)

    def to_engine(self, gateway: Any, endpoint: str, message: Any) -> None:
        delay = self.world.random.random() * 0.002
        if self.lost():
            self.world.fifo((endpoint, gateway.name), delay, gateway.link_lost, endpoint)
            return
        engine = self.engines[endpoint]
        self.world.fifo((gateway.name, endpoint), delay, self.at_engine, engine, gateway.name, message)


class RealRun(Run):
    """A simulated run with the real gateway code."""

    def __init__(self, seed: int, events: int, calm: bool = False) -> None:
        super().__init__(seed, events, calm)
        self.network.__class__ = LinkedNetwork

    def new_gateway(self) -> Any:
        self.gateways_made += 1
        gateway: Any = RealGateway(self.network, f"gateway-{self.gateways_made}")
        self.network.gateways[gateway.name] = gateway
        self.gateway = gateway
        return gateway
