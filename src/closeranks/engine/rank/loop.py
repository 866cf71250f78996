"""The step loop: executes the leader's steps in their order and reports each.

A rank decides nothing. What it does in step n follows from steps 1 .. n alone; no clock, no queue length, no random
draw and no set order has a say. A step that is not the next one is a fault.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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


class Runs(Protocol):
    """What executes the copies and rows of a step; see `runner.Runner`."""

    def run(self, step: Step) -> Result:
        """Copy `step.copies`, then one forward pass over `step.rows`."""
        ...

    def page_table(self, slot: int) -> npt.ArrayLike:
        """The pages of a slot, as they were used in the last step."""
        ...


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
    ) -> None:
        """`compiler` takes orders to compile grammars and never waits; None: this rank does not sample."""
        self._epoch = epoch
        self._runner = runner
        self._group = group
        self._transfer = transfer
        self._notices = notices
        self._socket = socket
        self._injector = injector
        self._compiler = compiler
        self._digest = Digest(epoch)
        self._done = 0

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
            message = self._next()
            if isinstance(message, Stop):
                self._of_this_epoch(message.epoch)
                return
            if isinstance(message, Compile):
                self._of_this_epoch(message.epoch)
                if self._compiler is not None:
                    self._compiler(message)
                continue
            if not isinstance(message, Step):
                raise StepOrderFault(f"expected a step, got {type(message).__name__}")
            self._socket.send(encode(self.execute(message)))

    def execute(self, step: Step) -> Report:
        """One step, whole; transfers that it orders go on after it returns."""
        self._of_this_epoch(step.epoch)
        if step.n != self._done + 1:
            raise StepOrderFault(f"expected step {self._done + 1} of epoch {self._epoch}, got step {step.n}")
        self._notices.open_step = step.n
        self._group.begin(step.n)
        self._transfer.meet(step.meet)
        if self._injector is not None:
            self._fail_on_demand(self._injector, step)
        result = self._runner.run(step)
        self._transfer.submit(step)
        tables: Sequence[Any] = [self._runner.page_table(row.slot) for row in step.rows]
        digest = self._digest.add(step.n, step.rows, tables, result.tokens, self._group.chain)
        self._done = step.n
        self._notices.open_step = 0
        sampling = self._group.rank == 0
        return Report(
            epoch=self._epoch,
            rank=self._group.rank,
            n=step.n,
            digest=digest,
            tokens=result.tokens if sampling else [],
            logprobs=result.logprobs if sampling else [],
            forward_us=result.forward_us,
        )

    def _fail_on_demand(self, injector: Injector, step: Step) -> None:
        """Drills: what the faults given at start ask for in this step."""
        injector.act("rank.forward", n=step.n)
        for row in step.rows:
            for token in dict.fromkeys(row.begin.tokens) if row.begin else ():
                injector.act("rank.row", token=token)
        if injector.act("rank.digest", n=step.n):
            self._digest.value ^= 1

    def _next(self) -> Any:
        """The next message of the leader."""
        while not self._socket.poll(POLL_MS):
            pass
        return decode_to_rank.decode(self._socket.recv())

    def _of_this_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise StepOrderFault(f"got a message of epoch {epoch}, this is epoch {self._epoch}")
