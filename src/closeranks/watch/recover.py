"""Carries a plan out: one step after another, each written down before and after, each stoppable, each timed.

    recovery = Recovery(folder, policy)
    await recovery.resume()                      # what an earlier process left half done
    outcome = await recovery.recover(case, engines)

`folder` belongs to recovery (`recover_desk`). Of several processes with the same folder one acts, the others are told
that it is busy.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from closeranks.evidence.redact import redact
from closeranks.supervise.platforms import Platform, PlatformError, platform_named
from closeranks.watch.patience import within
from closeranks.watch.recover_desk import Desk, Held
from closeranks.watch.recover_journal import Entry, JournalDamaged, Now, Open, restarts, unfinished
from closeranks.watch.recover_state import (
    Action,
    Case,
    Loop,
    Over,
    Plan,
    Policy,
    Refusal,
    Result,
    anew,
    counterparts,
    lying,
    next_step,
    plan,
)
from closeranks.watch.recover_steps import LOOK_S, EndedAgain, Facts, Hands, Stopped
from closeranks.watch.recover_survey import Choice, Ending, Survey, ending
from closeranks.watch.recover_wire import StepFailed, Wire
from closeranks.watch.snapshot import EngineSeen

SLACK_S = 15.0
"""On top of a step's own deadline, before it is given up from outside."""
START_AGAIN_S = (2.0, 10.0, 60.0)
"""Waits before what was ended and could not be started is started again: a port or a GPU's memory may come late."""
GO_ON_S = 30.0
"""After so long a plan that was left open may be gone on with."""
CLOSE_S = 60.0
"""So long an end of this process is put off for the start of what was ended; systemd gives up after 90 s."""

log = structlog.get_logger()


def default_folder() -> Path:
    """Where recovery keeps its own on this machine: the same for every process of a user, so that one of them acts."""
    state = os.environ.get("CLOSERANKS_STATE_DIR")
    if state:
        return Path(state) / "recover"
    if os.geteuid() == 0:
        return Path("/var/lib/closeranks/recover")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "closeranks/recover")


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
    """How it ended. `busy`: another process acts on this service; `stopped`: an operator said so, or the journal could
    not be written; nothing was begun after that. `wait_s`: after so long it may be tried again, or, where engines were
    ended and are not started, gone on with: that plan is left open."""

    status: Literal["recovered", "failed", "refused", "stopped", "busy"]
    says: str
    plan: str = ""
    took_s: float = 0.0
    wait_s: float | None = None
    steps: tuple[Shown, ...] = ()


class Preview(msgspec.Struct, frozen=True):
    """What would be done: the plan, and of each engine in it what would be ended and how it would be started."""

    plan: Plan | Refusal
    ends: tuple[Ending, ...] = ()
    untried: tuple[str, ...] = ()
    """Platforms among them whose commands follow their documentation and were not run in this project's tests."""

    def of(self, engine: str) -> Ending:
        """The one of this engine. Raises KeyError."""
        return {e.engine: e for e in self.ends}[engine]


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


def _down(ladder: Plan, results: Mapping[int, Result]) -> str:
    """What a plan leaves lying, in words; empty if nothing."""
    engines = ", ".join(lying(ladder, results))
    return f"; ended and not started: {engines}" if engines else ""


class Recovery:
    """One service's recovery. `platforms` gives the platform of a name, `wire` speaks HTTP, `show` hears of steps."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        choices: Mapping[str, Choice] | None = None,
        platforms: Callable[[str], Platform] = platform_named,
        wire: Callable[[], Wire] | None = None,
        show: Callable[[Shown], None] = lambda shown: None,
        clock: Callable[[], Now] = Now.read,
    ) -> None:
        self.folder, self.policy, self._desk = folder, policy, Desk(folder)
        self._survey = Survey(policy, choices or {}, platforms)
        self._platforms, self._clock, self._show = platforms, clock, show
        self._wire = wire or (lambda: Wire(policy.router, policy.router_key))
        self._settled, self._lies = asyncio.Event(), ""
        self._settled.set()

    @property
    def stop_file(self) -> Path:
        """While it exists, no step begins."""
        return self._desk.stop_file

    def remember(self, engines: Sequence[EngineSeen]) -> list[str]:
        """Read how each engine was started while its launcher lives; once it has died, nobody could tell any more. The
        names of those that are new."""
        return self._survey.remember(engines)

    def knows(self, name: str) -> bool:
        """Whether it is remembered how an engine of this name was started."""
        return self._survey.knows(name)

    async def preview(
        self, case: Case, engines: Sequence[EngineSeen], loops: Mapping[str, Loop] | None = None
    ) -> Preview:
        """The plan that `recover` would carry out now. Changes nothing."""
        try:
            entries = await self._desk.read()
        except (OSError, JournalDamaged) as error:
            return Preview(Refusal(str(error)))
        wire = self._wire()
        try:
            made, facts = await self._plan(case, engines, loops or {}, wire, entries)
        finally:
            await wire.close()
        if isinstance(made, Refusal):
            return Preview(made)
        names = dict.fromkeys(a.engine for a in made.actions if a.kind == "end")
        targets = [facts.targets[name] for name in names]
        ends = await asyncio.to_thread(lambda: tuple(ending(t, self._platforms(t.platform)) for t in targets))
        used = sorted({t.platform for t in targets})
        return Preview(made, ends, tuple(name for name in used if not self._platforms(name).tried))

    async def recover(
        self, case: Case, engines: Sequence[EngineSeen], loops: Mapping[str, Loop] | None = None
    ) -> Outcome:
        """Make a plan and carry it out. Never raises for what engines, platforms, routers or disks do."""
        try:
            async with self._desk.alone() as journal:
                if (left := unfinished(journal.entries)) is not None:
                    went = await self._go_on(journal, left)
                    return msgspec.structs.replace(went, wait_s=GO_ON_S)  # this case has not had its turn
                if await self._desk.stopped():
                    return Outcome(status="stopped", says=await self._desk.stop_says())
                wire = self._wire()
                try:
                    made, facts = await self._plan(case, engines, loops or {}, wire, journal.entries)
                    if isinstance(made, Refusal):
                        log.warning("recovery refused", reason=made.reason)
                        return Outcome(status="refused", says=made.reason, wait_s=made.wait_s)
                    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
                    await self._desk.keep(name, facts)
                    planned = Entry(at=self._clock(), plan=name, event="planned", ladder=made)
                    await journal.append(planned)
                    return await self._carry_out(journal, Open(name, made, {}, planned), facts, wire)
                finally:
                    await wire.close()
        except BlockingIOError:
            return Outcome(status="busy", says="another process holds the lock: it acts on this service")
        except (OSError, JournalDamaged) as error:
            return self._cannot_write(error)

    async def resume(self) -> Outcome | None:
        """Go on with a plan that an earlier process left, or close it when it is too old; None: there is none."""
        try:
            async with self._desk.alone() as journal:
                left = unfinished(journal.entries)
                return None if left is None else await self._go_on(journal, left)
        except BlockingIOError:
            return Outcome(status="busy", says="another process holds the lock: it acts on this service")
        except (OSError, JournalDamaged) as error:
            return self._cannot_write(error)

    async def settled(self, limit_s: float = CLOSE_S) -> bool:
        """For whoever is to end this process: wait until nothing that was ended still has to be started. False after
        `limit_s`."""
        if self._settled.is_set():
            return True
        waiting = asyncio.create_task(self._settled.wait())
        try:
            return await within(waiting, limit_s)
        finally:
            waiting.cancel()

    async def _go_on(self, journal: Held, left: Open) -> Outcome:
        age, down = left.planned.age_s(self._clock()), _down(left.ladder, left.results)
        if age > self.policy.resume_within_s:
            says = f"interrupted {age:.0f} s ago: closed, not gone on with{down}"
            return await self._close(journal, left.plan, "stopped", says)
        now, then = self._clock().boot, left.planned.at.boot
        if now and then and now != then:
            says = f"the machine was started anew since: what the plan was made of is gone, it is over{down}"
            return await self._close(journal, left.plan, "stopped", says)
        try:
            facts = await self._desk.kept(left.plan)
        except (OSError, ValueError) as error:
            return await self._close(
                journal, left.plan, "failed", f"interrupted, and its facts are lost: {error}{down}"
            )
        log.warning("an interrupted recovery is gone on with", plan=left.plan, done=len(left.results))
        wire = self._wire()
        try:
            return await self._carry_out(journal, left, facts, wire)
        finally:
            await wire.close()

    async def _carry_out(self, journal: Held, current: Open, facts: Facts, wire: Wire) -> Outcome:
        try:
            return await self._do_steps(journal, current, facts, wire)
        except asyncio.CancelledError:
            lies = self._lies or ("" if self._settled.is_set() else "; an end was under way")
            says = f"its plan stays open{lies}; the next acting watch goes on with it, or `closeranks recover --resume`"
            log.warning("recovery interrupted", plan=current.plan, says=says)
            raise
        finally:
            self._settled.set()

    async def _do_steps(self, journal: Held, current: Open, facts: Facts, wire: Wire) -> Outcome:
        ladder, waits = current.ladder, list(START_AGAIN_S)
        results = anew(ladder, current.results) if lying(ladder, current.results) else dict(current.results)
        began, steps = time.monotonic(), list[Shown]()
        hands = Hands(current.plan, facts, wire, self.policy, self._platforms, self.folder, self._desk.stopped)
        while True:
            number = next_step(ladder, results)
            self._lies = _down(ladder, results)
            if self._lies or (isinstance(number, int) and ladder.actions[number].kind == "end"):
                self._settled.clear()
            else:
                self._settled.set()
            if isinstance(number, Over) and not (lying(ladder, results) and waits):
                break
            if await self._desk.stopped():
                return await self._leave(
                    journal, current.plan, ladder, results, "stopped", await self._desk.stop_says(), began, steps
                )
            if isinstance(number, Over):
                log.warning("what was ended is started again", engines=[*lying(ladder, results)], in_s=waits[0])
                await self._pause(waits.pop(0))
                results = anew(ladder, results)
                continue
            action = ladder.actions[number]
            await journal.append(Entry(at=self._clock(), plan=current.plan, event="begin", step=number, action=action))
            self._tell(steps, current.plan, number, action, "begin")
            started = time.monotonic()
            result: Result = "done"
            try:
                limit = action.deadline_s + SLACK_S
                says = await _bounded(hands.do(action, last=number == len(ladder.actions) - 1), limit)
            except Stopped:
                return await self._leave(
                    journal, current.plan, ladder, results, "stopped", await self._desk.stop_says(), began, steps
                )
            except EndedAgain as error:  # then it was not started, whatever that step said
                number = next(n for n, a in enumerate(ladder.actions) if (a.kind, a.engine) == ("start", action.engine))
                result, says, action = "failed", str(error), ladder.actions[number]
            except TimeoutError:
                result, says = "failed", f"not done within {action.deadline_s + SLACK_S:.0f} s"
            except (StepFailed, PlatformError, OSError) as error:
                result, says = "failed", str(error)
            took, says = time.monotonic() - started, redact(says.encode(errors="replace").decode())
            results[number] = result
            await journal.append(
                Entry(
                    at=self._clock(),
                    plan=current.plan,
                    event=result,
                    step=number,
                    action=action,
                    took_s=round(took, 3),
                    says=says,
                )
            )
            self._tell(steps, current.plan, number, action, result, took, says)
        return await self._leave(journal, current.plan, ladder, results, number.outcome, number.says, began, steps)

    async def _pause(self, seconds: float) -> None:
        """A wait that ends with an operator's stop."""
        for _ in range(round(seconds / LOOK_S)):
            if await self._desk.stopped():
                return
            await asyncio.sleep(LOOK_S)

    async def _leave(
        self,
        journal: Held,
        name: str,
        ladder: Plan,
        results: Mapping[int, Result],
        status: Literal["recovered", "failed", "stopped"],
        says: str,
        began: float,
        steps: Sequence[Shown],
    ) -> Outcome:
        """The end of a plan; where it would leave an engine ended that nobody starts, it stays open instead."""
        if not (down := _down(ladder, results)):
            return await self._close(journal, name, status, says, began, steps)
        says = f"{says}{down}; the plan stays open: `closeranks recover --resume` goes on with it"
        log.error("recovery left open", plan=name, status=status, says=says)
        took = time.monotonic() - began
        return Outcome(status=status, says=says, plan=name, took_s=took, wait_s=GO_ON_S, steps=tuple(steps))

    async def _plan(
        self,
        case: Case,
        engines: Sequence[EngineSeen],
        loops: Mapping[str, Loop],
        wire: Wire,
        past: Sequence[Entry],
    ) -> tuple[Plan | Refusal, Facts]:
        blamed, units = await asyncio.to_thread(self._survey.units, case.blamed, engines)
        case = msgspec.structs.replace(case, blamed=blamed)
        found = await self._survey.look(units, blamed, loops, wire)
        made = plan(case, found.sides, self.policy, restarts(past, self._clock()))
        if isinstance(made, Refusal):
            return made, Facts({}, {})
        part = {name for action in made.actions for name in action.engines}
        near = {c.name for s in found.sides if s.name in part for c in counterparts(s, found.sides)}
        return made, Facts(
            {name: target for name, target in found.targets.items() if name in part},
            {name: end for name, end in found.ends.items() if name in part | near},
        )

    async def _close(
        self,
        journal: Held,
        name: str,
        status: Literal["recovered", "failed", "stopped"],
        says: str,
        began: float | None = None,
        steps: Sequence[Shown] = (),
    ) -> Outcome:
        took = time.monotonic() - began if began is not None else 0.0
        await journal.append(
            Entry(at=self._clock(), plan=name, event="over", took_s=round(took, 3), says=f"{status}: {says}")
        )
        await self._desk.forget(name)
        (log.info if status == "recovered" else log.error)("recovery over", plan=name, status=status, says=says)
        return Outcome(status=status, says=says, plan=name, took_s=took, steps=tuple(steps))

    def _cannot_write(self, error: Exception) -> Outcome:
        says = f"the journal in {self.folder} cannot be kept, so nothing more is done: {error}"
        log.error("recovery stopped", says=says)
        wait_s = GO_ON_S if isinstance(error, OSError) else None  # a disk has room again, or answers
        return Outcome(status="stopped", says=says, wait_s=wait_s)

    def _tell(
        self,
        steps: list[Shown],
        name: str,
        number: int,
        action: Action,
        event: Literal["begin", "done", "failed"],
        took_s: float = 0.0,
        says: str = "",
    ) -> None:
        engine = action.engine or ", ".join(action.engines)
        shown = Shown(
            plan=name, step=number, kind=action.kind, engine=engine, event=event, took_s=round(took_s, 3), says=says
        )
        if event != "begin":
            steps.append(shown)
        say = log.warning if event == "failed" else log.info
        say("recovery step", plan=name, step=number, kind=action.kind, engine=engine, result=event, took_s=shown.took_s,
            says=says)  # fmt: skip
        self._show(shown)
