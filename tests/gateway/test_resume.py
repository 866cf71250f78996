"""Resume: whatever engines do, a client sees each token once, in order, and one end.

The stand-in world below is sans-IO too: two engines (or one) that generate the only right stream, a network that
loses, doubles and reorders what hypothesis tells it to, and a clock.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.gateway.resume import End, Request, Requests
from closeranks.gateway.router import Pair, Router
from closeranks.protocol import Abort, Ended, Output, RoomId, Sampling, Status, Submit, Tokens, TopLogprobs

PREFILL, DECODE = "ipc://p", "ipc://d"
STOP = 999


def right_token(position: int, length: int, stops: bool) -> int:
    """The stream is a function of the position, as draws are."""
    return STOP if stops and position == length - 1 else position * 7 % 500


def status(engine: str, instance: int = 1, state: str = "ready", **more: int) -> Status:
    given_values = {
        "engine": engine,
        "role": engine,
        "epoch": instance,
        "instance": instance,
        "state": state,
        "tp_size": 1,
        "page_size": 16,
        "context_length": 1000,
        "max_request_tokens": 1000,
        "fingerprint": None,
        "pages_total": 10,
        "pages_free": 10,
        "pages_cached": 0,
        "pages_owned": 0,
        "pages_quarantined": 0,
        "waiting": 0,
        "running": 0,
        "rooms_open": 0,
        "oldest_wait_s": 0.0,
        "last_progress_s": 0.0,
        "slowest_rank": -1,
        "counters": {},
    }
    return Status(**{**given_values, **more})  # type: ignore[arg-type]


@dataclass
class Client:
    """Checks what it gets."""

    start: int
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    end: End | None = None

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None:
        assert self.end is None, "tokens after the end"
        assert tokens
        self.tokens += tokens
        self.logprobs += len(logprobs)

    def on_end(self, end: End) -> None:
        assert self.end is None, "two ends"
        self.end = end


class World:
    """One pair of engines and a gateway's table, in virtual time."""

    def __init__(self, prompt: int = 5, output: int = 8, stops: bool = True) -> None:
        self.now = 100.0
        self.router = Router([PREFILL], [DECODE], [], 5.0)
        self.table = Requests(self.router, gap_s=1.0, engine_wait_s=60.0)
        self.length = prompt + output
        self.stops = stops
        self.client = Client(prompt)
        self.request = Request(
            id=1,
            rid="r",
            tokens=list(range(prompt)),
            prompt_length=prompt,
            max_new_tokens=output,
            sampling=Sampling(),
            stop_ids=[STOP] if stops else [],
            deadline=self.now + 500,
            sink=self.client,
        )
        self.instances = {PREFILL: 1, DECODE: 1}
        self.rooms: dict[RoomId, tuple[Submit, int]] = {}
        self.wire: list[Output] = []
        self.say_status()

    def say_status(self) -> None:
        for endpoint, name in ((PREFILL, "prefill"), (DECODE, "decode")):
            found = status(name, self.instances[endpoint], rooms_open=len(self.rooms))
            self.table.on_status(endpoint, found, self.now)
        self.deliver_orders()

    def start(self) -> None:
        self.table.start(self.request, self.now)
        self.deliver_orders()

    def settle_attempt(self) -> None:
        """Until the next attempt runs."""
        while not self.rooms and self.client.end is None:
            self.say_status()
            self.tick(0.1)

    def deliver_orders(self) -> None:
        for endpoint, message in self.table.outbox:
            if endpoint != DECODE:
                continue
            if isinstance(message, Submit):
                assert message.tokens[5:] == self.client.tokens, "resubmitted with other tokens than the client has"
                assert message.max_new_tokens >= 1
                assert message.max_new_tokens == self.length - len(message.tokens)
                self.rooms[message.room] = (message, len(message.tokens))
            elif isinstance(message, Abort):
                self.rooms.pop(message.room, None)
        self.table.outbox.clear()

    def step(self, size: int = 1) -> None:
        """The decode engine releases tokens of all its rooms onto the wire."""
        for room, (submit, at) in list(self.rooms.items()):
            tokens = [right_token(p, self.length, self.stops) for p in range(at, min(at + size, self.length))]
            ended = []
            if at + len(tokens) == self.length:
                reason = "stop" if self.stops else "length"
                ended.append(Ended(room, reason, "", False))
                del self.rooms[room]
            else:
                self.rooms[room] = (submit, at + len(tokens))
            logprobs = [TopLogprobs(-1.0, []) for _ in tokens]
            self.wire.append(Output([Tokens(room, at, tokens, logprobs)], ended))

    def hear(self, at: int = 0, keep: bool = False) -> None:
        if self.wire:
            output = self.wire[at % len(self.wire)] if keep else self.wire.pop(at % len(self.wire))
            self.table.on_output(DECODE, output, self.now)
            self.deliver_orders()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.table.on_time(self.now)
        self.deliver_orders()

    def settle(self) -> None:
        """From here on all goes well: the request must end."""
        for _ in range(400):
            if self.client.end is not None:
                return
            self.say_status()
            self.step()
            while self.wire:
                self.hear()
            self.tick(0.25)

    def check(self) -> None:
        got = self.client.tokens
        assert got == [right_token(5 + i, self.length, self.stops) for i in range(len(got))]
        assert self.client.logprobs == len(got)


EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("hear"), st.integers(0, 3)),
    st.tuples(st.just("double"), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("tick"), st.sampled_from([0.1, 0.6, 2.0, 6.0])),
    st.tuples(st.just("restart"), st.sampled_from([PREFILL, DECODE])),
    st.tuples(st.just("link"), st.sampled_from([PREFILL, DECODE])),
    st.tuples(st.just("status"), st.just(0)),
    st.tuples(st.just("end"), st.sampled_from(["retract", "fault", "peer", "abort", "busy"])),
    st.tuples(st.just("prefill_end"), st.sampled_from(["retract", "fault", "stop", "abort"])),
)


def play(world: World, events: list[tuple[str, object]]) -> None:
    for kind, value in events:
        if kind == "step":
            world.step(int(value))  # type: ignore[call-overload]
        elif kind == "hear":
            world.hear(int(value))  # type: ignore[call-overload]
        elif kind == "double":
            world.hear(int(value), keep=True)  # type: ignore[call-overload]
        elif kind == "lose" and world.wire:
            world.wire.pop(int(value) % len(world.wire))  # type: ignore[call-overload]
        elif kind == "tick":
            world.tick(float(value))  # type: ignore[arg-type]
        elif kind == "restart":
            world.instances[str(value)] += 1
            if value == DECODE:
                world.rooms.clear()
            world.say_status()
        elif kind == "link":
            world.table.on_link_lost(str(value), world.now)
            world.deliver_orders()
        elif kind == "status":
            world.say_status()
        elif kind in ("end", "prefill_end"):
            for room in list(world.rooms):
                retryable = value not in ("stop", "abort")
                ended = Ended(room, str(value), "", retryable)
                if kind == "end":
                    del world.rooms[room]
                    world.wire.append(Output([], [ended]))
                else:
                    world.table.on_output(PREFILL, Output([], [ended]), world.now)
                    world.deliver_orders()
        world.check()


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_each_token_once_in_order_under_any_interleaving(events: list[tuple[str, object]], stops: bool) -> None:
    world = World(stops=stops)
    world.start()
    play(world, events)
    world.settle()
    world.check()
    end = world.client.end
    assert end is not None
    if end.reason in ("stop", "length"):
        assert len(world.client.tokens) == 8
    else:
        assert end.reason in ("busy", "fault")  # refused while nothing was emitted, or lost over and over
    assert not world.table.open
    assert world.table.waiting == 0
    assert all(engine.open == 0 for engine in world.router.engines.values())


def test_undisturbed() -> None:
    world = World()
    world.start()
    for _ in range(8):
        world.step()
        world.hear()
    assert world.client.end == End("stop")
    assert world.table.counts["attempts"] == 1


def test_prefill_restart_does_not_touch_a_running_row() -> None:
    world = World()
    world.start()
    world.step()
    world.hear()
    world.instances[PREFILL] += 1
    world.say_status()
    assert world.request.generation == 1
    world.instances[DECODE] += 1
    world.say_status()
    assert world.request.generation == 2


def test_prefill_restart_before_the_first_token_resumes() -> None:
    world = World()
    world.start()
    world.instances[PREFILL] += 1
    world.say_status()
    assert world.request.generation == 2


def test_silence_resumes_when_the_engine_speaks_again() -> None:
    world = World()
    world.start()
    world.step(3)
    world.hear()
    world.tick(6.0)
    assert world.request.pair is None
    world.rooms.clear()
    world.settle()
    world.check()
    assert world.client.end == End("stop")
    assert world.table.counts["resumed_silence"] == 1


def test_poison_runs_alone_and_ends_at_the_third_charge() -> None:
    world = World()
    world.start()
    for charge in range(1, 4):
        room = next(iter(world.rooms))
        assert world.rooms[room][0].alone == (charge == 3)
        world.table.on_output(DECODE, Output([], [Ended(room, "fault", "step 7", True, charged=True)]), world.now)
        world.deliver_orders()
        for _ in range(30):
            world.say_status()
            world.tick(0.1)
    assert world.client.end is not None
    assert world.client.end.reason == "poison"
    assert "request r " in world.client.end.detail


def fault_of(room: RoomId, charged: bool) -> Output:
    return Output([], [Ended(room, "fault", "step 7", True, charged=charged)])


def test_a_charge_counts_also_when_the_other_engine_has_ended_the_room_before() -> None:
    """Prefill faults; decode, told by its peer, is quicker with its word to the gateway."""
    world = World()
    world.start()
    first = next(iter(world.rooms))
    world.table.on_output(DECODE, Output([], [Ended(first, "peer", "it faulted", True)]), world.now)
    world.deliver_orders()
    second = next(iter(world.rooms))
    assert second.generation == 2
    world.table.on_output(PREFILL, fault_of(first, charged=True), world.now)
    world.table.on_output(DECODE, fault_of(first, charged=True), world.now)
    world.deliver_orders()
    assert len(world.request.charges) == 1, "once per attempt"
    assert list(world.rooms) == [second], "and what runs goes on"


def test_a_late_second_charge_takes_the_attempt_back_that_runs_with_others() -> None:
    world = World()
    world.start()
    rooms = []
    for _ in range(2):
        rooms.append(next(iter(world.rooms)))
        world.table.on_output(DECODE, Output([], [Ended(rooms[-1], "peer", "it faulted", True)]), world.now)
        world.deliver_orders()
        world.settle_attempt()
    for room in rooms:
        assert not world.rooms[next(iter(world.rooms))][0].alone
        world.table.on_output(PREFILL, fault_of(room, charged=True), world.now)
    world.deliver_orders()
    world.settle_attempt()
    last = next(iter(world.rooms))
    assert world.rooms[last][0].alone
    assert world.client.end is None, "it has not failed alone"
    world.table.on_output(PREFILL, fault_of(RoomId(last.id, last.generation - 1), charged=True), world.now)
    assert world.client.end is None, "nor in the attempt before"
    world.table.on_output(PREFILL, fault_of(last, charged=True), world.now)
    assert world.client.end is not None
    assert world.client.end.reason == "poison"


def test_uncharged_faults_are_bounded_by_the_deadline_only() -> None:
    world = World()
    world.start()
    for _ in range(2000):
        for room in list(world.rooms):
            world.table.on_output(DECODE, Output([], [Ended(room, "fault", "", True)]), world.now)
        world.say_status()
        world.tick(0.5)
        if world.client.end:
            break
    assert world.client.end is not None
    assert world.client.end.reason == "deadline"
    assert world.now >= world.request.deadline
    assert world.table.counts["attempts"] < 500


def test_an_engine_that_starts_is_waited_for() -> None:
    """Not a full queue: a fresh request goes on as soon as the engine is ready."""
    world = World()
    world.start()
    room = next(iter(world.rooms))
    ended = Ended(room, "unready", "the engine is starting", True, retry_after_s=1.0)
    world.table.on_output(DECODE, Output([], [ended]), world.now)
    world.deliver_orders()
    assert world.client.end is None
    world.tick(0.5)
    assert world.request.pair is None
    world.settle()
    assert world.client.end == End("stop")


def test_busy_is_told_to_a_fresh_request_and_waited_out_by_a_resumed_one() -> None:
    world = World()
    world.start()
    room = next(iter(world.rooms))
    world.table.on_output(DECODE, Output([], [Ended(room, "busy", "full", True, retry_after_s=2.0)]), world.now)
    assert world.client.end == End("busy", "full", 2.0)

    world = World()
    world.start()
    world.step()
    world.hear()
    room = next(iter(world.rooms))
    world.table.on_output(DECODE, Output([], [Ended(room, "busy", "full", True, retry_after_s=2.0)]), world.now)
    world.deliver_orders()
    assert world.client.end is None
    world.tick(1.0)
    assert world.request.pair is None
    world.settle()
    assert world.client.end == End("stop")


def test_a_lost_end_is_not_waited_for() -> None:
    world = World(stops=False)
    world.start()
    world.step(8)
    world.table.on_output(DECODE, Output(world.wire[0].tokens, []), world.now)
    assert world.client.end is None
    world.tick(1.5)
    assert world.client.end == End("length")


def test_no_engine_for_long_is_an_end() -> None:
    world = World()
    world.tick(10.0)
    world.start()
    for _ in range(700):
        world.tick(0.1)
    assert world.client.end is not None
    assert world.client.end.reason == "no_engine"


def test_nothing_is_submitted_after_its_deadline() -> None:
    world = World()
    world.start()
    world.now = world.request.deadline + 0.05
    for room in list(world.rooms):
        world.table.on_output(DECODE, Output([], [Ended(room, "retract", "", True)]), world.now)
    world.say_status()
    assert world.request.generation == 1
    world.tick(0.1)
    assert world.client.end is not None
    assert world.client.end.reason == "deadline"


def test_abort_tells_both_sides() -> None:
    world = World()
    world.start()
    world.table.abort(1, "client")
    aborted = [(endpoint, message.room) for endpoint, message in world.table.outbox if isinstance(message, Abort)]
    assert aborted == [(PREFILL, RoomId(1, 1)), (DECODE, RoomId(1, 1))]
    assert world.client.end is None
    assert not world.table.open


def test_router_prefers_the_free_pair_and_the_known_prefix() -> None:
    router = Router(["p1", "p2"], ["d"], [], 5.0)
    for endpoint in router.engines:
        router.on_status(endpoint, status(endpoint), 0.0)
    first = router.choose([1, 2, 3], 0.0)
    assert first is not None
    router.engines[first.prefill].open = 3
    assert router.choose([1, 2, 3], 0.0) == first  # nearly as free, and knows the prefix
    other = Pair("p2" if first.prefill == "p1" else "p1", "d")
    assert router.choose([9], 0.0) == other
    router.engines[first.prefill].open = 30
    assert router.choose([1, 2, 3], 0.0) == other
    router.doubt(other.prefill)
    assert router.choose([9], 0.0) == first
    assert router.choose([9], 6.0) is None


@pytest.mark.parametrize("state", ["starting", "draining", "faulted"])
def test_router_uses_ready_engines_only(state: str) -> None:
    router = Router([], [], ["b"], 5.0)
    router.on_status("b", status("b", state=state), 0.0)
    assert router.choose([1], 0.0) is None
    router.on_status("b", status("b"), 0.0)
    assert router.choose([1], 0.0) == Pair("b", "b")


def other(world: World, number: int) -> Request:
    """One more request of `world`, begun."""
    request = Request(
        id=number,
        rid=str(number),
        tokens=list(range(5)),
        prompt_length=5,
        max_new_tokens=world.length - 5,
        sampling=Sampling(),
        stop_ids=[STOP],
        deadline=world.now + 500,
        sink=Client(5),
    )
    world.table.start(request, world.now)
    world.deliver_orders()
    return request


@pytest.mark.parametrize("doubtful", [False, True])
def test_who_was_charged_beside_a_culprit_is_charged_no_more(doubtful: bool) -> None:
    """And runs with the others again, unless one of its charges is for a fault that nothing explains."""
    world = World()
    world.start()
    culprit, bystander, unlucky = world.request, other(world, 8), other(world, 9)
    first = [unlucky, bystander] if doubtful else [culprit, bystander, unlucky]
    for failing in (first, [culprit, bystander], [culprit, unlucky], [culprit]):
        if failing == [culprit]:
            assert all(x.generation in x.lone for x in (culprit, bystander))
        if failing == [culprit, unlucky] and not doubtful:
            continue  # the culprit runs alone already
        ended = [Ended(RoomId(x.id, x.generation), "fault", "step 7", True, charged=True) for x in failing]
        world.table.on_output(DECODE, Output([], ended), world.now)
        world.deliver_orders()
        world.instances[DECODE] += 1
        for _ in range(30):
            world.say_status()
            world.tick(0.1)
    assert world.client.end is not None
    assert world.client.end.reason == "poison"
    for request in (bystander, unlucky):
        assert (request.generation in request.lone) == request.suspect == doubtful
        assert list(request.charges.values()).count(None) == len(request.charges) - doubtful
