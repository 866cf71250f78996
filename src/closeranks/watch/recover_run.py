"""The steps of one plan, one after another: each written down before and after it is done, stoppable, timed.

    run = Run(journal, current, desk, clock, show, settled)
    outcome = await run.carry_out(hands)

What was ended is started: a plan that would leave an engine ended that nobody starts stays open instead.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Literal

import msgspec
import structlog

from closeranks.evidence.redact import redact
from closeranks.supervise.platforms import PlatformError
from closeranks.watch.patience import within
from closeranks.watch.recover_desk import Desk, DeskFailed, Held
from closeranks.watch.recover_journal import Entry, Now, Open, down
from closeranks.watch.recover_state import Action, Over, Result, anew, next_step
from closeranks.watch.recover_steps import LOOK_S, EndedAgain, Hands, Stopped
from closeranks.watch.recover_wire import StepFailed

SLACK_S = 15.0
"""On top of a step's own deadline, before it is given up from outside."""
START_AGAIN_S = (2.0, 10.0, 60.0)
"""Waits before what was ended and could not be started is started again: a port or a GPU's memory may come late."""
GO_ON_S = 30.0
"""After so long a plan that was left open may be gone on with."""

log = structlog.get_logger()


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it is shown: to the log, the terminal, the notification."""

    plan: str
    step: int
    kind: str
    engine: str
    event: Literal["begin", "done", "failed"]
    took_s: float = 0.0
    says: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. `busy`: another process acts on this service, or another plan went first; `stopped`: an operator
    said so, or the journal could not be written; nothing was begun after that. `wait_s`: after so long it may be tried
    again, or, where engines were ended and are not started, gone on with: that plan is left open."""

    status: Literal["recovered", "failed", "refused", "stopped", "busy"]
    says: str
    plan: str = ""
    took_s: float = 0.0
    wait_s: float | None = None
    steps: tuple[Shown, ...] = ()


class Run:
    """One plan that is carried out, under recovery's lock. While `settled` is not set, something that was ended still
    has to be started."""

    def __init__(
        self,
        journal: Held,
        current: Open,
        desk: Desk,
        clock: Callable[[], Now],
        show: Callable[[Shown], None],
        settled: asyncio.Event,
    ) -> None:
        self.current, self.results = current, dict(current.results)
        self._journal, self._desk, self._clock, self._show, self._settled = journal, desk, clock, show, settled
        self._begun, self._unsure = set(current.begun), list[str]()
        self._began, self._steps = time.monotonic(), list[Shown]()

    @property
    def down(self) -> str:
        """What the plan would leave lying now, in words; empty if nothing."""
        says = down(self.current.ladder, self.results)
        return says + (f"; perhaps ended: {', '.join(self._unsure)}" if self._unsure else "")

    async def lies(self, hands: Hands) -> bool:
        """Whether an engine is ended and not started. An end that failed, or was cut short, may have come about all the
        same (a daemon that was slow to stop its container): that is found out, and written down."""
        self._unsure = []
        for number, action in enumerate(self.current.ladder.actions):
            if action.kind != "end" or number not in self._begun or self.results.get(number) == "done":
                continue
            try:
                gone = not await hands.still_runs(action)
            except (PlatformError, OSError) as error:
                log.warning("whether it has ended is not known", engine=action.engine, error=str(error))
                self._unsure.append(action.engine)
                continue
            if gone:
                await self._write("done", number, action, says="it has ended all the same")
                self.results[number] = "done"
        return bool(self.down)

    async def carry_out(self, hands: Hands) -> Outcome:
        """All steps that are left, to the end of the plan or to where it is left open."""
        ladder, waits = self.current.ladder, list(START_AGAIN_S)
        if await self.lies(hands):
            self.results = anew(ladder, self.results)
        while True:
            number = next_step(ladder, self.results)
            if isinstance(number, Over) and self._doubtful() and await self.lies(hands):
                number = next_step(ladder, self.results)
            if self.down or (isinstance(number, int) and ladder.actions[number].kind == "end"):
                self._settled.clear()
            else:
                self._settled.set()
            if isinstance(number, Over) and not (waits and (self.down or self._doubtful())):
                return await self._leave(number.outcome, number.says)
            if await self._desk.stopped():
                return await self._stopped(hands)
            if isinstance(number, Over):
                log.warning("a step that failed is done again", says=number.says, lies=self.down, in_s=waits[0])
                await self._pause(waits.pop(0))
                self.results = anew(ladder, self.results)
            elif not await self._do(number, hands):
                return await self._stopped(hands)

    async def close(self, status: Literal["recovered", "failed", "stopped"], says: str) -> Outcome:
        """The plan is over."""
        name, took = self.current.plan, time.monotonic() - self._began
        await self._journal.append(
            Entry(at=self._clock(), plan=name, event="over", took_s=round(took, 3), says=f"{status}: {says}")
        )
        await self._desk.forget(name)
        (log.info if status == "recovered" else log.error)("recovery over", plan=name, status=status, says=says)
        return Outcome(status=status, says=says, plan=name, took_s=took, steps=tuple(self._steps))

    async def _do(self, number: int, hands: Hands) -> bool:
        """One step; False where an operator stopped it. Raises OSError where the folder cannot be used: whether the
        step was done is then found out by whoever goes on."""
        actions = self.current.ladder.actions
        action, limit_s = actions[number], actions[number].deadline_s + SLACK_S
        await self._write("begin", number, action)
        self._begun.add(number)
        started = time.monotonic()
        result: Result = "done"
        try:
            says = await _bounded(hands.do(action, last=number == len(actions) - 1), limit_s)
        except Stopped:
            return False
        except DeskFailed:
            raise
        except EndedAgain as error:  # then it was not started, whatever that step said
            number = next(n for n, a in enumerate(actions) if (a.kind, a.engine) == ("start", action.engine))
            result, says, action = "failed", str(error), actions[number]
        except TimeoutError:
            result, says = "failed", f"not done within {limit_s:.0f} s"
        except (StepFailed, PlatformError, OSError) as error:
            result, says = "failed", str(error)
        self.results[number] = result
        says = redact(says.encode(errors="replace").decode())
        await self._write(result, number, action, time.monotonic() - started, says)
        return True

    def _doubtful(self) -> bool:
        """Whether an end was begun of which it is not known that it came about."""
        actions = self.current.ladder.actions
        return any(actions[n].kind == "end" and self.results.get(n) != "done" for n in self._begun)

    async def _stopped(self, hands: Hands) -> Outcome:
        await self.lies(hands)
        return await self._leave("stopped", await self._desk.stop_says())

    async def _leave(self, status: Literal["recovered", "failed", "stopped"], says: str) -> Outcome:
        """The end of a plan; where it would leave an engine ended that nobody starts, it stays open instead."""
        name = self.current.plan
        if not self.down:
            return await self.close(status, says)
        says = f"{says}{self.down}; the plan stays open: `closeranks recover --resume` goes on with it"
        log.error("recovery left open", plan=name, status=status, says=says)
        took = time.monotonic() - self._began
        return Outcome(status=status, says=says, plan=name, took_s=took, wait_s=GO_ON_S, steps=tuple(self._steps))

    async def _pause(self, seconds: float) -> None:
        """A wait that ends with an operator's stop."""
        for _ in range(round(seconds / LOOK_S)):
            if await self._desk.stopped():
                return
            await asyncio.sleep(LOOK_S)

    async def _write(
        self,
        event: Literal["begin", "done", "failed"],
        number: int,
        action: Action,
        took_s: float = 0.0,
        says: str = "",
    ) -> None:
        """Into the journal, and then to whoever is shown the steps."""
        name, took_s, engine = self.current.plan, round(took_s, 3), action.engine or ", ".join(action.engines)
        await self._journal.append(
            Entry(at=self._clock(), plan=name, event=event, step=number, action=action, took_s=took_s, says=says)
        )
        shown = Shown(plan=name, step=number, kind=action.kind, engine=engine, event=event, took_s=took_s, says=says)
        if event != "begin":
            self._steps.append(shown)
        say = log.warning if event == "failed" else log.info
        say("recovery step", plan=name, step=number, kind=action.kind, engine=engine, result=event, took_s=took_s,
            says=says)  # fmt: skip
        self._show(shown)


async def _bounded(step: Coroutine[None, None, str], limit_s: float) -> str:
    """Its outcome. Raises TimeoutError after `limit_s`, not for a time in which this process itself was stopped: then
    an engine would have been ended, and not started."""
    task = asyncio.create_task(step)
    try:
        if not await within(task, limit_s):
            raise TimeoutError
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
