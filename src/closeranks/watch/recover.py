"""Makes plans and has them carried out (`recover_run`), one process at a time, and goes on with what was left open.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from closeranks.supervise.platforms import Platform, platform_named
from closeranks.watch.patience import within
from closeranks.watch.recover_desk import Desk, Held
from closeranks.watch.recover_journal import Entry, JournalDamaged, Now, Open, restarts, unfinished
from closeranks.watch.recover_run import GO_ON_S, Outcome, Run, Shown
from closeranks.watch.recover_state import Case, Loop, Plan, Policy, Refusal, counterparts, plan
from closeranks.watch.recover_steps import Facts, Hands
from closeranks.watch.recover_survey import Choice, Ending, Survey, ending
from closeranks.watch.recover_wire import Wire
from closeranks.watch.snapshot import EngineSeen

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


class Preview(msgspec.Struct, frozen=True):
    """What would be done: the plan, and of each engine in it what would be ended and how it would be started."""

    plan: Plan | Refusal
    ends: tuple[Ending, ...] = ()
    untried: tuple[str, ...] = ()
    """Platforms among them whose commands follow their documentation and were not run in this project's tests."""

    def of(self, engine: str) -> Ending:
        """The one of this engine. Raises KeyError."""
        return {e.engine: e for e in self.ends}[engine]


_BUSY = Outcome(status="busy", says="another process holds the lock: it acts on this service")


def _before(case: Case, left: Open, went: Outcome) -> Outcome:
    """What is said to a case that came while a plan was open: how that went, where it covers the case."""
    if set(case.blamed) <= {name for action in left.ladder.actions for name in action.engines}:
        return msgspec.structs.replace(went, wait_s=GO_ON_S)
    names = ", ".join(case.blamed)
    says = f"nothing was done about {names}: plan {left.plan} was open and went first: {went.status}: {went.says}"
    return Outcome(status="busy", says=says, plan=left.plan, took_s=went.took_s, wait_s=GO_ON_S, steps=went.steps)


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
        self._survey = Survey(policy, choices or {}, platforms, folder)
        self._platforms, self._clock, self._show = platforms, clock, show
        self._wire = wire or (lambda: Wire(policy.router, policy.router_key))
        self._settled = asyncio.Event()
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
                    return _before(case, left, await self._go_on(journal, left))
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
                    try:
                        await journal.append(planned)
                    except OSError:
                        await self._desk.forget(name)
                        raise
                    return await self._carry_out(
                        self._run(journal, Open(name, made, {}, planned, planned)), facts, wire
                    )
                finally:
                    await wire.close()
        except BlockingIOError:
            return _BUSY
        except (OSError, JournalDamaged) as error:
            return self._cannot_write(error)

    async def resume(self) -> Outcome | None:
        """Go on with a plan that an earlier process left, or close it when it is too old; None: there is none."""
        try:
            if unfinished(await self._desk.read()) is None:  # without the lock, which whoever begins one now needs
                return None
            async with self._desk.alone() as journal:
                left = unfinished(journal.entries)
                return None if left is None else await self._go_on(journal, left)
        except BlockingIOError:
            return _BUSY
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

    async def give_up(self) -> Outcome | None:
        """Close the plan that is open, whatever it leaves lying, by an operator's order; None: there is none."""
        try:
            async with self._desk.alone() as journal:
                if (left := unfinished(journal.entries)) is None:
                    return None
                return await self._run(journal, left).close("stopped", f"given up by an operator{left.down}")
        except BlockingIOError:
            return _BUSY
        except (OSError, JournalDamaged) as error:
            return self._cannot_write(error)

    async def _go_on(self, journal: Held, left: Open) -> Outcome:
        run = self._run(journal, left)
        now, then = self._clock().boot, left.planned.at.boot
        if now and then and now != then:
            says = f"the machine was started anew since: what the plan was made of is gone, it is over{left.down}"
            return await run.close("stopped", says)
        try:
            facts = await self._desk.kept(left.plan)
        except FileNotFoundError as error:
            return await run.close("failed", f"interrupted, and its facts are lost: {error}{left.down}")
        except ValueError as error:
            return await run.close("failed", f"interrupted, and its facts are damaged: {error}{left.down}")
        wire = self._wire()
        try:
            return await self._carry_out(run, facts, wire, max(0.0, left.last.age_s(self._clock())))
        finally:
            await wire.close()

    def _run(self, journal: Held, current: Open) -> Run:
        return Run(journal, current, self._desk, self._clock, self._show, self._settled)

    async def _carry_out(self, run: Run, facts: Facts, wire: Wire, age_s: float | None = None) -> Outcome:
        """`age_s`: it was interrupted so long ago."""
        name = run.current.plan
        hands = Hands(name, facts, wire, self.policy, self._platforms, self.folder, self._desk.stopped)
        try:
            if age_s is not None:
                if age_s > self.policy.resume_within_s and not await run.lies(hands):
                    return await run.close("stopped", f"interrupted {age_s:.0f} s ago: closed, not gone on with")
                log.warning("an interrupted recovery is gone on with", plan=name, done=len(run.results))
            return await run.carry_out(hands)
        except asyncio.CancelledError:
            lies = run.down or ("" if self._settled.is_set() else "; an end was under way")
            says = f"its plan stays open{lies}; the next acting watch goes on with it, or `closeranks recover --resume`"
            log.warning("recovery interrupted", plan=name, says=says)
            raise
        finally:
            self._settled.set()

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

    def _cannot_write(self, error: Exception) -> Outcome:
        says = f"the journal in {self.folder} cannot be kept, so nothing more is done: {error}"
        log.error("recovery stopped", says=says)
        wait_s = GO_ON_S if isinstance(error, OSError) else None  # a disk has room again, or answers
        return Outcome(status="stopped", says=says, wait_s=wait_s)
