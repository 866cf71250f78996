"""Between the core and the sockets: messages become events, effects become messages. Sans-IO.

The desk keeps the book (tokens, log-probabilities, checksums), writes events and marks to the step log, and hands what
must go out to a `Wire`. The shell is the wire over ZeroMQ; the simulation is another one.
"""

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ...protocol import (
    Abort,
    Arrived,
    Attach,
    Beat,
    Begin,
    Check,
    Compile,
    Compiled,
    Drain,
    End,
    Ended,
    FromRank,
    Grant,
    Hello,
    Output,
    PeerMessage,
    Quiet,
    RankFault,
    Report,
    RoomId,
    Row,
    Sent,
    Step,
    Submit,
    ToEngine,
    Tokens,
    Welcome,
    encode,
)
from . import rooms as r
from . import snapshot
from .book import Book
from .core import Leader
from .events import (
    Aborted,
    Attached,
    Dial,
    Drained,
    Effect,
    Event,
    Fault,
    Forget,
    Greet,
    Hangup,
    PeerSaid,
    Plan,
    RankSaid,
    Release,
    ReleaseFirst,
    Reported,
    SayArrived,
    SayEnded,
    SayPeer,
    Settled,
    Submitted,
    Tick,
)
from .grammars import PATIENCE_S, Grammars
from .log import Mark, Words, Writer


class Wire(Protocol):
    """Where the desk's messages go. `to_*` never wait."""

    def to_ranks(self, message: Step | Welcome | Compile) -> None: ...

    def to_gateway(self, gateway: str, message: Output) -> None: ...

    def to_peer(self, link: str, message: PeerMessage) -> None: ...

    def say_status(self, gateway: str) -> None: ...

    def dial(self, endpoint: str) -> None: ...

    def hang_up(self, endpoint: str) -> None: ...

    def fault(self, fault: Fault) -> None: ...


class Desk:
    """One leader with its book and log."""

    def __init__(self, leader: Leader, book: Book, wire: Wire, writer: Writer | None, log_tokens: bool) -> None:
        self.leader = leader
        self.book = book
        self.wire = wire
        self.writer = writer
        self.words = writer if log_tokens else None
        self.prefill = leader.config.role == "prefill"
        self.epoch = leader.config.epoch
        self.grammars = Grammars(self.epoch, wire.to_ranks)
        self.outputs: dict[str, tuple[list[Tokens], list[Ended]]] = {}
        self.carriers: dict[type, Callable[[Any], None]] = {
            Release: self.release,
            ReleaseFirst: self.release_first,
            SayEnded: self.say_ended,
            SayPeer: self.say_peer,
            SayArrived: self.say_arrived,
            Forget: self.forget,
            Dial: self.dial,
            Hangup: self.hang_up,
            Greet: self.greet,
        }

    # ----------------------------------------------------------------------------------------------------- messages

    def from_rank(self, message: FromRank, now: float) -> None:
        """A message of a rank; `message.rank` is known to be the sender."""
        if isinstance(message, Report):
            if message.rank == 0 and message.epoch == self.epoch:
                self.handle(self.book.report(message, now))
            else:
                self.handle(Reported(now, message.epoch, message.rank, message.n, message.digest))
        elif isinstance(message, Sent):
            error = self.book.sent(message) if message.epoch == self.epoch else message.error
            self.handle(Settled(now, message.epoch, message.rank, message.transfer, error, message.unsure))
            if message.transfer not in self.leader.handover.transfers:
                self.book.settled(message.transfer)
        else:
            if isinstance(message, Compiled):
                if message.rank != 0 or message.epoch != self.epoch:
                    return  # the sampling rank alone compiles
                if self.leader.state != "faulted":  # else its order to drop others would follow the fault
                    self.grammars.compiled(message, now)
            self.handle(RankSaid(now, message))

    def from_gateway(self, gateway: str, message: ToEngine, now: float) -> None:
        if isinstance(message, Submit):
            self.submit(now, gateway, message)
        elif isinstance(message, Attach):
            self.handle(Attached(now, gateway))
            self.wire.say_status(gateway)
        elif isinstance(message, Abort):
            self.handle(Aborted(now, gateway, message.room, message.reason))
        elif isinstance(message, Drain):
            self.handle(Drained(now))

    def submit(self, now: float, gateway: str, message: Submit) -> None:
        flaw, hashes, form = "", list[bytes](), 0
        text = message.sampling.grammar
        fresh = message.room not in self.book.entries  # a double may say anything: what came first counts
        length = len(message.tokens)
        if not 0 < message.deadline_s < math.inf:
            flaw = f"deadline_s is {message.deadline_s}"
        elif not 0 < message.prompt_length <= length:
            flaw = f"prompt_length is {message.prompt_length} with {length} tokens"
        else:
            try:
                hashes = self.book.submit(message, gateway)
            except OverflowError:
                flaw = "a token id is negative or beyond 32 bits"
        if fresh and not flaw and text and self.leader.state == "ready":
            grammar = self.grammars.ask(text, now)
            flaw, form = grammar.error, grammar.number if grammar.pending else 0
            self.book.uses(message.room, grammar)
        self.handle(
            Submitted(
                now,
                gateway,
                message.room,
                message.rid,
                length,
                message.max_new_tokens,
                hashes,
                message.deadline_s,
                message.peer,
                message.alone,
                flaw,
                form,
            )
        )
        if message.room not in self.leader.rooms.open:
            self.forget_room(message.room)
        elif self.words is not None:
            self.words.write(Words((message.room.id, message.room.generation), 0, message.tokens))

    def from_peer(self, link: str, message: PeerMessage, now: float) -> None:
        said: Hello | Grant | End | Quiet | Beat
        if isinstance(message, Arrived):
            room = self.leader.rooms.open.get(message.room)
            targets = None
            if room is not None and room.state == r.RESERVED and room.instance == message.instance:
                targets = room.targets
            self.handle(PeerSaid(now, link, self.book.arrived(message, targets)))
        else:
            said = message
            self.handle(PeerSaid(now, link, said))

    # ------------------------------------------------------------------------------------------------------ effects

    def handle(self, event: Event) -> None:
        """Let the core answer and carry the answer out: the next step first, the ranks wait for it; then the log."""
        writer = self.writer
        if writer is not None and writer.full and event.at >= writer.retry_at:
            fresh = writer.number == 0 and not self.leader.started
            writer.begin(time.time(), event.at, b"" if fresh else snapshot.take(self.leader))
        try:
            effects = self.leader.handle(event)
        except BaseException:
            if writer is not None:
                writer.write(event)
                writer.flush()
            raise
        if not effects:
            if writer is not None:
                writer.write(event)
            return
        for effect in effects:
            if type(effect) is Plan:
                self.issue(effect)
        fault: Fault | None = None
        carriers = self.carriers
        for effect in effects:
            if type(effect) is Fault:
                fault = effect
            elif type(effect) is not Plan:
                carriers[type(effect)](effect)
        if self.outputs:
            for gateway, (tokens, ended) in self.outputs.items():
                self.wire.to_gateway(gateway, Output(tokens, ended))
            self.outputs = {}
        if writer is not None:
            writer.write(event)
            writer.write(Mark(digest(effects)))
        if fault is not None:
            self.wire.fault(fault)

    def issue(self, plan: Plan) -> None:
        """Fill tokens and sums into a step; every rank gets the same."""
        book, rows, checks = self.book, plan.rows, plan.checks
        book.issued(plan)
        if plan.begins:
            rows = list(rows)
            for (index, room), table in zip(plan.begins, plan.tables):
                entry, row = book.entries[room], rows[index]
                begin = Begin(entry.sampling, list(entry.tokens), entry.prompt_length, table)
                rows[index] = Row(row.slot, row.start, row.count, row.pages, row.sample, begin)
        if checks:
            checks = [Check(c.room, c.pages, [book.entries[c.room].sums[page] for page in c.pages]) for c in checks]
        self.wire.to_ranks(Step(self.epoch, plan.n, rows, plan.copies, plan.sends, checks, plan.meet, plan.drop))

    def release(self, effect: Release) -> None:
        """The tokens of an agreed step leave."""
        step = self.book.open.pop(effect.n)
        dropped, logprobs, outputs = effect.dropped, step.logprobs, self.outputs
        if self.prefill:
            for number, entry in enumerate(step.entries):
                if entry is not None:
                    entry.top = logprobs[number] if logprobs else None
            return
        number = -1
        for token, entry in zip(step.tokens, step.entries):
            number += 1
            if entry is None or (dropped and number in dropped):
                continue
            index = entry.index
            entry.index = index + 1
            output = outputs.get(entry.gateway)
            if output is None:
                output = self.output(entry.gateway)
            if logprobs:
                top = logprobs[number]
                output[0].append(Tokens(entry.room, index, [token], [] if top is None else [top]))
            else:
                output[0].append(Tokens(entry.room, index, [token]))
            if self.words is not None:
                self.words.write(Words((entry.room.id, entry.room.generation), index, [token]))

    def release_first(self, effect: ReleaseFirst) -> None:
        entry = self.book.entries[effect.room]
        top = [] if entry.top is None else [entry.top]
        token = entry.tokens[entry.index]
        self.output(entry.gateway)[0].append(Tokens(entry.room, entry.index, [token], top))
        if self.words is not None:
            self.words.write(Words((entry.room.id, entry.room.generation), entry.index, [token]))
        entry.index += 1

    def output(self, gateway: str) -> tuple[list[Tokens], list[Ended]]:
        output = self.outputs.get(gateway)
        if output is None:
            output = self.outputs[gateway] = ([], [])
        return output

    def say_ended(self, effect: SayEnded) -> None:
        self.forget_room(effect.ended.room)
        self.output(effect.gateway)[1].append(effect.ended)

    def say_peer(self, effect: SayPeer) -> None:
        self.wire.to_peer(effect.link, effect.message)

    def say_arrived(self, effect: SayArrived) -> None:
        instance = self.leader.config.instance
        self.wire.to_peer(effect.link, self.book.arrival(effect.room, instance, effect.pages, effect.cached_tokens))

    def forget(self, effect: Forget) -> None:
        self.forget_room(effect.room)

    def forget_room(self, room: RoomId) -> None:
        entry = self.book.entries.pop(room, None)
        if entry is not None and entry.grammar is not None:
            self.grammars.leave(entry.grammar)

    def dial(self, effect: Dial) -> None:
        self.wire.dial(effect.endpoint)

    def hang_up(self, effect: Hangup) -> None:
        self.wire.hang_up(effect.endpoint)

    def greet(self, effect: Greet) -> None:
        self.book.join([m for m in self.leader.memories if m is not None])
        self.wire.to_ranks(Welcome(self.epoch))
        for gateway in self.leader.gateways:
            self.wire.say_status(gateway)

    def tick(self, now: float) -> None:
        late = self.grammars.overdue(now)
        if late is not None:
            error = f"the grammar was not compiled within {PATIENCE_S:g} s"
            self.from_rank(Compiled(self.epoch, 0, late.number, error), now)  # before all others end retryable
            self.from_rank(RankFault(self.epoch, 0, "grammar_stuck", error), now)
        self.handle(Tick(now))
        if self.writer is not None:
            self.writer.flush()


def digest(effects: list[Effect]) -> bytes:
    """Hash of what the core answered, as marks in the log hold it."""
    return hashlib.blake2b(encode(effects), digest_size=8).digest()


Undecodable = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)
