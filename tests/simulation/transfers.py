"""Transfer threads of the ranks of one engine: writes that are slow, fail half way, stick, or land after their end."""

from collections import Counter
from typing import Any

from closeranks.protocol import Dropped, Progress, Send, Sent, Step
from tests.engine.leader.stand_in import StandIn
from tests.simulation import invariants


class Transfers:
    """Of one life. A write that is done can never land again; one that failed may, over the same connection."""

    def __init__(self, life: Any) -> None:
        self.life, self.world = life, life.world
        self.dropped: list[set[int]] = [set() for _ in life.ranks]
        self.closed: list[Counter[int]] = [Counter() for _ in life.ranks]
        """How often each rank closed its connection to an instance."""
        self.open: list[Counter[int]] = [Counter() for _ in life.ranks]

    def begin(self, rank: StandIn, step: Step) -> None:
        """What a step hands to a rank's transfer thread."""
        random, weather, world = self.world.random, self.world.weather, self.world
        for peer in step.meet:
            self.dropped[rank.rank].discard(peer.instance)
        for send in step.sends:
            delay = 0.001 + random.random() * 0.02
            if not world.calm:
                if random.random() < weather.late:
                    delay += random.random() ** 2 * weather.lateness_s
                if random.random() < weather.sticking:
                    delay = 10_000.0
            self.open[rank.rank][send.peer] += 1
            world.after(delay, self.write, rank, send)
            if 0.5 < delay < 100.0:
                world.after(0.5, self.move, rank, send, world.now + delay)
        for check in step.checks:
            world.after(
                0.001 + random.random() * (0.03 if random.random() > weather.late else 0.5), self.check, rank, check
            )
        for instance in step.drop:
            world.after(random.random() * 2.0, self.drop, rank, instance)

    def check(self, rank: StandIn, check: Any) -> None:
        if self.life.alive:
            self.life.hear_rank(rank.check(check.room, check.pages, check.sums))

    def move(self, rank: StandIn, send: Send, until: float) -> None:
        """A slow write advances."""
        if self.life.alive and self.world.now < until:
            self.life.hear_rank(Progress(self.life.epoch, rank.rank, 0, 0, [send.transfer]))
            self.world.after(0.5, self.move, rank, send, until)

    def drop(self, rank: StandIn, instance: int) -> None:
        if self.life.alive and self.open[rank.rank][instance]:
            self.world.after(0.2, self.drop, rank, instance)
        elif self.life.alive:
            self.dropped[rank.rank].add(instance)
            self.closed[rank.rank][instance] += 1
            self.world.after(0.01, self.life.hear_rank, Dropped(self.life.epoch, rank.rank, instance))  # after `Sent`

    def write(self, rank: StandIn, send: Send, late: bool = False) -> None:
        """The bytes land. A dead writer's may still, until the target dropped it."""
        life, world, random = self.life, self.world, self.world.random
        if not life.alive and not late:
            if random.random() < 0.9:  # what was under way when the writer died may land a good while later
                world.after(random.random() * 4.0, self.write, rank, send, True)
            return
        target = life.engine.network.lives.get(send.peer)
        number = rank.rank
        if target is None or not target.alive or life.instance in target.transfers.dropped[number]:
            sent = Sent(life.epoch, number, send.transfer, "remote disconnected", [])
        elif life.nowhere or target.nowhere:
            sent = Sent(life.epoch, number, send.transfer, "nobody is there", [])
        elif world.cut(life.engine.name, target.engine.name):
            world.after(0.3, self.write, rank, send)  # stuck as long as the link is down
            return
        else:
            invariants.may_write(target.leader, life, send)
            if life.watch is not None:
                life.watch.written(target.leader, send)
            if not world.calm and random.random() < world.weather.failing:
                half = Send(send.transfer, send.room, send.peer, send.pages[: len(send.pages) // 2])
                rank.send(half, target.ranks[number])
                sent = Sent(life.epoch, number, send.transfer, "injected", [], True)
                if random.random() < 0.9:
                    closed = self.closed[number][send.peer]
                    world.after(random.random() * 2.0, self.go_on, rank, send, target, closed)
            else:
                sent = rank.send(send, target.ranks[number])
                if not world.calm and random.random() < world.weather.damage:
                    page = target.ranks[number].pool[send.pages[0][1]]
                    page[:] = [kv ^ 5 for kv in page]
                    target.witness.damaged.add(send.room)
        self.open[number][send.peer] -= 1
        world.after(0.0005 + random.random() * 0.005, life.hear_rank, sent)

    def go_on(self, rank: StandIn, send: Send, target: Any, closed: int) -> None:
        """A write that was reported as failed goes on, unless its writer has closed the connection since."""
        if self.life.alive and self.closed[rank.rank][send.peer] == closed:
            there = target.transfers.closed[rank.rank][self.life.instance]
            self.world.after(self.world.random.random() * 3.0, self.stray, rank, send, target, there)

    def stray(self, rank: StandIn, send: Send, target: Any, closed: int) -> None:
        """It lands, unless its target has closed the connection since."""
        if target.alive and target.transfers.closed[rank.rank][self.life.instance] == closed:
            invariants.may_write(target.leader, self.life, send)
            rank.send(send, target.ranks[rank.rank])
