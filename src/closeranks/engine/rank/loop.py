"""The step loop: executes the leader's steps in their order and reports each.

A rank decides nothing. What it does in step n follows from steps 1 .. n alone; no clock, no queue length, no random
draw and no set order has a say. A step that is not the next one is a fault.

On a device that works while the host goes on, step n + 1 is launched before n is done, if the leader has sent it by
then; reports keep the order of the steps.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zmq

from closeranks.faults import Injector
from closeranks.protocol import Compile, Joined, Report, Step, Stop, TopLogprobs, Welcome, decode_to_rank, encode

from .collectives import Group
from .digest import Digest
from .notices import Notices
from .transfer import TransferThread

POLL_MS = 1000
"""A wait for the leader is cut into pieces of this length. Its silence alone proves nothing: the supervisor judges it,
and the kernel ends this process with its parent."""


class StepOrderFault(Exception):
    """The leader sent something other than the next step of this epoch."""


class Result(Protocol):
    """What a forward pass yields; see `runner.StepResult`."""

    @property
    def tokens(self) -> list[int]:
        """Sampled tokens in row order, on every rank."""
        ...

    @property
    def logprobs(self) -> list[TopLogprobs | None]:
        """On rank 0, if asked for."""
        ...

    @property
    def forward_us(self) -> int:
        """Duration, for information."""
        ...


class Launched(Protocol):
    """A step under way; see `runner.Pending`."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> Result:
        """Wait for the device. Call once."""
        ...


class Runs(Protocol):
    """What executes the copies and rows of a step; see `runner.Runner`."""

    ahead: bool
    """Whether `launch` returns while the device still works."""

    def launch(self, step: Step) -> Launched:
        """Copy `step.copies`, then one forward pass over `step.rows`."""
        ...

    def page_table(self, slot: int) -> npt.ArrayLike:
        """The pages of a slot, as they were used in the last step."""
        ...


@dataclass(frozen=True)
class OpenStep:
    """A launched step with what its report needs, as it was when it was launched."""

    step: Step
    launched: Launched
    tables: list[npt.NDArray[np.int32]]
    """The page table of each row."""
    operations: int
    """The group's chain."""


class Loop:
    """Executes steps that arrive on `socket` (a DEALER with identity `step:<rank>`)."""

    def __init__(
        self,
        epoch: int,
        runner: Runs,
        group: Group,
        transfer: TransferThread,
        notices: Notices,
        socket: "zmq.Socket[bytes]",
        injector: Injector | None = None,
        compiler: Callable[[Compile], None] | None = None,
        digest: bool = True,
    ) -> None:
        """`compiler` takes orders to compile grammars and never waits; None: this rank does not sample.

        Without `digest` every report has 0 in its place.
        """
        self._epoch = epoch
        self._runner = runner
        self._group = group
        self._transfer = transfer
        self._notices = notices
        self._socket = socket
        self._injector = injector
        self._compiler = compiler
        self._digest = Digest(epoch) if digest else None
        self._last = 0
        """The last launched step."""
        self._open: deque[OpenStep] = deque()

    def join(self, joined: Joined) -> bool:
        """Say that this rank is ready and wait for the others; False if the epoch is stopped instead."""
        self._socket.send(encode(joined))
        message = self._next()
        if isinstance(message, Welcome):
            self._of_this_epoch(message.epoch)
            return True
        if isinstance(message, Stop):
            self._of_this_epoch(message.epoch)
            return False
        raise StepOrderFault(f"expected Welcome, got {type(message).__name__}")

    def run(self) -> None:
        """Execute steps until `Stop`.

        Raises:
            StepOrderFault: a step is missing, doubled, or of another epoch.
            Exception: whatever the forward pass raises. Any exception ends the epoch.
        """
        while True:
            message = self._next_while_open() if self._open else self._next()
            if message is None:
                self._report(self._open.popleft())
            elif isinstance(message, Step):
                self.launch(message)
                while len(self._open) > int(self._runner.ahead):
                    self._report(self._open.popleft())
            elif isinstance(message, Compile):
                self._of_this_epoch(message.epoch)
                if self._compiler is not None:
                    self._compiler(message)
            elif isinstance(message, Stop):
                self._of_this_epoch(message.epoch)
                while self._open:
                    self._report(self._open.popleft())
                return
            else:
                raise StepOrderFault(f"expected a step, got {type(message).__name__}")

    def launch(self, step: Step) -> None:
        """Start a step; its report is due when the device has done it."""
        self._of_this_epoch(step.epoch)
        if step.n != self._last + 1:
            raise StepOrderFault(f"expected step {self._last + 1} of epoch {self._epoch}, got step {step.n}")
        self._last = step.n
        if not self._open:
            self._notices.open_step = step.n
        self._group.begin(step.n)
        self._transfer.meet(step.meet)
        if self._injector is not None:
            self._fail_on_demand(self._injector, step)
        launched = self._runner.launch(step)
        tables = [np.array(self._runner.page_table(row.slot), np.int32) for row in step.rows]
        self._open.append(OpenStep(step, launched, tables, self._group.chain))

    def _report(self, done: OpenStep) -> None:
        """Wait for the oldest open step and report it; transfers that it orders start, and go on afterwards."""
        step, result = done.step, done.launched.result()
        self._transfer.submit(step)
        digest = 0
        if self._digest is not None:
            digest = self._digest.add(step.n, step.rows, done.tables, result.tokens, done.operations)
        self._notices.open_step = self._open[0].step.n if self._open else 0
        sampling = self._group.rank == 0
        report = Report(
            epoch=self._epoch,
            rank=self._group.rank,
            n=step.n,
            digest=digest,
            tokens=result.tokens if sampling else [],
            logprobs=result.logprobs if sampling else [],
            forward_us=result.forward_us,
        )
        self._socket.send(encode(report))

    def _fail_on_demand(self, injector: Injector, step: Step) -> None:
        """Drills: what the faults given at start ask for in this step."""
        injector.act("rank.forward", n=step.n)
        for row in step.rows:
            for token in dict.fromkeys(row.begin.tokens) if row.begin else ():
                injector.act("rank.row", token=token)
        if injector.act("rank.digest", n=step.n) and self._digest is not None:
            self._digest.value ^= 1

    def _next(self) -> Any:
        """The next message of the leader."""
        while not self._socket.poll(POLL_MS):
            pass
        return decode_to_rank.decode(self._socket.recv())

    def _next_while_open(self) -> Any:
        """A message that comes before the oldest open step is done; None: it is done. Looks at both without a pause:
        waiting for the device blocks, and a step that comes meanwhile would be launched too late.
        """
        while not self._open[0].launched.done():
            if self._socket.poll(0):
                return decode_to_rank.decode(self._socket.recv())
        return None

    def _of_this_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StepOrderFault(f"got a message of epoch {epoch}, this is epoch {self._epoch}")
