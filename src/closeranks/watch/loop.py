"""The watch: look at the engines once a second, step the state machine, and act on what changed.

One loop that never waits for a signal, a dump or a disk: each of these is a task of its own with a bound, and the loop
takes what has arrived. What a change of state leads to (`on_change`, `on_incident`) is given by the caller.
"""

import asyncio
import re
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import structlog

from closeranks.watch import machine
from closeranks.watch.aside import Aside
from closeranks.watch.discover import Finder
from closeranks.watch.incident import Incident, Keeper, reasons
from closeranks.watch.limits import DEFAULT, Limits
from closeranks.watch.recover_state import NOT_OURS
from closeranks.watch.server import Told
from closeranks.watch.settings import Settings
from closeranks.watch.signals import Reader, Readings, stacks
from closeranks.watch.signals.counters import CountersSignal, HttpSignal
from closeranks.watch.signals.fetch import Client
from closeranks.watch.signals.gpu import GpuSignal
from closeranks.watch.signals.loads import LoadsSignal
from closeranks.watch.signals.log import LogSignal
from closeranks.watch.signals.probe import ProbeSignal
from closeranks.watch.signals.proc import ProcSignal
from closeranks.watch.signals.steps import StepsSignal
from closeranks.watch.snapshot import Blind, EngineSeen, Snapshot, State
from closeranks.watch.verdict import LONGEST_S

FIND_S = 5.0
FIND_LIMIT_S = 15.0
AGAIN_S = 20.0
"""Between two pairs of dumps under one suspicion."""
INCIDENT_S = 120.0
"""An engine that is confirmed again so soon, in the same life and on the same ground, is told of once, and gets no new
bundle unless nothing would be done by the verdict of the first."""
AGAIN = "confirmed again in the same life: evidence and verdict are those of the time before"
CLOSE_S = LONGEST_S + 15.0
"""What was begun for an incident has so long to be finished when the watch ends."""
AFTER_DEATH_GAP_S = 2.5
HTTP_S = 2.5


class Kept(msgspec.Struct):
    """What was kept of a confirmation. `at`: monotonic seconds."""

    at: float
    incident: Incident | None = None


OnChange = Callable[[State | None, State], None]
OnIncident = Callable[[Incident], Awaitable[None]]
log = structlog.get_logger()


class Watch:
    """Everything that a running watch has. `run` looks until it is told to stop."""

    def __init__(self, settings: Settings, limits: Limits = DEFAULT) -> None:
        self.settings, self.limits = settings, limits
        ports = [port for url in settings.url if (port := urlsplit(url).port) is not None]
        self.finder = Finder(settings.pid, ports)
        self.client = Client(HTTP_S, settings.api_key)
        self.counters = CountersSignal(self.client)
        self.logs = LogSignal(dict(entry.partition("=")[::2] for entry in settings.log))
        self.loads = LoadsSignal(self.client, self.counters)
        self.gpu = GpuSignal()
        self.probe = ProbeSignal(self.client, settings.probe, settings.probe_url)
        self.readers = [
            Reader(signal)
            for signal in (
                ProcSignal(),
                self.counters,
                HttpSignal(self.counters),
                self.loads,
                StepsSignal(self.client, self.counters),
                self.logs,
                self.probe,
                self.gpu,
            )
        ]
        self.keeper = Keeper(
            Path(settings.bundle_dir),
            self.client,
            self.counters,
            self.loads,
            self.logs,
            self.gpu,
            settings.recorder_path,
        )
        self.memory = machine.Memory()
        self.snapshot = Snapshot(time.monotonic(), time.time(), (), {})
        self.incidents: list[Incident] = []
        """The newest 50."""
        self.incidents_total = 0
        self.confirmations: dict[str, int] = {}
        self.looks = 0
        self._searched = asyncio.Event()
        self.on_change: OnChange = _say
        self.on_incident: OnIncident | None = None
        self._dumping = stacks.Dumping()
        self._rounds: stacks.Rounds | None = None
        self._dump: asyncio.Task[stacks.Rounds] | None = None
        self._find: asyncio.Task[tuple[EngineSeen, ...]] | None = None
        self._finding = Aside("find")
        self._find_began = -1e9
        self._engines: tuple[EngineSeen, ...] = ()
        self._find_trouble = ""
        self._busy: set[asyncio.Task[None]] = set()
        self._kept: dict[object, Kept] = {}
        """By engine, its life, and the ground of the confirmation."""
        self._one_incident = asyncio.Lock()

    @property
    def states(self) -> dict[str, State]:
        return dict(self.memory.states)

    def told(self) -> Told:
        """For the server."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = used.ru_utime + used.ru_stime
        return Told(self.snapshot.at, self.states, self.looks, self.incidents_total, dict(self.confirmations), cpu)

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set. What was begun for an incident is finished, within its bounds."""
        try:
            while not stop.is_set():
                began = time.monotonic()
                self.look()
                pause = max(0.05, self.settings.interval - (time.monotonic() - began))
                try:
                    await asyncio.wait_for(stop.wait(), pause)
                except TimeoutError:
                    continue
        finally:
            await self.close()

    async def searched(self, limit_s: float = 30.0) -> bool:
        """Wait until the process table has been read once; False if it was not within `limit_s`."""
        try:
            await asyncio.wait_for(self._searched.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    async def close(self, patience_s: float = CLOSE_S) -> None:
        """End every task of the watch; incidents in progress are waited for, not longer than `patience_s`."""
        if self._busy:
            await asyncio.wait(self._busy, timeout=patience_s)
        tasks = [t for t in (self._dump, self._find, *self._busy) if t is not None and not t.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(r.close() for r in self.readers), return_exceptions=True)
        await self.keeper.close()
        await self.client.close()

    def look(self) -> None:
        """One look. Does not wait for anything."""
        self._discover()
        urgent = machine.urgent(self.memory, self.snapshot, self.limits)
        for reader in self.readers:
            reader.look(self._engines, urgent)
        self._collect_dump()
        readings = {reader.signal.name: reader.latest for reader in self.readers}
        if self._rounds is not None:
            readings["stacks"] = self._rounds.readings
        self.snapshot = Snapshot(time.monotonic(), time.time(), self._engines, readings, self._dumping.ends())
        before = self.memory.states
        self.memory = machine.step(self.memory, self.snapshot, self.limits)
        self.looks += 1
        for name, state in self.memory.states.items():
            old = before.get(name)
            if old is None or old.phase != state.phase:
                self._changed(old, state)
        if any(s.phase == "suspect" for s in self.memory.states.values()):
            self._want_dump(stacks.GAP_S)

    def _discover(self) -> None:
        """Look for engines every few seconds, in a thread: a process in trouble can hang whoever reads its command."""
        now = time.monotonic()
        if self._find is not None and self._find.done():
            error = self._find.exception()
            if error is None:
                self._engines, self._find_trouble = self._find.result(), ""
                self._searched.set()
            else:
                self._trouble(f"{type(error).__name__}: {error}")
            self._find = None
        if self._find is None and now - self._find_began >= FIND_S:
            self._find_began = now
            self._find = asyncio.create_task(self._finding.run(self.finder.find))
        elif self._find is not None and now - self._find_began > FIND_LIMIT_S:
            self._trouble("the process table cannot be read in time")

    def _trouble(self, said: str) -> None:
        if said != self._find_trouble:
            log.error("discovery failed", error=said)
        self._find_trouble = said

    def _changed(self, old: State | None, state: State) -> None:
        self.on_change(old, state)
        if state.phase != "confirmed":
            return
        self.confirmations[state.engine] = self.confirmations.get(state.engine, 0) + 1
        now, key = time.monotonic(), (state.engine, self._life(state.engine), _ground(state))
        self._kept = {key: kept for key, kept in self._kept.items() if now - kept.at < INCIDENT_S}
        self._work(self._incident(state, self._kept.setdefault(key, Kept(now))))

    def _life(self, name: str) -> object:
        """What tells this life of an engine from the next; None when it is not among the processes."""
        engine = next((e for e in self._engines if e.name == name), None)
        head = engine.head if engine is not None else None
        return (head.pid, head.start_time) if head is not None else None

    def _work(self, what: Coroutine[None, None, None]) -> None:
        """Something beside the looks; its failure is said."""
        task = asyncio.create_task(what)
        self._busy.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("incident could not be handled", error=f"{type(error).__name__}: {error}")

    async def _incident(self, state: State, kept: Kept) -> None:
        """Evidence of one after the other: two at a time would dump the same processes. Who acts is told each time: the
        engine may have moved before anything was done about the confirmation before. A verdict after which nothing is
        done is not used again: the engine has wedged again since, and what shows that may only be there now."""
        async with self._one_incident:
            known = kept.incident
            if known is None or known.verdict.cls in NOT_OURS:
                incident = await self._evidence(state)
                if known is not None:
                    incident = msgspec.structs.replace(incident, news=incident.verdict.cls != known.verdict.cls)
                kept.incident = incident
            else:
                log.warning(AGAIN, engine=state.engine)
                notes, began = (*known.notes, AGAIN), time.time()
                incident = msgspec.structs.replace(
                    known, began=began, why=reasons(state), bundle_s=0.0, verdict_s=0.0, notes=notes, news=False
                )
        if self.on_incident is not None:
            await self.on_incident(incident)

    async def _evidence(self, state: State) -> Incident:
        rounds = await self._fresh_rounds()
        incident = await self.keeper.keep(state, self._with_gone(state.engine), self.states, rounds)
        self.incidents.append(incident)
        del self.incidents[:-50]
        self.incidents_total += 1
        log.error(
            "incident",
            engine=incident.engine,
            verdict=incident.verdict.cls,
            certainty=incident.verdict.certainty,
            summary=incident.verdict.summary,
            bundle=incident.folder,
            bundle_s=incident.bundle_s,
            verdict_s=incident.verdict_s,
        )
        return incident

    def _with_gone(self, name: str) -> Snapshot:
        """The last look; with this engine as it was last seen, when nothing is left of it: its log is."""
        past = self.memory.past.get(name)
        if past is None or any(e.name == name for e in self.snapshot.engines):
            return self.snapshot
        return msgspec.structs.replace(self.snapshot, engines=(*self.snapshot.engines, past.engine))

    async def _fresh_rounds(self) -> stacks.Rounds | None:
        """The dumps of this suspicion, those in progress, or new ones; None if none can be had in time."""
        if self._dump is None and (self._rounds is None or time.monotonic() - self._rounds.began > 30):
            self._want_dump(AFTER_DEATH_GAP_S)
        if self._dump is not None:
            await asyncio.wait({self._dump}, timeout=25)
            self._collect_dump()
        if self._rounds is None or time.monotonic() - self._rounds.began > 60:
            return None
        return self._rounds

    def _want_dump(self, gap_s: float) -> None:
        recent = self._rounds is not None and time.monotonic() - self._rounds.began < AGAIN_S
        if self._dump is None and not recent and self._engines:
            self._dump = asyncio.create_task(stacks.take(self._engines, self._dumping, gap_s))
            self._work(self.keeper.prepare(self._engines))

    def _collect_dump(self) -> None:
        if self._dump is None or not self._dump.done():
            return
        task, self._dump = self._dump, None
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._rounds = task.result()
            return
        log.error("stacks could not be taken", error=f"{type(error).__name__}: {error}")
        blind: Readings = {e.name: Blind(f"{type(error).__name__}: {error}"[:200]) for e in self._engines}
        self._rounds = stacks.Rounds(time.monotonic(), self._engines, readings=blind)


_VARIES = re.compile(r"\([^()]*\)|\d[\d.]*")


def _ground(state: State) -> object:
    """What a confirmation rests on: whether a proof, the class of its signs, and of each piece of evidence the signal,
    the rank and what it says, without what counts and measures in it."""
    return state.proof, state.cls, frozenset((e.signal, e.rank, _VARIES.sub("", e.text)) for e in state.why)


def _say(old: State | None, state: State) -> None:
    """One log line for each change of state."""
    loud = {"confirmed": log.error, "suspect": log.warning, "blind": log.warning if old is not None else log.info}
    level = loud.get(state.phase, log.info)
    level(
        "engine state",
        engine=state.engine,
        phase=state.phase,
        before=old.phase if old is not None else "unknown",
        why=[f"[{e.signal}] {e.text}" for e in state.why],
        blind=list(state.blind),
    )
