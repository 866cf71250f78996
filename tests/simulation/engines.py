"""Simulated engines: the real core and desk, stand-in ranks with page content, transfers that misbehave."""

from collections import deque
from typing import Any

from closeranks.engine.leader.book import Book
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.desk import Desk
from closeranks.engine.leader.events import Config, Fault
from closeranks.protocol import (
    Dropped,
    Fingerprint,
    Joined,
    Output,
    PeerMessage,
    Progress,
    RankFault,
    Report,
    Send,
    Sent,
    Step,
    Welcome,
)
from tests.engine.leader.stand_in import StandIn
from tests.simulation import invariants
from tests.simulation.world import Violation

FINGERPRINT = Fingerprint(1, "weights", "float32", "4 tokens", "tokenizer", "xxh3_64")


class Life:
    """One epoch of an engine. It is the desk's wire."""

    def __init__(self, engine: "Engine", epoch: int, instance: int) -> None:
        self.engine, self.world = engine, engine.world
        self.epoch, self.instance = epoch, instance
        self.alive = True
        self.paused_until = 0.0
        config = engine.config(epoch, instance)
        self.leader = Leader(config)
        self.desk = Desk(self.leader, Book(config.page_size, b"salt"), self, engine.writer, False)
        self.ranks = [StandIn(epoch, rank, engine.num_pages, config.page_size) for rank in range(config.tp_size)]
        self.dropped: list[set[int]] = [set() for _ in self.ranks]
        self.stalled: list[float] = [0.0] * config.tp_size
        self.ticking: list[int] = [0] * config.tp_size
        self.busy: list[int] = [0] * config.tp_size
        self.steps: list[deque[Step]] = [deque() for _ in self.ranks]
        self.identity = f"peer:{engine.name}:{instance}"
        for rank in self.ranks:
            joined = Joined(epoch, rank.rank, 1, FINGERPRINT, rank.memory(), engine.num_pages, config.page_size, 256)
            self.world.after(self.world.random.random(), self.hear_rank, joined)
        self.world.after(0.0, self.tick)

    # -------------------------------------------------------------------------------------------------- deliveries

    def deliver(self, call: Any, *args: Any) -> None:
        """Something reaches the leader, which may be dead or stopped."""
        if not self.alive:
            return
        if self.paused_until > self.world.now:
            self.world.fifo(("paused", self.instance), self.paused_until - self.world.now, self.deliver, call, *args)
            return
        call(*args, self.world.now)
        if self.alive:
            invariants.after_event(self.leader, self.world.events)

    def tick(self) -> None:
        if self.alive:
            self.deliver(self.desk.tick)
            for rank, busy in enumerate(self.busy):
                if busy and self.stalled[rank] <= self.world.now:
                    self.ticking[rank] += 1
                    self.hear_rank(Progress(self.epoch, rank, 0, self.ticking[rank]))
            self.world.after(0.1, self.tick)

    def hear_rank(self, message: Any) -> None:
        self.deliver(self.desk.from_rank, message)

    def hear_gateway(self, gateway: str, message: Any) -> None:
        self.deliver(self.desk.from_gateway, gateway, message)

    def hear_peer(self, link: str, message: Any) -> None:
        self.deliver(self.desk.from_peer, link, message)

    # -------------------------------------------------------------------------------------------------------- wire

    def to_ranks(self, message: Step | Welcome) -> None:
        if isinstance(message, Welcome):
            return
        invariants.lone_rows(self.leader)
        for rank in self.ranks:
            self.busy[rank.rank] += 1
            delay = 0.001 + self.world.random.random() * 0.01
            stalled = self.stalled[rank.rank]
            if stalled > self.world.now:
                delay += stalled - self.world.now
            self.steps[rank.rank].append(message)
            self.world.fifo(("step", self.instance, rank.rank), delay, self.execute, rank)

    def to_gateway(self, gateway: str, message: Output) -> None:
        self.engine.to_gateway(gateway, message)

    def say_status(self, gateway: str) -> None:
        self.engine.to_gateway(gateway, self.leader.status(self.world.now))

    def to_peer(self, link: str, message: PeerMessage) -> None:
        self.engine.network.route_peer(self, link, message)

    def dial(self, endpoint: str) -> None:
        pass

    def hang_up(self, endpoint: str) -> None:
        pass

    def fault(self, fault: Fault) -> None:
        self.world.note(f"{self.engine.name} fault {fault.name}: {fault.detail[:120]}")
        self.engine.faults.append(fault.name)
        if self.world.calm and not self.engine.excuse:
            raise Violation(f"{self.engine.name}: fault {fault.name} without a cause: {fault.detail}")
        self.engine.excuse = False
        self.engine.kill()

    # ------------------------------------------------------------------------------------------------------- ranks

    def execute(self, rank: StandIn) -> None:
        if not self.alive:
            return
        if self.stalled[rank.rank] > self.world.now:
            delay = self.stalled[rank.rank] - self.world.now
            self.world.fifo(("step", self.instance, rank.rank), delay, self.execute, rank)
            return
        step = self.steps[rank.rank].popleft()
        self.busy[rank.rank] -= 1
        report = rank.execute(step)
        if self.engine.mischief == "digest" and rank.rank == len(self.ranks) - 1 and len(self.ranks) > 1:
            self.engine.mischief = ""
            report = Report(report.epoch, report.rank, report.n, report.digest ^ 1, report.tokens)
        if self.engine.mischief == "raise":
            self.engine.mischief = ""
            self.hear_rank(RankFault(self.epoch, rank.rank, "ValueError", "injected"))
            return
        random = self.world.random
        for send in step.sends:
            write = 0.001 + random.random() * 0.02
            if random.random() < 0.03 and not self.world.calm:
                write += random.random() ** 3 * 6.0
            self.world.fifo(("write", self.instance, rank.rank), write, self.write, rank, send)
        for check in step.checks:
            self.world.after(0.001 + random.random() * 0.01, self.check, rank, check.room, check.pages, check.sums)
        for instance in step.drop:
            self.world.after(random.random() ** 2 * 2.0, self.drop, rank, instance)
        self.world.fifo(("report", self.instance, rank.rank), 0.0005, self.hear_rank, report)

    def check(self, rank: StandIn, room: Any, pages: list[int], sums: list[list[int]]) -> None:
        if self.alive:
            self.hear_rank(rank.check(room, pages, sums))

    def drop(self, rank: StandIn, instance: int) -> None:
        if self.alive:
            self.dropped[rank.rank].add(instance)
            self.hear_rank(Dropped(self.epoch, rank.rank, instance))

    def write(self, rank: StandIn, send: Send, late: bool = False) -> None:
        """The bytes land. A dead writer's may still, until the target dropped it."""
        world, random = self.world, self.world.random
        if not self.alive and not late:
            if random.random() < 0.7:  # what was under way when the writer died may land a good while later
                self.world.after(random.random() ** 2 * 4.0, self.write, rank, send, True)
            return
        target = self.engine.network.lives.get(send.peer)
        error = ""
        ends = (self.engine.name, target.engine.name) if target is not None else ("", "")
        if target is None or not target.alive or self.instance in target.dropped[rank.rank]:
            error = "remote disconnected"
        elif world.partitions.get(ends, 0.0) > world.now:
            self.world.after(0.3, self.write, rank, send)  # stuck as long as the link is down
            return
        else:
            invariants.may_write(target.leader, self.instance, send)
            if not world.calm and random.random() < world.failing:
                error = "injected"
                half = Send(send.transfer, send.room, send.peer, send.pages[: len(send.pages) // 2])
                rank.send(half, target.ranks[rank.rank])
            else:
                sent = rank.send(send, target.ranks[rank.rank])
                if not world.calm and random.random() < world.damage:
                    page = target.ranks[rank.rank].pool[send.pages[0][1]]
                    page[:] = [kv ^ 5 for kv in page]
        if error:
            sent = Sent(self.epoch, rank.rank, send.transfer, error, [])
        self.world.after(0.0005 + random.random() * 0.005, self.hear_rank, sent)


class Engine:
    """An engine under a supervisor: killed whole, replaced under the next epoch."""

    def __init__(self, network: Any, name: str, role: str, endpoint: str, num_pages: int, **config: Any) -> None:
        self.network, self.world = network, network.world
        self.name, self.role, self.endpoint = name, role, endpoint
        self.num_pages = num_pages
        self.options = config
        self.writer: Any = None
        self.mischief = ""
        self.excuse = False
        self.faults: list[str] = []
        self.life: Life | None = None
        self.epoch = 0
        self.start()

    def config(self, epoch: int, instance: int) -> Config:
        return Config(
            engine=self.name, role=self.role, epoch=epoch, instance=instance, ended_epoch=epoch - 1, **self.options
        )

    def start(self) -> None:
        self.epoch += 1
        instance = self.world.random.getrandbits(62) + 1
        self.life = Life(self, self.epoch, instance)
        self.network.lives[instance] = self.life
        self.network.identities[self.life.identity] = self.life

    def kill(self) -> None:
        """End every process of the engine; the next epoch starts when all are reaped."""
        assert self.life is not None
        if self.life.alive:
            self.life.alive = False
            self.world.after(0.2 + self.world.random.random(), self.start)

    def to_gateway(self, gateway: str, message: Any) -> None:
        self.network.to_gateway(self, gateway, message)
