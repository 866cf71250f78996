"""Grammars in the leader: compiled before any row begins with one, in nobody's way; a bad one ends its own requests."""

from pathlib import Path

import pytest

from closeranks.engine.leader import grammars as module
from closeranks.engine.leader import snapshot
from closeranks.engine.leader.log import Writer
from closeranks.engine.leader.replay import replay
from closeranks.protocol import Abort, Attach, Compiled, RankFault
from tests.engine.leader.drive import Driven
from tests.engine.leader.stand_in import continuation


def compiled(engine: Driven, number: int, error: str = "", size: int = 100, rank: int = 0) -> None:
    engine.rank(Compiled(1, rank, number, error, size))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])
def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it(overlap: bool) -> None:
    engine = Driven(overlap=overlap, max_running=2)
    held = engine.submit(1, 5, 3, grammar="ebnf:a")
    same = engine.submit(2, 5, 3, grammar="ebnf:a")
    free = engine.submit(3, 6, 4)
    assert [(order.number, order.grammar) for order in engine.orders] == [(1, "ebnf:a")], "once"
    engine.run()
    assert engine.said(free) == continuation(engine.prompt(3, 6), 4)
    assert not engine.said(held)
    assert engine.leader.status(engine.now).waiting == 2
    compiled(engine, 1)
    engine.run()
    for room in (held, same):
        assert engine.said(room) == continuation(engine.prompt(room.id, 5), 3)
    later = engine.submit(4, 5, 3, grammar="ebnf:a")
    assert len(engine.orders) == 1
    engine.run()
    assert engine.ended[later].reason == "length"


def test_a_grammar_that_cannot_be_compiled_ends_its_requests_with_the_reason() -> None:
    engine = Driven()
    bad = engine.submit(1, 5, 3, grammar="ebnf:(")
    good = engine.submit(2, 5, 3, grammar="ebnf:a")
    compiled(engine, 1, "days.pattern: cannot be enforced: no")
    compiled(engine, 2)
    engine.run()
    assert (engine.ended[bad].reason, engine.ended[bad].retryable) == ("invalid", False)
    assert engine.ended[bad].detail == "days.pattern: cannot be enforced: no"
    assert engine.ended[good].reason == "length"
    again = engine.submit(3, 5, 3, grammar="ebnf:(")
    assert engine.ended[again].detail == "days.pattern: cannot be enforced: no"
    assert len(engine.orders) == 2, "known to be bad"
    assert not engine.leader.rooms.open
    assert not engine.desk.book.entries


def test_an_abort_ends_a_waiting_request_at_once() -> None:
    engine = Driven()
    room = engine.submit(1, 5, 3, grammar="ebnf:a")
    engine.gateway(Abort(room, "client left"))
    assert engine.ended[room].reason == "abort"
    compiled(engine, 1)
    engine.run()
    assert not engine.said(room)


def test_nothing_is_compiled_for_those_who_left() -> None:
    """A burst of clients that ask and go must not hold up the next one for as long as all their schemas take."""
    engine = Driven()
    left = [engine.submit(n, 5, 3, grammar=f"ebnf:{min(n, 3)}") for n in (1, 2, 3, 4)]
    for room in left[:3]:
        engine.gateway(Abort(room, "client left"))
    assert [number for order in engine.orders for number in order.drop] == [1, 2], "one more waits for the third"
    compiled(engine, 1)
    compiled(engine, 3)
    engine.run()
    assert engine.ended[left[3]].reason == "length"
    again = engine.submit(5, 5, 3, grammar="ebnf:1")
    assert (engine.orders[-1].number, engine.orders[-1].grammar) == (4, "ebnf:1")
    compiled(engine, 4)
    engine.run()
    assert engine.ended[again].reason == "length"


def test_strange_answers_change_nothing() -> None:
    engine = Driven(tp_size=2)
    room = engine.submit(1, 5, 3, grammar="ebnf:a")
    compiled(engine, 1, rank=1)
    compiled(engine, 7, "of nothing")
    engine.rank(Compiled(0, 0, 1, "of an earlier epoch"))
    engine.run()
    assert not engine.said(room)
    assert room in engine.leader.rooms.open
    compiled(engine, 1)
    compiled(engine, 1, "said twice")
    engine.run()
    assert engine.ended[room].reason == "length"


def test_a_compiler_that_is_stuck_ends_its_requests_and_the_epoch() -> None:
    engine = Driven()
    engine.submit(1, 5, 3, grammar="ebnf:first")
    stuck = engine.submit(2, 5, 3, grammar="ebnf:slow", deadline_s=500.0)
    behind = engine.submit(3, 5, 3, grammar="ebnf:behind", deadline_s=500.0)

    def pass_time(seconds: float) -> None:
        for _ in range(int(seconds)):
            engine.tick(1.0)
            engine.gateway(Attach("g"))
            engine.run()

    pass_time(50)
    compiled(engine, 1)
    pass_time(50)
    assert not engine.faults, "each grammar has its own time"
    pass_time(15)
    assert [fault.name for fault in engine.faults] == ["grammar_stuck"]
    assert (engine.ended[stuck].reason, engine.ended[stuck].retryable) == ("invalid", False)
    assert (engine.ended[behind].reason, engine.ended[behind].retryable) == ("fault", True)


def test_what_nobody_uses_goes_beyond_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 250)
    engine = Driven()
    for number in range(1, 6):
        engine.submit(number, 5, 2, grammar=f"ebnf:{number}")
        compiled(engine, number)
        engine.run()
    dropped = [number for order in engine.orders for number in order.drop]
    assert dropped == [1, 2, 3]
    engine.submit(9, 5, 2, grammar="ebnf:1")
    assert (engine.orders[-1].number, engine.orders[-1].grammar) == (6, "ebnf:1")
    assert len(engine.desk.grammars.known) == len(engine.desk.grammars.numbers) == 3


def test_nothing_follows_from_a_grammar_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    engine = Driven()
    engine.submit(1, 5, 2, grammar="ebnf:1")
    engine.rank(RankFault(1, 0, "ValueError", "no"))
    orders = list(engine.orders)
    compiled(engine, 1)
    assert engine.orders == orders, "not even the order to drop what nobody uses any more"


def test_decode_grants_and_prefill_computes_after_compiling() -> None:
    engine = Driven(role="decode")
    room = engine.submit(1, 5, 3, grammar="ebnf:a", peer="p")
    engine.run()
    assert engine.leader.rooms.open[room].state == "waiting"
    compiled(engine, 1, "no")
    assert engine.ended[room].reason == "invalid"


def test_waiting_for_a_grammar_is_in_the_log_and_in_a_snapshot(tmp_path: Path) -> None:
    engine = Driven(overlap=True)
    engine.desk.writer = Writer(tmp_path, engine.config, 1 << 12, 50)
    engine.desk.writer.begin(0.0, engine.now, snapshot.take(engine.leader))
    for number in range(1, 150):
        engine.submit(number, 5, 3, grammar=f"ebnf:{number}")
        if number % 3:
            compiled(engine, number, "bad" if number % 5 == 0 else "")
        engine.run()
    engine.desk.writer.flush()
    found = replay(tmp_path)
    assert found.difference is None
    assert found.segments > 1
