"""The leader's core: `Leader.handle(event) -> effects`. Sans-IO, deterministic, never sees a token.

All decisions of an engine are made here, in the order of its events: who is admitted, what a step computes, which page
holds what, when a room ends. Same config and same events give the same effects, in any process: there is no clock but
the events' `at`, no random draw, and no iteration over a set.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...protocol import Checked, Compiled, Dropped, Ended, Fingerprint, Joined, Memory, Progress, RankFault, Status
from . import rooms as r
from .admission import Admission
from .events import (
    Aborted,
    Attached,
    Config,
    Drained,
    Effect,
    Event,
    Fault,
    Forget,
    Greet,
    PeerSaid,
    RankSaid,
    Release,
    Reported,
    SayEnded,
    Settled,
    Submitted,
    Tick,
)
from .fences import Fences
from .handover import Handover
from .pages import Pool
from .peers import Peers
from .reach import Reach
from .rooms import Room, Rooms
from .scheduler import Scheduler
from .status import status
from .steps import OpenStep, Steps

COUNTERS = (
    "requests",
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "retracted",
    "finished",
    "aborted",
    "handed",
    "transfers",
    "transfer_bytes",
    "failed_transfers",
    "torn_writes",
    "bad_shares",
    "surplus_rows",
    "lapsed_links",
    "stale_messages",
)
MOST_GAP_S = 1.0
"""A longer gap between events means that this process itself did not run: nobody is blamed for that time."""


class Leader:
    """One engine's mind for one epoch."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.page_size = config.page_size
        self.state = "starting"
        self.at = 0.0
        self.started = False
        self.out: list[Effect] = []
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.stales: dict[str, int] = {}
        self.gateways: dict[str, float] = {}
        self.rooms = Rooms(config.tombstones)
        self.pool = Pool(0)
        self.steps = Steps(config.tp_size, 2 if config.overlap else 1, config.step_deadline_s)
        self.joined: list[Joined | None] = [None] * config.tp_size
        self.memories: list[Memory | None] = [None] * config.tp_size
        self.fingerprint: Fingerprint | None = None
        self.context_length = 0
        self.page_bytes = 0
        self.handover = Handover(self)
        self.fences = Fences(self)
        self.reach = Reach(self)
        self.peers = Peers(self)
        self.scheduler = Scheduler(self)
        self.admission = Admission(self)
        self.handlers: dict[type, Callable[[Any], None]] = {
            Tick: self.tick,
            Attached: self.attached,
            Submitted: self.admission.submitted,
            Aborted: self.aborted,
            Drained: self.drained,
            Reported: self.reported,
            Settled: self.settled,
            RankSaid: self.rank_said,
            PeerSaid: self.peer_said,
        }

    def handle(self, event: Event) -> list[Effect]:
        """Apply one event and return what follows from it, in order. After a fault nothing follows from anything."""
        out: list[Effect] = []
        self.out = out
        if self.state == "faulted":
            return out
        at = event.at
        gap = at - self.at
        if gap > MOST_GAP_S and self.started:
            self.forgive(gap - MOST_GAP_S)
        if gap > 0:
            self.at = at
        self.started = True
        self.handlers[type(event)](event)
        steps = self.steps
        if len(steps.open) < steps.depth and self.state in ("ready", "draining"):
            self.scheduler.fill()
        return out

    @property
    def max_request_tokens(self) -> int:
        return min(self.context_length, self.pool.total * self.page_size)

    # ----------------------------------------------------------------------------------------------------- gateways

    def attached(self, event: Attached) -> None:
        self.gateways[event.gateway] = self.at

    def occupied(self) -> int:
        """Rooms that hold a slot."""
        return self.config.max_running - len(self.scheduler.slots)

    def aborted(self, event: Aborted) -> None:
        room = self.rooms.open.get(event.room)
        if room is None:
            if event.room not in self.rooms.tombs:
                self.rooms.bury(event.room, r.ABORT)
            return
        self.end(room, r.ABORT, "abort", event.reason, retryable=False)

    def drained(self, event: Drained) -> None:
        if self.state == "ready":
            self.state = "draining"

    # ------------------------------------------------------------------------------------------------- ends of rooms

    def end(
        self,
        room: Room,
        happening: str,
        reason: str,
        detail: str,
        retryable: bool,
        tell_peer: bool = True,
        charged: bool = False,
    ) -> None:
        """End a room: tell the gateway and the other side, take it out of the schedule, let go of what it holds."""
        handed = room.state == r.HANDED
        if not self.rooms.move(room, happening):
            return
        if happening == r.ABORT:
            self.counters["aborted"] += 1
        self.scheduler.remove(room)
        if room.gateway:
            if handed and happening != r.ABORT:  # its part is done, whatever became of the rest
                reason, detail, retryable, charged = "stop", "handed over", False, False
            self.counters["finished"] += reason in ("stop", "length") and not retryable
            ended = Ended(room.id, reason, detail, retryable, 0.0, charged, room.cached)
            self.out.append(SayEnded(room.gateway, ended))
        else:
            self.out.append(Forget(room.id))
        link = self.peers.links.get(room.link)
        if link is not None and tell_peer and link.instance and not handed:
            self.peers.say_end(link, room.id, reason, detail, retryable)
        self.rooms.closing[room.id] = room
        self.let_go(room)

    def let_go(self, room: Room) -> None:
        """Give back what an ended room holds, as far as nobody can still read or write it; called again when that
        changes. Pages: no open step has a row of it, (prefill) all its sends are settled, (decode) its writers quiet.
        """
        if room.busy:
            return
        self.scheduler.give_slot(room)
        if room.unsettled:
            return
        if room.writable:
            if room.pages:
                self.pool.quarantine(room.targets)
                room.quarantined = True
                self.pool.retire(room.pages[room.skip + len(room.targets) :], (), 0)
                self.pool.retire(room.pages[: room.skip], room.hashes, room.skip)
                room.pages = []
            return
        if room.pages:
            self.retire(room)
        if room.quarantined:
            self.pool.lift(room.targets)
            room.quarantined = False
        del self.rooms.closing[room.id]
        self.peers.forget(room)
        if self.config.role == "prefill" and room.instance:
            self.handover.say_quiet(room.link, room.id)

    def retire(self, room: Room) -> None:
        """Pages back to the pool; those whose KV is whole into the cache."""
        valid = 0
        if self.config.radix:
            valid = min(max(room.reported // self.page_size, room.shared), len(room.hashes), len(room.pages))
        self.pool.retire(room.pages, room.hashes, valid)
        room.pages = []
        room.capacity = 0

    # -------------------------------------------------------------------------------------------------------- ranks

    def reported(self, event: Reported) -> None:
        """A rank ran a step. When all have and agree, the step is settled."""
        if event.epoch != self.config.epoch or self.state == "starting":
            self.stale("report")
            return
        step = self.steps.report(event.rank, event.n, event.digest, self.at)
        if isinstance(step, str):
            self.fault("sequence", step, event.rank)
            return
        if event.flaw:
            self.fault("report", event.flaw, event.rank, [step])
            return
        if event.rank == 0:
            step.stops, step.filled = event.stops, event.filled
        if step.mismatch:
            self.fault("digest", step.mismatch, event.rank, [step])
            return
        opened = self.steps.open
        while opened and not opened[0].missing:
            self.settle(opened.popleft())

    def settle(self, step: OpenStep) -> None:
        """All ranks agree on a step: its tokens leave, rooms advance or end, pages of ended ones come free."""
        self.steps.agreed_at = self.at
        dropped: list[int] = []
        stops, filled = step.stops, step.filled
        done: list[tuple[Room, str]] = []
        prefilled = drawn = 0
        sample = -1
        running, ended = r.RUNNING, r.ENDED
        for row, room in zip(step.rows, step.rooms):
            busy = room.busy = room.busy - 1
            state = room.state
            if state == running:  # the common case: one token more
                sample += 1
                room.reported = row.start + 1
                emitted = room.emitted = room.emitted + 1
                drawn += 1
                if stops and sample in stops:
                    done.append((room, "stop"))
                elif emitted >= room.max_new:
                    done.append((room, "length"))
                continue
            if row.sample:
                sample += 1
            if state == ended:
                if row.sample:
                    dropped.append(sample)
                if not busy:
                    self.let_go(room)
                continue
            room.reported = row.start + row.count
            prefilled += row.count
            if not row.sample:
                continue
            drawn += 1
            room.emitted += 1
            self.prompt_done(room)
            if room.instance:
                continue
            if stops and sample in stops:
                done.append((room, "stop"))
            elif room.emitted >= room.max_new:
                done.append((room, "length"))
        if filled:
            size = self.page_size
            samplers = [room for row, room in zip(step.rows, step.rooms) if row.sample]
            for index, chain in filled:
                room = samplers[index]
                if (room.length + room.emitted) == (len(room.hashes) + 1) * size and index not in dropped:
                    room.hashes.append(chain)
        counters = self.counters
        counters["steps"] += 1
        counters["prefill_tokens"] += prefilled
        counters["decode_tokens"] += drawn
        counters["surplus_rows"] += len(dropped)
        if sample >= 0:
            self.out.append(Release(step.n, dropped))
        for room, reason in done:
            self.end(room, r.FINISH, reason, "", retryable=False)
        if self.config.role == "prefill":
            for room in step.rooms:
                if room.state == r.SENDING:
                    self.handover.hand(room)
        self.peers.agreed(step.n)

    def prompt_done(self, room: Room) -> None:
        """The prompt is computed and the first token agreed: go on here, or hand over."""
        if self.config.radix:
            self.pool.publish(room.pages, room.hashes, min(room.length // self.page_size, len(room.hashes)))
        if room.instance:
            self.rooms.move(room, r.COMPUTED)
            room.first = True
            self.scheduler.give_slot(room)
        else:
            self.rooms.move(room, r.JOIN)

    def settled(self, event: Settled) -> None:
        if event.epoch == self.config.epoch:
            self.handover.settled(event)
        else:
            self.stale("sent")

    def rank_said(self, event: RankSaid) -> None:
        message = event.message
        if message.epoch != self.config.epoch or not 0 <= message.rank < self.config.tp_size:
            self.stale(type(message).__name__.lower())
        elif isinstance(message, Progress):
            self.steps.progress(message.rank, message.ticks, self.at)
            if message.moving or message.checking:
                self.handover.advanced(message)
                self.fences.advanced(message.rank)
        elif isinstance(message, Checked):
            self.handover.checked(message)
        elif isinstance(message, Joined):
            self.rank_joined(message)
        elif isinstance(message, Dropped):
            self.peers.dropped(message)
        elif isinstance(message, Compiled):
            self.admission.compiled(message)
        else:
            self.rank_fault(message)

    def rank_joined(self, message: Joined) -> None:
        """When all ranks are there and alike, the engine is ready."""
        if self.joined[message.rank] is not None:
            self.fault("joined_twice", f"rank {message.rank} joined twice in epoch {message.epoch}", message.rank)
            return
        self.joined[message.rank] = message
        self.memories[message.rank] = message.memory
        if any(x is None for x in self.joined):
            return
        first = self.joined[0]
        assert first is not None
        for other in self.joined:
            assert other is not None
            for name in ("fingerprint", "num_pages", "page_size", "context_length"):
                if getattr(other, name) != getattr(first, name):
                    detail = f"{name}: rank 0 {getattr(first, name)!r}, rank {other.rank} {getattr(other, name)!r}"
                    self.fault("unlike_ranks", detail, other.rank)
                    return
        if first.page_size != self.page_size:
            self.fault("unlike_ranks", f"page size: leader {self.page_size}, ranks {first.page_size}", 0)
            return
        self.fingerprint = first.fingerprint
        self.context_length = first.context_length
        self.page_bytes = sum(len(m.shares) * m.share_bytes for m in self.memories if m is not None)
        self.pool = Pool(first.num_pages)
        self.state = "ready"
        self.steps.issued_at = self.steps.agreed_at = self.at
        self.out.append(Greet())

    def rank_fault(self, message: RankFault) -> None:
        due = self.steps.expected[message.rank]
        steps = [x for x in self.steps.open if x.n >= due and message.in_step]
        self.fault(message.name or "rank", f"rank {message.rank}: {message.detail}", message.rank, steps)

    def peer_said(self, event: PeerSaid) -> None:
        if self.config.role == "both" or self.state == "starting":
            self.stale(type(event.message).__name__.lower())
            return
        self.peers.hear(event.link, event.message, self.at)

    # -------------------------------------------------------------------------------------------------------- clock

    def tick(self, event: Tick) -> None:
        """Everything that hangs on time: deadlines of steps, transfers and rooms, leases, beats, the idle step."""
        at = self.at
        if self.state == "starting":
            return
        rank = self.steps.overdue(at)
        if rank >= 0:
            steps = list(self.steps.open)
            detail = f"rank {rank} made no progress in step {steps[0].n} for {self.config.step_deadline_s} s"
            self.fault("stuck", detail, rank, steps)
            return
        for room in list(self.rooms.open.values()):
            if at <= room.deadline or room.state == r.ENDED:
                continue
            if room.state == r.PROMISED:  # the promise's time, not the request's: another attempt may do
                self.end(room, r.DEADLINE, "peer", "granted, but its submit never came", retryable=True)
            else:
                self.end(room, r.DEADLINE, "deadline", f"its time was up in state {room.state}", retryable=False)
        for gateway, heard in list(self.gateways.items()):
            if at - heard > self.config.lease_s:
                del self.gateways[gateway]
                for room in list(self.rooms.open.values()):
                    if room.gateway == gateway:
                        self.end(room, r.ABORT, "abort", "its gateway fell silent", retryable=False)
        if self.config.role != "both":
            self.peers.tick(at)
            self.handover.tick(at)
            self.fences.tick(at)
            if self.state == "faulted":
                return
        if not self.steps.open and at - self.steps.issued_at >= self.config.idle_step_s:
            self.scheduler.admit()
            self.scheduler.plan(idle=True)

    def forgive(self, gap: float) -> None:
        """This process slept for `gap` seconds: nobody else is blamed for it. Rooms' deadlines stand."""
        self.steps.forgive(gap)
        self.handover.forgive(gap)
        self.fences.forgive(gap)
        for gateway in self.gateways:
            self.gateways[gateway] += gap
        for link in self.peers.links.values():
            link.heard_at += gap

    def fault(self, name: str, detail: str, rank: int = -1, steps: Sequence[OpenStep] = ()) -> None:
        """The epoch is over: every open room ends, retryable; only those in the failing step are charged.

        `steps`: those that may be it, oldest first. A rank may break in the step after the one that it owes a report
        of, which it launches while that one runs; a lone request shares neither, so who is alone is charged alone.
        """
        charged = list(dict.fromkeys(room.id for step in steps for room in step.rooms if room.state != r.ENDED))
        for room in list(self.rooms.open.values()):
            self.end(room, r.FAULT, "fault", f"{name}: {detail}", retryable=True, charged=room.id in charged)
        self.state = "faulted"
        self.out.append(Fault(name, detail, rank, steps[0].n if steps else 0, charged))

    def stale(self, what: str) -> None:
        """A message that changes nothing: late, doubled, or of another instance."""
        self.stales[what] = self.stales.get(what, 0) + 1
        self.counters["stale_messages"] += 1

    def status(self, at: float, detail: str = "") -> Status:
        """The engine's state of work at `at`; changes nothing."""
        return status(self, at, detail)
