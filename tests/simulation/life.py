"""One epoch of a simulated engine: the real core and desk, stand-in ranks with page content."""

from collections import deque
from typing import Any

from closeranks.engine.leader.book import Book
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.desk import Desk
from closeranks.engine.leader.events import Fault
from closeranks.engine.leader.rooms import ENDED
from closeranks.protocol import (
    Compile,
    Compiled,
    Drain,
    Fingerprint,
    Joined,
    Output,
    PeerMessage,
    Progress,
    RankFault,
    Report,
    RoomId,
    Step,
    Welcome,
)
from tests.engine.leader.stand_in import StandIn
from tests.simulation import invariants
from tests.simulation.ambush import Ambush
from tests.simulation.poison import poisoned
from tests.simulation.transfers import Transfers
from tests.simulation.witness import BAD_GRAMMAR, Witness
from tests.simulation.world import Violation

FINGERPRINT = Fingerprint(1, "weights", "float32", "4 tokens", "tokenizer", "xxh3_64")
OTHER = Fingerprint(1, "other weights", "float32", "4 tokens", "tokenizer", "xxh3_64")


def begins(step: Step | None) -> bool:
    """Has the step a row of a request that is in no step before it?"""
    return step is not None and any(row.begin is not None for row in step.rows)


class Life:
    """One epoch of an engine. It is the desk's wire."""

    def __init__(self, engine: Any, epoch: int, instance: int) -> None:
        self.engine, self.world = engine, engine.world
        self.watch = engine.network.coverage
        self.epoch, self.instance = epoch, instance
        self.alive, self.dying = True, False
        self.born = self.world.now
        self.paused_until = self.excused_until = 0.0
        self.held: list[tuple[Any, Any]] = []
        """What has come while the leader stood still."""
        self.leave_by = 0.0
        """Draining since; leaves when nothing is open, at the latest then."""
        random = self.world.random
        self.offset, self.rate = random.random() * 1000.0, random.choice([0.99, 1.0, 1.0, 1.01])
        self.pace = random.choice([1.0, 1.0, 1.0, 4.0, 8.0])
        """How slow its ranks are."""
        config = engine.config(epoch, instance)
        self.leader = Leader(config)
        self.desk = Desk(self.leader, Book(config.page_size, b"salt"), self, engine.writer, False)
        self.ranks = [StandIn(epoch, rank, engine.num_pages, config.page_size) for rank in range(config.tp_size)]
        self.transfers = Transfers(self)
        self.stalled: list[float] = [0.0] * config.tp_size
        self.silent_since: list[float] = [0.0] * config.tp_size
        self.ticking: list[int] = [0] * config.tp_size
        self.steps: list[deque[Step]] = [deque() for _ in self.ranks]
        self.mischief = ""
        self.poisoned = False
        self.nowhere = False
        """Its network device is gone: no write begins, from it or to it, until its epoch ends."""
        self.charged: list[RoomId] = []
        """With its fault."""
        self.why = ""
        self.grammars: dict[str, int] = {}
        """Grammars that rank 0 has -> their numbers."""
        self.dropped: set[int] = set()
        self.witness = Witness(self)
        self.ambush = Ambush(self)
        self.identity = f"peer:{engine.name}:{instance}"
        self.fingerprint = OTHER if engine.odd else FINGERPRINT
        self.unlike, engine.unlike = engine.unlike and config.tp_size > 1, False
        for rank in self.ranks:
            odd = self.unlike and rank.rank == config.tp_size - 1
            mark = Fingerprint(1, "half converted", "float32", "", "", "") if odd else self.fingerprint
            if engine.broken and rank.rank == 0:
                engine.broken = False
                self.world.after(random.random(), self.hear_rank, RankFault(epoch, 0, "OSError", "no weights"))
                continue
            joined = Joined(epoch, rank.rank, 1, mark, rank.memory(), engine.num_pages, config.page_size, 256)
            self.world.after(random.random() ** 2, self.hear_rank, joined)
        if engine.network.restless and random.random() < 0.05:
            self.world.after(random.random() ** 2, self.drain)
        self.world.after(0.0, self.tick)

    def clock(self) -> float:
        """This machine's clock: neither its zero nor its pace is another's."""
        return self.offset + self.world.now * self.rate

    # -------------------------------------------------------------------------------------------------- deliveries

    def deliver(self, call: Any, *args: Any) -> None:
        """Something reaches the leader, which may be dead or stopped."""
        if not self.alive:
            return
        world, trap = self.world, self.engine.network.trap
        if trap is not None and args and type(args[-1]).__name__.lower() == trap.kind and not self.held:
            self.engine.network.trap = None
            if world.chosen(f"trap: {trap.act} at {self.engine.name} for {trap.kind}"):
                trap.spring(self)
            if not self.alive:
                return
        if self.held or self.paused_until > world.now:
            if not self.held:
                world.after(self.paused_until - world.now, self.resume)
            self.held.append((call, args))
            return
        self.hand(call, args)

    def resume(self) -> None:
        """The leader runs again and finds everything that came meanwhile, in order."""
        if self.paused_until > self.world.now:
            self.world.after(self.paused_until - self.world.now + 0.001, self.resume)
            return
        held, self.held = self.held, []
        for call, args in held:
            if self.alive:
                self.hand(call, args)

    def hand(self, call: Any, args: Any) -> None:
        if self.watch is not None:
            self.watch.leader(self.leader, args)
        message = args[-1] if args else None
        self.witness.before(message)
        call(*args, self.clock())
        self.witness.after(message)
        if self.ambush.waiting:
            self.ambush.look()

    def stands(self, transfer: Any) -> bool:
        """For longer than a transfer may. Behind a peer that came back it has the time to a stall once more."""
        config, link = self.leader.config, self.leader.peers.links.get(transfer.room.link)
        back_at = link.back_at if link is not None and link.instance == transfer.room.instance else 0.0
        late = self.clock() - max(transfer.moved) > config.transfer_deadline_s + 1.5
        return late and self.clock() - back_at > config.transfer_stall_s + 1.5

    def tick(self) -> None:
        if not self.alive:
            return
        self.deliver(self.desk.tick)
        now = self.world.now
        for rank, steps in enumerate(self.steps):
            if not steps or self.stalled[rank] <= now:
                self.silent_since[rank] = now
                if steps:
                    self.ticking[rank] += 1
                    self.hear_rank(Progress(self.epoch, rank, 0, self.ticking[rank]))
            elif now - max(self.silent_since[rank], self.excused_until) > self.engine.patience and not self.dying:
                raise Violation(f"{self.engine.name}: rank {rank} hangs in step {steps[0].n} and nobody notices")
        self.witness.look(now)
        oldest = next(iter(self.leader.handover.transfers.values()), None)
        if oldest is not None and not self.dying and not self.held and self.stands(oldest):
            raise Violation(f"{self.engine.name}: a transfer of {oldest.room.id} is stuck and nobody notices")
        if self.leader.state == "draining" and not self.leave_by:
            self.leave_by = now + 4.0
        if self.leave_by:
            rooms = self.leader.rooms
            if now > self.leave_by or not (rooms.open or rooms.closing or self.world.random.random() < 0.8):
                self.engine.kill()
        self.world.after(0.1, self.tick)

    def hear_rank(self, message: Any) -> None:
        self.deliver(self.desk.from_rank, message)

    def hear_gateway(self, gateway: str, message: Any) -> None:
        if self.alive:
            self.world.note(self.engine.name, message)
        self.deliver(self.desk.from_gateway, gateway, message)

    def hear_peer(self, link: str, message: Any) -> None:
        if self.alive:
            self.world.note(self.engine.name, message)
        self.deliver(self.desk.from_peer, link, message)

    # -------------------------------------------------------------------------------------------------------- wire

    def to_ranks(self, message: Step | Welcome | Compile) -> None:
        if self.dying:
            raise Violation(f"{self.engine.name} issues {message} after its fault")
        if isinstance(message, Compile):
            self.compile(message)
            return
        if isinstance(message, Welcome):
            if self.unlike:
                raise Violation(f"{self.engine.name} is ready with ranks of different fingerprints")
            return
        invariants.rows(self.leader)
        for row in message.rows:
            if row.begin is not None and row.begin.sampling.grammar and row.begin.sampling.grammar not in self.grammars:
                raise Violation(f"{self.engine.name}: step {message.n} begins with a grammar that no rank has")
        self.witness.issued(message)
        world = self.world
        for rank in self.ranks:
            number = rank.rank
            delay = (0.001 + world.random.random() * 0.01) * self.pace
            if self.stalled[number] > world.now:
                delay += self.stalled[number] - world.now
            if not self.steps[number]:
                self.silent_since[number] = world.now
            self.steps[number].append(message)
            world.fifo(("step", self.instance, number), delay, self.execute, rank)

    def to_gateway(self, gateway: str, message: Output) -> None:
        if self.dying:
            raise Violation(f"{self.engine.name} says {message} after its fault")
        self.witness.said(message)
        if not self.poisoned:  # before it is heard: some words arrive at once
            self.engine.network.unlucky.update(ended.room.id for ended in message.ended if ended.charged)
        self.engine.network.to_gateway(self.engine, gateway, message)

    def say_status(self, gateway: str) -> None:
        self.engine.network.to_gateway(self.engine, gateway, self.leader.status(self.clock()))

    def to_peer(self, link: str, message: PeerMessage) -> None:
        if self.dying:
            raise Violation(f"{self.engine.name} says {message} after its fault")
        self.engine.network.route_peer(self, link, message)

    def dial(self, endpoint: str) -> None: ...

    def hang_up(self, endpoint: str) -> None: ...

    def fault(self, fault: Fault) -> None:
        """The process goes a moment later; what it still hears must change nothing."""
        self.world.note(self.engine.name, f"fault {fault.name}: {fault.detail[:160]}")
        self.engine.faults.append(fault.name)
        self.charged, self.why = fault.charged, fault.detail
        if self.world.calm:
            raise Violation(f"{self.engine.name}: fault {fault.name} without a cause: {fault.detail}")
        self.dying = True
        random = self.world.random
        if random.random() < 0.2:
            self.world.after(0.0, self.hear_gateway, "operator", Drain())
            self.world.after(0.0, self.hear_rank, RankFault(self.epoch, 0, "ValueError", "this one, too"))
        self.world.after(random.random() * 0.8, self.leave)

    def leave(self) -> None:
        if self.alive:
            self.engine.kill()

    # ------------------------------------------------------------------------------------------------------- ranks

    def stall(self, rank: int, seconds: float) -> None:
        self.stalled[rank] = max(self.stalled[rank], self.world.now + seconds)

    def pause(self, seconds: float) -> None:
        """The leader's process is stopped, then continued."""
        self.paused_until = self.world.now + seconds
        self.excused_until = self.paused_until + 8.0

    def raise_in(self, rank: int, in_step: bool) -> None:
        """A rank raises: it says so, and does nothing more. Nobody is charged if a thread beside the steps did."""
        spared = self.dying
        self.stall(rank, 10_000.0)
        self.hear_rank(RankFault(self.epoch, rank, "ValueError", "injected", in_step))
        if not (in_step or spared) and self.leader.state == "faulted" and "injected" in self.why and self.charged:
            raise Violation(f"{self.engine.name}: a thread of rank {rank} raised; charged: {self.charged}")

    def break_in(self, rank: int, step: Step, poison: bool) -> None:
        """A rank raises in `step`; its requests, if for poison then only the poisonous, must be among those charged."""
        rooms = next((x.rooms for x in self.leader.steps.open if x.n == step.n), [])
        slots, spared = self.ranks[rank].slots, self.dying
        guilty = {
            room.id
            for row, room in zip(step.rows, rooms, strict=False)
            if room.state != ENDED and (not poison or poisoned(slots, [row]))
        }
        self.poisoned = poison and not spared
        self.raise_in(rank, in_step=True)
        heard = self.leader.state == "faulted" and "injected" in self.why  # a paused leader hears of it later
        if heard and not spared and not guilty <= set(self.charged):
            raise Violation(f"{self.engine.name}: {guilty} were in step {step.n}, which broke; charged: {self.charged}")

    def drain(self) -> None:
        """The operator wants the engine to leave; its supervisor starts it again."""
        self.hear_gateway("operator", Drain())

    def compile(self, order: Compile) -> None:
        """Rank 0 compiles beside its steps. What it has dropped no further row may begin with."""
        self.dropped.update(order.drop)
        for text in [text for text, number in self.grammars.items() if number in self.dropped]:
            del self.grammars[text]
        if order.number:
            random = self.world.random
            delay = random.choice([0.002, 0.02, 1.0]) * random.random()
            self.world.after(delay, self.compiled, order, random.randrange(100 * 2**20))

    def compiled(self, order: Compile, size: int) -> None:
        bad = order.grammar == "bad"
        if not bad and order.number not in self.dropped:
            self.grammars[order.grammar] = order.number
        self.hear_rank(Compiled(self.epoch, 0, order.number, BAD_GRAMMAR if bad else "", size))

    def execute(self, rank: StandIn) -> None:
        if not self.alive:
            return
        world, number = self.world, rank.rank
        if self.stalled[number] > world.now:
            world.fifo(("step", self.instance, number), self.stalled[number] - world.now, self.execute, rank)
            return
        step = self.steps[number].popleft()
        poisons = self.engine.network.poisons
        if poisons and poisoned(rank.slots, step.rows):
            self.break_in(number, step, True)
            return
        report = rank.execute(step)
        ahead = self.steps[number][0] if self.steps[number] else None  # may be launched while this one runs: if it
        if poisons and ahead and world.random.random() < 0.5 and poisoned(rank.slots, ahead.rows):
            self.break_in(number, ahead, True)  # breaks then, the report of this one is never sent
            return
        if self.mischief:
            if self.mischief == "digest" and number == len(self.ranks) - 1 > 0:
                self.mischief, self.witness.bad_step = "", step.n
                report = Report(report.epoch, report.rank, report.n, report.digest ^ 1, report.tokens)
            elif self.mischief == "short" and report.tokens:
                self.mischief, self.witness.bad_step = "", step.n
                report = Report(report.epoch, report.rank, report.n, report.digest, report.tokens[1:])
            elif self.mischief == "raise" and (begins(ahead) or world.random.random() < 0.1):
                self.mischief = ""
                self.break_in(number, ahead or step, False)
                return
        self.transfers.begin(rank, step)
        world.fifo(("report", self.instance, number), 0.0005, self.hear_rank, report)
