"""From an incident to a recovery: who is to blame, whose loop lives, and one recovery at a time.

    actor = Actor(recovery, watch, told)
    await actor.begin()
    watch.on_incident = actor.on_incident
    await actor.close()

`begin` goes on with what was left half done, now and later, by whomever.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Protocol

import structlog

from closeranks.supervise.platforms import ends_with_us
from closeranks.watch.incident import Incident
from closeranks.watch.procfs import main_thread
from closeranks.watch.recover import Recovery
from closeranks.watch.recover_run import GO_ON_S, Outcome
from closeranks.watch.recover_state import Case, Loop
from closeranks.watch.recover_units import to_blame
from closeranks.watch.snapshot import EngineSeen, Snapshot, State

WINDOW_S = 2.0
"""How long a main thread is looked at: one that idles with little sleep makes about one switch a second."""
GATHER_S = 3.0
"""How long after the confirmation of one other engines may be confirmed too, so that one plan covers them."""

BUSY_S = 10.0
"""Between two tries while another process acts: it may be killed before it has come to its end."""
REMEMBER_S = 10.0
"""Between two looks at how engines were started."""

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")

log = structlog.get_logger()


class Watched(Protocol):
    """What is needed of a watch."""

    snapshot: Snapshot

    @property
    def states(self) -> dict[str, State]: ...


class Actor:
    """Turns confirmations into recoveries. `told` hears of every outcome, with the case where there was one."""

    def __init__(
        self,
        recovery: Recovery,
        watch: Watched,
        told: Callable[[Case | None, Outcome], None] = lambda case, outcome: None,
        window_s: float = WINDOW_S,
        gather_s: float = GATHER_S,
        busy_s: float = BUSY_S,
        go_on_s: float = GO_ON_S,
    ) -> None:
        self._recovery, self._watch, self._told = recovery, watch, told
        self._window_s, self._gather_s, self._busy_s = window_s, gather_s, busy_s
        self._go_on_s, self._ending = go_on_s, False
        self._newest: dict[str, Incident] = {}
        """Of the engines that are seen to now."""
        self._said = ""
        """The last answer about a plan that is open."""
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """In the background: resume, then keep in mind how engines are started while they can tell."""
        self._do(self._resume())
        self._do(self._remember())

    async def on_incident(self, found: Incident) -> None:
        """Recover from it, in the background: bundles of other engines must not wait for that. Of an engine that is
        seen to already, only the newest word is kept."""
        if self._ending:
            return
        seen_to = found.engine in self._newest
        self._newest[found.engine] = found
        if not seen_to:
            self._do(self._see_to(found.engine))

    async def close(self) -> None:
        """From now on no plan is begun. Give up what runs, once what a recovery has ended is started, or that takes too
        long. It stays as its journal has it, and is gone on with at the next `begin`."""
        self._ending = True
        await self._recovery.settled()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, what: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            says = f"recovery failed in itself: {type(error).__name__}: {error}"
            log.error("recovery failed", error=says)
            self._told(None, Outcome(status="failed", says=says))

    async def _resume(self) -> None:
        """A plan that is left open, by an earlier process, by us or by hand, is gone on with as long as we live. The
        same answer is told once."""
        while not self._ending:
            async with self._one:
                outcome = None if self._ending else await self._recovery.resume()
            if outcome is None:
                self._said = ""
            elif outcome.status != "busy" and _gist(outcome) != self._said:
                self._said = _gist(outcome)
                self._told(None, outcome)
            await asyncio.sleep(self._go_on_s)

    async def _remember(self) -> None:
        if but := await asyncio.to_thread(ends_with_us):
            log.warning("a plain engine that recovery starts would end with the watch", says=but)
        while True:
            for name in await asyncio.to_thread(self._recovery.remember, self._watch.snapshot.engines):
                log.info("how it is started is known", engine=name)
            await asyncio.sleep(REMEMBER_S)

    async def _see_to(self, engine: str) -> None:
        """One plan, unless another one has brought the engine back. One that is refused for a while (cool-down,
        ceiling, another process acts, a full disk) is tried again after it; the same answer is told once."""
        said = ""
        try:
            while True:
                found = self._newest[engine]
                async with self._one:
                    outcome = await self._recover(found, said)
                wait_s = outcome.wait_s if outcome is not None else None
                if outcome is not None and outcome.status == "busy" and wait_s is None:
                    wait_s = self._busy_s
                if wait_s is None and self._newest[engine] is found:
                    return
                said = _gist(outcome) if outcome is not None else ""
                await asyncio.sleep(wait_s or 0.0)
        finally:
            del self._newest[engine]

    async def _recover(self, found: Incident, said: str) -> Outcome | None:
        """None: there is nothing to do any more."""
        if self._ending:
            return None
        if not self._confirmed(found.engine):
            log.info("engine is confirmed no longer", engine=found.engine)
            return None
        since_s = max(0.0, time.time() - found.began)  # evidence and verdict have mostly taken longer by now
        await asyncio.sleep(max(0.0, self._gather_s - since_s))
        engines, states = self._watch.snapshot.engines, self._watch.states
        seen = {e.name for e in engines}
        gone = {n for n, state in states.items() if n not in seen and state.proof and self._recovery.knows(n)}
        if found.engine not in seen | gone:
            outcome = Outcome(status="refused", says=f"{found.engine}: {self._why_not(found.engine)}")
            self._told(None, outcome)
            return outcome
        blamed = {name for name in seen | gone if self._confirmed(name)} | {found.engine}
        names = sorted(blamed)
        case = Case(
            blamed=await asyncio.to_thread(to_blame, names, engines, states),
            verdict=found.verdict.cls,
            certainty=found.verdict.certainty,
            summary=found.verdict.summary,
        )
        loops = await loops_of(engines, self._window_s)
        if self._ending:
            return None
        outcome = await self._recovery.recover(case, engines, loops)
        if outcome.status == "recovered" or _gist(outcome) != said:
            self._told(case, outcome)
        if outcome.wait_s is not None:
            self._said = _gist(outcome)  # of a plan that is left open
        return outcome

    def _why_not(self, engine: str) -> str:
        """Why an engine of which nothing is left is not started."""
        if not self._recovery.knows(engine):
            return "it is gone as a whole, and nobody remembers how it was started"
        return "it is gone as a whole, and its log, which would say whether that was wanted, could not be read"

    def _confirmed(self, engine: str) -> bool:
        state = self._watch.states.get(engine)
        return state is not None and state.phase == "confirmed"


def _gist(outcome: Outcome) -> str:
    """What it says without its numbers: a cool-down's seconds change, and are no news."""
    return _NUMBER.sub("", f"{outcome.status} {outcome.says}")


async def loops_of(engines: Sequence[EngineSeen], window_s: float = WINDOW_S) -> Mapping[str, Loop]:
    """Whose loop turns: every main thread of it ran within the window, by context switches and CPU; one that did not
    makes the engine's loop stand."""
    before = {e.name: _work(e) for e in engines}
    await asyncio.sleep(window_s)
    found: dict[str, Loop] = {}
    for engine in engines:
        first, second = before[engine.name], _work(engine)
        if not first or not second:
            found[engine.name] = "unknown" if not engine.deciders else "stands"
        else:
            found[engine.name] = "stands" if any(first.get(pid) == work for pid, work in second.items()) else "lives"
    return found


def _work(engine: EngineSeen) -> dict[int, tuple[int, int]]:
    """Switches and CPU of the main thread of each process that runs the engine's loop."""
    threads = [(p, main_thread(p.pid)) for p in engine.deciders]
    return {p.pid: (t.switches, t.ticks) for p, t in threads if t is not None and t.start_time == p.start_time}
