"""From an incident to a recovery: who is to blame, whose loop lives, and one recovery at a time.

actor = Actor(recovery, watch, notify)
watch.on_incident = actor.on_incident
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog

from closeranks.watch.incident import Incident
from closeranks.watch.procfs import main_thread
from closeranks.watch.recover import Outcome, Recovery
from closeranks.watch.recover_state import Case, Loop
from closeranks.watch.snapshot import EngineSeen, Snapshot, State

WINDOW_S = 2.0
"""How long a main thread is looked at: one that idles with little sleep makes about one switch a second."""
GATHER_S = 3.0
"""How long other engines may take to be confirmed too, so that one plan covers them."""

log = structlog.get_logger()


class Watched(Protocol):
    """What is needed of a watch."""

    snapshot: Snapshot

    @property
    def states(self) -> dict[str, State]: ...


class Actor:
    """Turns confirmations into recoveries. `told` hears of every outcome."""

    def __init__(
        self,
        recovery: Recovery,
        watch: Watched,
        told: Callable[[Case, Outcome], None] = lambda case, outcome: None,
        window_s: float = WINDOW_S,
        gather_s: float = GATHER_S,
    ) -> None:
        self._recovery, self._watch, self._told = recovery, watch, told
        self._window_s, self._gather_s = window_s, gather_s
        self._one = asyncio.Lock()
        self._covered: dict[str, float] = {}
        """Engine → epoch seconds at which the last plan that had it to blame was over."""

    async def on_incident(self, found: Incident) -> None:
        """Recover from it, unless a plan that was made meanwhile has covered its engine."""
        async with self._one:
            if found.began <= self._covered.get(found.engine, 0.0):
                log.info("incident is covered by the last recovery", engine=found.engine)
                return
            await asyncio.sleep(self._gather_s)
            states = self._watch.states
            blamed = {name for name, state in states.items() if state.phase == "confirmed"} | {found.engine}
            engines = self._watch.snapshot.engines
            case = Case(
                blamed=tuple(sorted(blamed & {e.name for e in engines})) or (found.engine,),
                verdict=found.verdict.cls,
                certainty=found.verdict.certainty,
                summary=found.verdict.summary,
            )
            outcome = await self._recovery.recover(case, engines, await loops_of(engines, self._window_s))
            over = time.time()
            self._covered |= dict.fromkeys(blamed, over)
            self._told(case, outcome)


async def loops_of(engines: Sequence[EngineSeen], window_s: float = WINDOW_S) -> Mapping[str, Loop]:
    """Whose loop turns: any main thread of an engine that ran within the window, by context switches and CPU."""
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
