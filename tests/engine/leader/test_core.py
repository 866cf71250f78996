"""The leader's decisions, one at a time: admission, batching, stops, retract, lone requests, ends, faults."""

import pytest

from closeranks.protocol import (
    Abort,
    Attach,
    Beat,
    Checked,
    Drain,
    End,
    Fingerprint,
    Grant,
    Hello,
    Memory,
    Progress,
    RankFault,
    Report,
    RoomId,
    Submit,
)
from tests.engine.leader.drive import FINGERPRINT, Driven
from tests.engine.leader.stand_in import continuation

OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "serial"])


@OVERLAP
def test_many_requests_give_the_right_tokens_and_leave_nothing(overlap: bool) -> None:
    engine = Driven(num_pages=64, overlap=overlap, max_running=4, chunk=8)
    rooms = [engine.submit(i, 3 + i, 5) for i in range(1, 12)]
    engine.run()
    for i, room in enumerate(rooms, 1):
        assert engine.said(room) == continuation(engine.prompt(i, 3 + i), 5)
        assert engine.ended[room].reason == "length"
    assert engine.leader.pool.owned == 0
    assert not engine.leader.rooms.open
    assert not engine.leader.rooms.closing


@OVERLAP
def test_nothing_is_computed_beyond_a_length_stop(overlap: bool) -> None:
    engine = Driven(overlap=overlap)
    engine.submit(1, 5, 3)
    rows = []
    while engine.steps:
        rows += [row for step in engine.answer() for row in step.rows]
    assert [(row.start, row.count) for row in rows] == [(0, 5), (5, 1), (6, 1)]
    assert engine.leader.counters["surplus_rows"] == 0


def test_under_overlap_the_row_after_a_stop_token_is_dropped() -> None:
    engine = Driven(overlap=True)
    right = continuation(engine.prompt(1, 5), 9)
    room = engine.submit(1, 5, 9, stop_ids=[right[3]])
    engine.run()
    assert engine.said(room) == right[: right.index(right[3]) + 1]
    assert engine.ended[room].reason == "stop"
    assert engine.leader.counters["surplus_rows"] == 1


def test_decode_rows_come_first_and_prompts_in_chunks() -> None:
    engine = Driven(num_pages=64, chunk=8, overlap=False)
    engine.submit(1, 4, 20)
    engine.answer(2)
    engine.submit(2, 20, 2)
    engine.answer()
    shapes = [[(row.count, row.sample) for row in step.rows] for step in (engine.answer()[0] for _ in range(3))]
    assert shapes == [[(1, True), (8, False)], [(1, True), (8, False)], [(1, True), (4, True)]]


def test_a_prefix_is_computed_once_and_at_least_the_last_token_always() -> None:
    engine = Driven(overlap=False)
    tokens = list(range(16))
    for number in (1, 2):
        engine.gateway(Submit(RoomId(number, 1), "r", tokens, 16, 2, *_rest()))
        first = engine.answer()[0].rows[0]
        engine.run()
        assert (first.start, first.count) == ((0, 16) if number == 1 else (12, 4))
    assert engine.ended[RoomId(2, 1)].cached_tokens == 12
    assert engine.said(RoomId(1, 1)) == engine.said(RoomId(2, 1)) == continuation(tokens, 2)


def _rest() -> tuple[object, list[int], float, str]:
    from closeranks.protocol import Sampling

    return Sampling(), [], 60.0, ""


def test_generated_pages_enter_the_cache_too() -> None:
    engine = Driven(overlap=True)
    room = engine.submit(1, 6, 12)
    engine.run()
    tokens = engine.prompt(1, 6) + engine.said(room)
    engine.gateway(Submit(RoomId(2, 1), "r", tokens, 6, 1, *_rest()))
    assert engine.answer()[0].rows[0].start == 16


def test_without_radix_nothing_is_kept() -> None:
    engine = Driven(radix=False)
    engine.submit(1, 10, 3)
    engine.run()
    assert len(engine.leader.pool.free) == engine.leader.pool.total


@OVERLAP
def test_under_pressure_the_last_admitted_goes_and_the_oldest_finishes(overlap: bool) -> None:
    engine = Driven(num_pages=10, overlap=overlap, radix=False)
    rooms = [engine.submit(i, 4, 24) for i in (1, 2, 3)]
    engine.run()
    assert engine.ended[rooms[0]].reason == "length"
    assert engine.ended[rooms[2]].reason == "retract"
    assert engine.ended[rooms[2]].retryable
    assert engine.said(rooms[0]) == continuation(engine.prompt(1, 4), 24)
    assert engine.leader.pool.owned == 0


def test_resubmission_of_the_retracted_never_livelocks() -> None:
    engine = Driven(num_pages=10, overlap=True)
    tokens = {i: engine.prompt(i, 4) for i in (1, 2, 3, 4)}
    generation = dict.fromkeys(tokens, 1)
    for i in tokens:
        engine.submit(i, 4, 24)
    for _ in range(40):
        engine.run()
        again = False
        for i in tokens:
            room = RoomId(i, generation[i])
            if engine.ended[room].retryable:
                again = True
                tokens[i] += engine.said(room)
                generation[i] += 1
                left = 24 - (len(tokens[i]) - 4)
                engine.gateway(Submit(RoomId(i, generation[i]), "r", tokens[i], 4, left, *_rest()))
        if not again:
            break
    for i in tokens:
        full = tokens[i] + engine.said(RoomId(i, generation[i]))
        assert full[4:] == continuation(full[:4], 24)


def test_a_lone_request_shares_no_open_step() -> None:
    engine = Driven(overlap=True, num_pages=64)
    rooms = [engine.submit(i, 4, 8, alone=i == 2) for i in (1, 2, 3)]
    slots_of_two: set[int] = set()
    for _ in range(200):
        if not engine.steps:
            break
        open_rooms = {room.id for step in engine.leader.steps.open for room in step.rooms}
        assert RoomId(2, 1) not in open_rooms or len(open_rooms) == 1
        slots_of_two |= {len(step.rows) for step in engine.answer()}
    assert {engine.ended[room].reason for room in rooms} == {"length"}
    assert 2 in slots_of_two, "the others run together"


def test_too_many_waiting_are_refused_busy_with_a_time_to_come_back() -> None:
    engine = Driven(max_running=1, max_waiting=2)
    rooms = [engine.submit(i, 4, 30) for i in range(1, 6)]
    refused = [room for room in rooms if room in engine.ended]
    assert refused == rooms[3:]
    assert {engine.ended[room].reason for room in refused} == {"busy"}
    assert all(engine.ended[room].retryable and engine.ended[room].retry_after_s > 0 for room in refused)


@pytest.mark.parametrize(
    ("length", "new", "more", "word"),
    [
        (100, 29, {}, "at most 128"),
        (4, 0, {}, "at least 1"),
        (4, 3, {"deadline_s": float("nan")}, "deadline_s"),
        (4, 3, {"deadline_s": -1.0}, "deadline_s"),
        (4, 3, {"peer": "ipc://x"}, "without a peer"),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(
    length: int, new: int, more: dict[str, object], word: str
) -> None:
    engine = Driven(num_pages=32)
    room = engine.submit(1, length, new, **more)
    assert engine.ended[room].reason == "invalid"
    assert not engine.ended[room].retryable
    assert word in engine.ended[room].detail
    assert not engine.desk.book.entries


def test_tokens_that_are_no_token_ids_are_refused() -> None:
    engine = Driven()
    engine.gateway(Submit(RoomId(1, 1), "r", [1, -1], 2, 2, *_rest()))
    engine.gateway(Submit(RoomId(2, 1), "r", [1, 1 << 40], 2, 2, *_rest()))
    assert {x.reason for x in engine.ended.values()} == {"invalid"}
    assert len(engine.ended) == 2


@OVERLAP
@pytest.mark.parametrize("after", range(6))
def test_abort_at_any_step_leaves_nothing(after: int, overlap: bool) -> None:
    engine = Driven(overlap=overlap, chunk=4)
    room = engine.submit(1, 10, 8)
    other = engine.submit(2, 10, 8)
    engine.answer(after)
    engine.gateway(Abort(room, "client gone"))
    assert engine.ended[room].reason == "abort"
    said = engine.said(room)
    engine.run()
    assert engine.said(room) == said, "no token after the end"
    assert engine.said(other) == continuation(engine.prompt(2, 10), 8)
    assert engine.leader.pool.owned == 0
    assert not engine.leader.rooms.closing


def test_pages_of_an_aborted_request_are_not_reused_before_its_open_steps_are_reported() -> None:
    engine = Driven(num_pages=8, overlap=True, radix=False)
    room = engine.submit(1, 8, 8)
    assert len(engine.steps) == 2
    engine.gateway(Abort(room, "gone"))
    assert engine.leader.pool.owned > 0
    engine.answer()
    assert engine.leader.pool.owned > 0
    engine.answer()
    assert engine.leader.pool.owned == 0


def test_abort_before_submit_ends_it_at_its_submit() -> None:
    engine = Driven()
    engine.gateway(Abort(RoomId(1, 1), "gone"))
    room = engine.submit(1, 4, 4)
    assert engine.ended[room].reason == "abort"
    engine.submit(1, 4, 4)  # doubled: said once only
    assert engine.leader.stales["submit"] == 1
    assert not engine.desk.book.entries


def test_a_new_generation_supersedes_the_old_one_and_never_the_other_way_round() -> None:
    engine = Driven()
    first = engine.submit(1, 4, 8)
    third = engine.submit(1, 4, 8, generation=3)
    assert engine.ended[first].reason == "abort"
    second = engine.submit(1, 4, 8, generation=2)
    assert engine.ended[second].reason == "abort"
    engine.run()
    assert engine.ended[third].reason == "length"


def test_a_silent_gateways_rooms_end_and_an_attached_ones_do_not() -> None:
    engine = Driven(num_pages=64, step_deadline_s=100.0)
    mine = engine.submit(1, 4, 30)
    engine.desk.from_gateway("other", Submit(RoomId(2, 1), "r", [1, 2, 3], 3, 30, *_rest()), engine.now)
    for _ in range(7):
        engine.tick(1.0)
        engine.gateway(Attach("g"))
    assert RoomId(2, 1) in engine.ended
    assert mine not in engine.ended


def test_deadline_of_a_request() -> None:
    engine = Driven(step_deadline_s=100.0, max_running=1)
    running, waiting = engine.submit(1, 4, 30, deadline_s=2.0), engine.submit(2, 4, 4, deadline_s=1.0)
    engine.tick(1.5)
    assert engine.ended[waiting].reason == "deadline"
    engine.tick(1.0)
    assert engine.ended[running].reason == "deadline"


def test_draining_goes_on_with_what_is_open_and_refuses_the_rest() -> None:
    engine = Driven()
    room = engine.submit(1, 4, 4)
    engine.gateway(Drain())
    late = engine.submit(2, 4, 4)
    engine.run()
    assert engine.ended[room].reason == "length"
    assert engine.ended[late].reason == "unready"
    assert engine.leader.status(engine.now).state == "draining"


def test_an_idle_engine_gets_an_empty_step_a_second() -> None:
    engine = Driven()
    for _ in range(50):
        engine.tick(0.1)
        engine.answer()
    assert 4 <= engine.leader.steps.last <= 5


# ----------------------------------------------------------------------------------------------------------- faults


def test_digests_that_differ_end_the_epoch_and_no_token_of_the_step_leaves() -> None:
    engine = Driven(tp_size=2, overlap=False)
    room = engine.submit(1, 4, 8)
    step = engine.steps[0]
    for rank in engine.ranks:
        report = rank.execute(step)
        digest = report.digest ^ rank.rank
        engine.rank(Report(1, rank.rank, 1, digest, report.tokens))
    assert engine.said(room) == []
    fault = engine.faults[0]
    assert fault.name == "digest"
    assert fault.n == 1
    ended = engine.ended[room]
    assert (ended.reason, ended.retryable, ended.charged) == ("fault", True, True)
    engine.submit(2, 4, 4)
    assert RoomId(2, 1) not in engine.ended, "nothing follows after a fault"


def test_only_requests_in_the_failing_step_are_charged() -> None:
    engine = Driven(max_running=1, overlap=False)
    inside, outside = engine.submit(1, 4, 8), engine.submit(2, 4, 8)
    engine.rank(RankFault(1, 0, "ValueError", "boom", True))
    assert engine.ended[inside].charged
    assert not engine.ended[outside].charged
    assert engine.ended[outside].retryable


def test_a_fault_of_a_thread_beside_the_steps_charges_nobody() -> None:
    engine = Driven(max_running=1, overlap=False)
    inside = engine.submit(1, 4, 8)
    engine.rank(RankFault(1, 0, "TransferError", "the agent is gone"))
    assert (engine.ended[inside].retryable, engine.ended[inside].charged) == (True, False)


def _two_open_steps() -> tuple[Driven, RoomId, RoomId, RoomId]:
    """Step 2 has the last row of the first request, step 3 begins the second; the third is in neither."""
    engine = Driven(tp_size=2, overlap=True)
    first, behind = engine.submit(1, 4, 2), engine.submit(2, 4, 8)
    engine.answer()
    waiting = engine.submit(3, 4, 8)
    assert [[room.id for room in step.rooms] for step in engine.leader.steps.open] == [[first], [behind]]
    return engine, first, behind, waiting


def test_who_is_in_the_step_behind_the_one_that_is_due_is_charged_with_it() -> None:
    """The rank may have launched it, and broken there: then it never reports the one that it still ran."""
    engine, first, behind, waiting = _two_open_steps()
    engine.rank(RankFault(1, 0, "crash", "was ended by signal 11", True))
    assert [engine.ended[room].charged for room in (first, behind, waiting)] == [True, True, False]
    assert engine.faults[0].n == 2


def test_who_is_in_a_step_that_the_rank_has_reported_is_not_charged() -> None:
    engine, first, behind, waiting = _two_open_steps()
    engine.rank(engine.ranks[0].execute(engine.steps[0]))
    engine.rank(RankFault(1, 0, "ValueError", "boom", True))
    assert [engine.ended[room].charged for room in (first, behind, waiting)] == [False, True, False]
    assert engine.faults[0].n == 3


def test_a_stuck_rank_is_named_after_the_deadline_on_progress() -> None:
    engine = Driven(tp_size=2, step_deadline_s=5.0, overlap=False)
    engine.submit(1, 4, 8)
    engine.rank(engine.ranks[0].execute(engine.steps[0]))
    engine.tick(4.9)
    assert not engine.faults
    engine.tick(0.3)
    assert engine.faults[0].name == "stuck"
    assert engine.faults[0].rank == 1
    assert "rank 1" in engine.faults[0].detail


def test_a_slow_step_that_advances_is_no_fault() -> None:
    engine = Driven(step_deadline_s=5.0)
    engine.submit(1, 4, 8)
    for second in range(30):
        engine.tick(1.0)
        engine.gateway(Attach("g"))
        engine.rank(Progress(1, 0, 1, second + 1))
    assert not engine.faults
    for _ in range(6):  # beats that say the same ticks are no progress
        engine.tick(1.0)
        engine.rank(Progress(1, 0, 1, 30))
    assert engine.faults[0].name == "stuck"


def test_nobody_is_blamed_for_the_time_in_which_this_process_slept() -> None:
    engine = Driven(step_deadline_s=5.0, lease_s=5.0)
    room = engine.submit(1, 4, 8)
    engine.now += 61
    engine.desk.tick(engine.now)
    assert not engine.faults
    assert engine.ended[room].reason == "deadline"
    engine.tick(6.0)
    assert engine.faults


@pytest.mark.parametrize("n", [0, 2, 5, 1 << 40])
def test_a_report_of_another_step_than_is_due_is_a_fault(n: int) -> None:
    engine = Driven(overlap=False)
    engine.submit(1, 4, 8)
    engine.rank(Report(1, 0, n, 5, [1]))
    assert engine.faults[0].name == "sequence"


def test_a_report_with_too_few_tokens_is_a_fault() -> None:
    engine = Driven(overlap=False)
    engine.submit(1, 4, 8)
    engine.rank(Report(1, 0, 1, 5, []))
    assert engine.faults[0].name == "report"


def test_messages_of_another_epoch_are_stale() -> None:
    engine = Driven(overlap=False)
    room = engine.submit(1, 4, 8)
    for message in (Report(2, 0, 1, 5, [1]), Checked(2, 0, room, []), RankFault(9, 0, "x", "y"), Progress(3, 0, 1, 9)):
        engine.rank(message)
    assert not engine.faults
    assert engine.leader.counters["stale_messages"] == 4


def test_unlike_ranks_do_not_start() -> None:
    engine = Driven(tp_size=2, ready=False)
    from closeranks.protocol import Joined

    for rank in engine.ranks:
        engine.rank(Joined(1, rank.rank, 1, FINGERPRINT, rank.memory(), 32 + rank.rank, 4, 256))
    assert engine.faults[0].name == "unlike_ranks"
    assert "num_pages" in engine.faults[0].detail


# ------------------------------------------------------------------------------------------------------------- pairs


def hello(role: str = "decode", fingerprint: Fingerprint = FINGERPRINT, instance: int = 8, ended: int = 0) -> Hello:
    return Hello("other", 5, role, ended + 1, instance, ended, fingerprint, [Memory("shm", 0, [0], 16, 64, b"")])


def test_engines_that_differ_refuse_each_other_with_both_values() -> None:
    engine = Driven(role="decode")
    room = engine.submit(1, 4, 4, peer="ipc://p")
    other = Fingerprint(1, "other weights", "float32", "4 tokens", "tokenizer", "xxh3_64")
    engine.desk.from_peer("ipc://p", hello("prefill", other), engine.now)
    ended = engine.ended[room]
    assert ended.reason == "peer"
    assert "'weights'" in ended.detail
    assert "'other weights'" in ended.detail
    again = engine.submit(2, 4, 4, peer="ipc://p")
    assert engine.ended[again].reason == "peer"


def test_nobody_at_the_peers_address_ends_the_room_retryable() -> None:
    engine = Driven(role="decode")
    room = engine.submit(1, 4, 4, peer="ipc://p")
    for _ in range(7):
        engine.tick(1.0)
        engine.gateway(Attach("g"))
        engine.answer()
    assert engine.ended[room].reason == "peer"
    assert engine.ended[room].retryable
    assert engine.leader.pool.owned == 0


@pytest.mark.parametrize(
    "grant",
    [
        Grant(RoomId(1, 1), 8, 0, [], 7),
        Grant(RoomId(1, 1), 8, 0, [1, 2, 3], 7),
        Grant(RoomId(1, 1), 8, -1, [1, 2, 3], 7),
        Grant(RoomId(1, 1), 8, 5, [1], 7),
        Grant(RoomId(1, 1), 8, 2, [], 7),
        Grant(RoomId(1, 1), 8, 0, [3, 3], 7),
        Grant(RoomId(1, 1), 8, 0, [3, 16], 7),
        Grant(RoomId(1, 1), 8, 0, [3, -1], 7),
    ],
)
def test_a_grant_that_does_not_fit_ends_the_room(grant: Grant) -> None:
    engine = Driven(role="prefill")
    engine.desk.from_peer("peer:x", hello(), engine.now)
    room = engine.submit(1, 8, 4, peer="ipc://d")
    engine.desk.from_peer("peer:x", grant, engine.now)
    assert engine.ended[room].reason == "peer"
    assert any(isinstance(message, End) for _, message in engine.peer)


def test_prefill_computes_nothing_that_was_not_granted() -> None:
    engine = Driven(role="prefill")
    engine.desk.from_peer("peer:x", hello(), engine.now)
    engine.answer()
    engine.submit(1, 8, 4, peer="ipc://d")
    engine.tick(0.5)
    assert not [step for step in engine.steps if step.rows]
    assert engine.leader.pool.owned == 0
    engine.desk.from_peer("peer:x", Grant(RoomId(1, 1), 8, 0, [5, 6], 7), engine.now)
    step = engine.steps[-1]
    assert [send.pages for send in step.sends] == [[(step.rows[0].begin.pages[0], 5), (step.rows[0].begin.pages[1], 6)]]


def test_a_grant_whose_submit_never_comes_ends_for_another_attempt() -> None:
    """The promise's time is over, not the request's: decode must not tell its client of a deadline."""
    engine = Driven(role="prefill")
    engine.desk.from_peer("peer:x", hello(), engine.now)
    engine.answer()
    engine.desk.from_peer("peer:x", Grant(RoomId(1, 1), 8, 0, [5, 6], 7), engine.now)
    for _ in range(12):
        engine.tick(1.0)
        engine.answer()
        engine.desk.from_peer("peer:x", Beat("other", 1, 8, [(RoomId(1, 1), "reserved")]), engine.now)
    ends = [message for _, message in engine.peer if isinstance(message, End)]
    assert ends
    assert all(end.reason == "peer" and end.retryable for end in ends)
