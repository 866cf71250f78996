"""Any message in any state: the leader counts what it cannot use, never raises, and keeps its books."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from closeranks.protocol import (
    Abort,
    Arrived,
    Attach,
    Beat,
    Checked,
    Compiled,
    Drain,
    Dropped,
    End,
    Fingerprint,
    Grant,
    Hello,
    Progress,
    Quiet,
    RoomId,
    Sampling,
    Sent,
    Submit,
)
from tests.engine.leader.drive import FINGERPRINT, Driven
from tests.simulation import invariants

STATES = ["waiting", "reserved", "checking", "quarantined", "handed", "settling", "nonsense", ""]


class Fuzz:
    """Draws messages from small pools of names, so that they meet."""

    def __init__(self, seed: int, role: str) -> None:
        self.random = random.Random(seed)
        self.role = role
        self.engine = Driven(role=role, num_pages=24, max_running=3, chunk=6, tp_size=self.random.choice([1, 2]))
        self.links = ["ipc://p", "ipc://q"] if role == "decode" else ["peer:x", "peer:y"]
        self.acts: list[Callable[[], None]] = [
            self.submit, self.submit, self.abort, self.answer, self.answer, self.answer, self.time, self.hello,
            self.grant, self.arrived, self.end, self.quiet, self.beat, self.sent, self.checked, self.dropped,
            self.progress, self.compiled,
        ]  # fmt: skip

    def room(self) -> RoomId:
        return RoomId(self.random.randint(1, 4), self.random.randint(1, 3))

    def instance(self) -> int:
        return self.random.choice([8, 8, 8, 9, 0, 1 << 62])

    def number(self) -> int:
        return self.random.choice([0, 1, 2, 3, 5, 40, -1, 1 << 40])

    def rank(self) -> int:
        return self.random.randrange(self.engine.config.tp_size)

    def epoch(self) -> int:
        return self.random.choice([1, 1, 1, 1, 2])

    def peer(self, message: Any) -> None:
        self.engine.desk.from_peer(self.random.choice(self.links), message, self.engine.now)

    def submit(self) -> None:
        length = self.random.choice([1, 4, 5, 8, 13])
        peer = (
            "" if self.role == "both" and self.random.random() < 0.9 else self.random.choice(["ipc://p", "ipc://q", ""])
        )
        self.engine.ended.clear()  # rooms are drawn again and again here; the simulation checks that ends are said once
        tokens = [self.random.randrange(5) for _ in range(length)]
        new = self.random.choice([1, 2, 9, 300])
        deadline = self.random.choice([0.5, 30.0, 60.0])
        alone = self.random.random() < 0.2
        sampling = Sampling(grammar=self.random.choice(["", "", "", "ebnf:a", "ebnf:b", "ebnf:("]))
        self.engine.gateway(
            Submit(self.room(), "r", tokens, length, new, sampling, [1], deadline, peer, alone),
            self.random.choice(["g", "h"]),
        )

    def abort(self) -> None:
        self.engine.ended.clear()
        self.engine.gateway(Abort(self.room(), "gone"))

    def answer(self) -> None:
        self.engine.ended.clear()
        self.engine.answer()

    def time(self) -> None:
        self.engine.ended.clear()
        self.engine.gateway(Attach("g"))
        self.engine.tick(self.random.choice([0.1, 0.5, 1.5]))

    def hello(self) -> None:
        fingerprint = FINGERPRINT
        if self.random.random() < 0.1:
            fingerprint = Fingerprint(2, "w", "", "", "", "")
        role = self.random.choice(["prefill", "decode", "decode" if self.role == "prefill" else "prefill"])
        epoch = self.random.randint(1, 3)
        self.peer(Hello("other", 5, role, epoch, self.instance(), epoch - 1, fingerprint, []))

    def grant(self) -> None:
        pages = [self.number() for _ in range(self.random.randint(0, 4))]
        self.peer(
            Grant(
                self.room(),
                self.instance(),
                self.random.choice([0, 0, 0, 1, -1]),
                pages,
                self.random.choice([7, 7, 7, 8]),
            )
        )

    def arrived(self) -> None:
        sums = [[1] * self.engine.config.tp_size for _ in range(self.random.randint(0, 4))]
        self.peer(Arrived(self.room(), self.instance(), 1, None, sums, self.number()))

    def end(self) -> None:
        self.peer(End(self.room(), self.instance(), "abort", "", self.random.random() < 0.5))

    def quiet(self) -> None:
        self.peer(Quiet(self.room(), self.instance()))

    def beat(self) -> None:
        rooms = [(self.room(), self.random.choice(STATES)) for _ in range(self.random.randint(0, 4))]
        self.peer(Beat("other", 1, self.instance(), rooms))

    def sent(self) -> None:
        error = self.random.choice(["", "broken"])
        sums = [[1] for _ in range(self.random.randint(0, 3))]
        self.engine.rank(Sent(self.epoch(), self.rank(), self.number(), error, sums))

    def checked(self) -> None:
        self.engine.rank(Checked(self.epoch(), self.rank(), self.room(), self.random.choice([[], [], [(1, 0)]])))

    def dropped(self) -> None:
        self.engine.rank(Dropped(self.epoch(), self.rank(), self.instance()))

    def progress(self) -> None:
        self.engine.rank(Progress(self.epoch(), self.rank(), self.number(), self.number()))

    def compiled(self) -> None:
        number = self.random.choice([*self.engine.desk.grammars.numbers, self.number()])
        self.engine.ended.clear()
        self.engine.rank(Compiled(self.epoch(), self.rank(), number, self.random.choice(["", "", "bad"]), 1 << 26))

    def check_grammars(self) -> None:
        """Every entry of the book is counted once at its grammar, and no row began with one that is not there."""
        book, grammars = self.engine.desk.book, self.engine.desk.grammars
        used = [entry.grammar for entry in book.entries.values() if entry.grammar is not None]
        for grammar in grammars.numbers.values():
            assert grammar.users == sum(other is grammar for other in used)
            assert grammars.known[grammar.text] is grammar
        for room in self.engine.leader.rooms.open.values():
            grammar = book.entries[room.id].grammar if room.id in book.entries else None
            if room.slot >= 0 and grammar is not None:
                assert not grammar.pending
                assert not grammar.error


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("block", range(4))
def test_nothing_raises_and_pages_are_conserved(role: str, block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        fuzz = Fuzz(seed, role)
        trace = []
        try:
            for _ in range(80):
                act = fuzz.random.choice(fuzz.acts)
                trace.append(act.__name__)
                act()
                invariants.after_event(fuzz.engine.leader, 0)
                fuzz.check_grammars()
                if fuzz.engine.faults:
                    break
            if fuzz.random.random() < 0.3:
                fuzz.engine.gateway(Drain())
        except Exception as error:
            raise AssertionError(f"role {role}, seed {seed}: {' '.join(trace)}") from error
