"""The step loop on a device that works while the host goes on: what is launched when, and what is reported when."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq

from closeranks.engine.rank.collectives import Solo
from closeranks.engine.rank.loop import Loop, StepOrderFault
from closeranks.engine.rank.runner import StepResult
from closeranks.protocol import Report, Row, Step, Stop, decode_from_rank, encode

EPOCH = 3


@dataclass
class Device:
    """Stands for the runner: a launched step is done when the test says so. Its page table changes with every step."""

    ahead: bool
    launches: "queue.Queue[int]" = field(default_factory=queue.Queue)
    finished: dict[int, threading.Event] = field(default_factory=lambda: {n: threading.Event() for n in range(1, 9)})
    last: int = 0

    def launch(self, step: Step) -> "Work":
        self.last = step.n
        self.launches.put(step.n)
        return Work(step.n, self.finished[step.n])

    def page_table(self, slot: int) -> Any:
        return np.arange(self.last, dtype=np.int32) + slot


@dataclass
class Work:
    n: int
    finished: threading.Event

    def done(self) -> bool:
        return self.finished.is_set()

    def result(self) -> StepResult:
        assert self.finished.wait(20)
        return StepResult([100 + self.n], [], 0)


@dataclass
class Transfers:
    """Stands for the transfer thread."""

    submitted: list[int] = field(default_factory=list)

    def meet(self, peers: object) -> None:
        pass

    def submit(self, step: Step) -> None:
        self.submitted.append(step.n)


@dataclass
class Notices:
    open_step: int = 0


class Bench:
    """A loop in a thread, and the leader's end of its socket."""

    def __init__(self, ahead: bool) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.leader = self.context.socket(zmq.PAIR)
        self.leader.bind("inproc://steps")
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.connect("inproc://steps")
        self.device, self.transfers, self.notices = Device(ahead), Transfers(), Notices()
        self.error: BaseException | None = None
        loop: Any = Loop(EPOCH, self.device, Solo(EPOCH), self.transfers, self.notices, self.socket)  # type: ignore[arg-type]

        def run() -> None:
            try:
                loop.run()
            except StepOrderFault as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def step(self, n: int) -> None:
        self.leader.send(encode(Step(EPOCH, n, rows=[Row(0, n, 1, sample=True)])))

    def stop(self) -> None:
        self.leader.send(encode(Stop(EPOCH)))

    def report(self) -> Report:
        assert self.leader.poll(20_000), "no report"
        message = decode_from_rank.decode(self.leader.recv())
        assert isinstance(message, Report)
        return message

    def end(self) -> None:
        for finished in self.device.finished.values():
            finished.set()
        if self.thread.is_alive():
            self.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.socket.close(linger=0)
        self.leader.close(linger=0)
        self.context.term()


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.end()


@pytest.mark.parametrize("bench", [True], indirect=True)
def test_the_next_step_is_launched_before_the_last_one_is_done(bench: Bench) -> None:
    bench.step(1)
    assert bench.device.launches.get(timeout=20) == 1
    bench.step(2)
    assert bench.device.launches.get(timeout=20) == 2
    assert bench.transfers.submitted == []
    assert bench.notices.open_step == 1
    bench.device.finished[2].set()  # order is kept whatever is done first
    assert not bench.leader.poll(100)
    bench.device.finished[1].set()
    assert [bench.report().n, bench.report().n] == [1, 2]
    assert bench.transfers.submitted == [1, 2]


@pytest.mark.parametrize("bench", [True], indirect=True)
def test_at_most_two_steps_are_open(bench: Bench) -> None:
    for n in (1, 2, 3):
        bench.step(n)
    assert [bench.device.launches.get(timeout=20) for _ in range(2)] == [1, 2]
    assert bench.device.launches.empty()
    bench.device.finished[1].set()
    assert bench.report().n == 1
    assert bench.device.launches.get(timeout=20) == 3


@pytest.mark.parametrize("bench", [True], indirect=True)
def test_a_stop_comes_after_the_reports_of_open_steps(bench: Bench) -> None:
    bench.step(1)
    bench.stop()
    bench.device.finished[1].set()
    assert bench.report().n == 1
    bench.thread.join(20)
    assert not bench.thread.is_alive()


@pytest.mark.parametrize("bench", [True, False], indirect=True)
def test_a_missing_step_is_a_fault(bench: Bench) -> None:
    bench.step(1)
    bench.step(3)
    for finished in bench.device.finished.values():
        finished.set()
    bench.thread.join(20)
    assert "expected step 2" in str(bench.error)


def digests(ahead: bool) -> list[int]:
    bench = Bench(ahead)
    try:
        for n in range(1, 6):
            bench.step(n)
        for finished in bench.device.finished.values():
            finished.set()
        return [bench.report().digest for _ in range(5)]
    finally:
        bench.end()


def test_the_digest_holds_the_page_tables_of_each_launch() -> None:
    """Whether a step was launched ahead shows nowhere in it."""
    assert digests(ahead=True) == digests(ahead=False)
