"""Transfer threads of the ranks of one engine: writes that are slow, fail half way, stick, or land after their end."""

from typing import Any

from closeranks.protocol import Dropped, Send, Sent, Step
from tests.engine.leader.stand_in import StandIn
from tests.simulation import invariants


class Transfers:
    """Of one life. A write is settled when it can never land again."""

    def __init__(self, life: Any) -> None:
        self.life, self.world = life, life.world
        self.dropped: list[set[int]] = [set() for _ in life.ranks]

    def begin(self, rank: StandIn, step: Step) -> None:
        """What a step hands to a rank's transfer thread."""
        random, weather, world = self.world.random, self.world.weather, self.world
        for send in step.sends:
            delay = 0.001 + random.random() * 0.02
            if not world.calm:
                if random.random() < weather.late:
                    delay += random.random() ** 2 * weather.lateness_s
                if random.random() < weather.sticking:
                    delay = 10_000.0
            world.after(delay, self.write, rank, send)
        for check in step.checks:
            world.after(
                0.001 + random.random() * (0.03 if random.random() > weather.late else 0.5), self.check, rank, check
            )
        for instance in step.drop:
            world.after(random.random() * 2.0, self.drop, rank, instance)

    def check(self, rank: StandIn, check: Any) -> None:
        if self.life.alive:
            self.life.hear_rank(rank.check(check.room, check.pages, check.sums))

    def drop(self, rank: StandIn, instance: int) -> None:
        if self.life.alive:
            self.dropped[rank.rank].add(instance)
            self.life.hear_rank(Dropped(self.life.epoch, rank.rank, instance))

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
                sent = Sent(life.epoch, number, send.transfer, "injected", [])
            else:
                sent = rank.send(send, target.ranks[number])
                if not world.calm and random.random() < world.weather.damage:
                    page = target.ranks[number].pool[send.pages[0][1]]
                    page[:] = [kv ^ 5 for kv in page]
                    target.witness.damaged.add(send.room)
        world.after(0.0005 + random.random() * 0.005, life.hear_rank, sent)
