"""One engine under supervision: a leader and its ranks, replaced whole at any fault, under the next epoch.

There is no partial repair. A leader or rank that ends or is stopped, or a leader whose loop does not turn (`standing`),
ends the epoch: evidence first (bounded), then every process of the epoch is killed and reaped, and only then the next
epoch starts, with `ended_epoch` saying so. Peers rely on that: what a reaped process might have written, it has
written. While an epoch serves, a spare process of each rank is kept ready for the next one.
"""

import asyncio
import contextlib
import enum
import json
import math
import os
import secrets
import shutil
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from closeranks.faults import RECORD, read_record
from closeranks.supervise import child, former, incident, loading, standing
from closeranks.supervise.spares import Spares

STORM_EPOCHS = 3
STORM_S = 60.0
"""This many faulted epochs within this many seconds, none with a culprit, stop the engine. Of the time that an epoch
takes to load no more than `LOADING_S` counts: engines that load for minutes have storms too."""
LOADING_S = 15.0
SUSPECT = 2
"""So many faults that one request shares are taken for one: with the next one it is known whether it is the culprit."""
CULPRITS = 5
"""After this many requests that failed alone, and nobody's that was finished between, it is the engine that fails."""
HOPELESS = frozenset({"ValueError", "UnsupportedModel"})
"""What a rank raises while it loads when its settings, its model and this machine do not go together (no GPU, no room
for one page). Before an engine was ever ready, that is no fault that another epoch could be without."""
LOOK_S = 0.5
"""Time between two looks at processes that run."""
AGAIN_S = 2.0
"""Pause before another try to start an engine that the machine would not let start."""
LAST_WORD_S = 1.0
"""How long a leader may take to end its rooms and write down what it knows after a rank failed."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals by which a rank ends through what it was doing; others (SIGKILL) are somebody else's deed."""
EPOCHS_KEPT = 5
"""Folders of past epochs (settings, logs, step logs) that are kept; incidents are kept apart."""
FAULT = 70
"""Exit code of a leader or rank that ended its epoch and has said why."""
STOP_S = 5.0
"""Patience with a wanted stop before SIGKILL."""

log = structlog.get_logger()


class State(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STOPPED = "stopped"
    """Ended as wanted."""
    GIVEN_UP = "given up"
    """A restart storm, or settings that cannot work; the evidence is kept, nothing is started any more."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process of an epoch: `python -m module settings.json`."""

    name: str
    module: str
    settings: dict[str, object]
    env: dict[str, str] = field(default_factory=dict)
    """Beside the environment of this process."""
    spare: bool = False
    """Keep a loaded one ready while the engine serves (see `spares`)."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What tells one life of an engine from the next. Peers take `ended` as attested: all up to it is reaped.

    `origin` is random and stands beside the number on disk: where that is lost, numbers begin anew, and say nothing of
    the epochs before.
    """

    number: int
    instance: int
    origin: int
    ended: int


Plan = Callable[[Epoch, Path], list[Program]]
"""The programs of an epoch, leader first, given its folder."""


class Engine:
    """Runs epochs until `stop`. `changed` is called at every change of state, from the event loop."""

    def __init__(self, name: str, python: str, folder: Path, plan: Plan, changed: Callable[["Engine"], None]) -> None:
        self.name = name
        self.state = State.STARTING
        self.epoch = Epoch(0, 0, 0, 0)
        self.children: list[child.Child] = []
        self.restarts = 0
        self.last_incident: Path | None = None
        self.last_reason = ""
        """Of the last fault, in one line."""
        self._python = python
        self._folder = folder
        self.plan = plan
        self._changed = changed
        self._stop = asyncio.Event()
        self._faults: list[tuple[float, set[str]]] = []
        """How old the engine was when each epoch ended by a fault, and which requests were in the step that failed."""
        self._age = 0.0
        """Seconds that its epochs have lasted, see `STORM_S`."""
        self._culprits = 0
        self._spares = Spares(python, folder)
        self._was_ready = False
        self._hopeless = False
        self._began, self._ready_at = 0.0, math.inf
        self._fault_at = 0.0
        self._evidence_s = 0.0

    @property
    def incidents(self) -> Path:
        return self._folder / "incidents"

    def stop(self) -> None:
        """End the epoch as wanted; `run` returns once every process is reaped."""
        self._stop.set()

    async def run(self) -> None:
        """Start the first epoch and every next one; returns after `stop`, or when it has given up (`state`)."""
        try:
            await self._run_epochs()
        finally:
            await self._spares.end()

    async def _run_epochs(self) -> None:
        number, origin = self._last_epoch()
        if not await former.gone(self._folder / str(number) / former.FILE):
            log.error("processes of a former life cannot be ended; what they may still write is not taken for over")
            origin = secrets.randbits(62) + 1  # nothing is said of that life
        while not self._stop.is_set():
            number += 1
            self.epoch = Epoch(number, secrets.randbits(62) + 1, origin, number - 1)
            self._set(State.STARTING if not self.restarts else State.RECOVERING)
            try:
                self._remember_epoch(number, origin)
                reason = await self._live(self._folder / str(number))
            except OSError as error:  # a full disk, no process to be had: may pass, and says nothing of the engine
                log.error("engine cannot be started now", engine=self.name, error=str(error), again_in_s=AGAIN_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), AGAIN_S)
                continue
            if reason is None:
                break
            self.restarts += 1
            if self._hopeless or self._is_storm():
                self._set(State.GIVEN_UP)
                await self._spares.end()
                said = "cannot work as it is set up" if self._hopeless else "stopped after repeated faults"
                log.error(f"engine {said}", engine=self.name, last=self.last_reason, incidents=str(self.incidents))
                return
        self._set(State.STOPPED)

    async def _live(self, folder: Path) -> str | None:
        """One epoch, from start to the last process reaped. The fault that ended it; None: it was told to stop."""
        self._prune()
        folder.mkdir(parents=True, exist_ok=True)
        programs = self.plan(self.epoch, folder)
        self.children = []
        self._began, self._ready_at = time.monotonic(), math.inf
        try:
            for program in programs:
                path = folder / f"{program.name}.settings.json"
                path.write_text(json.dumps(program.settings, indent=1) + "\n")
                place = folder / f"{program.name}.log"
                spare = self._spares.take(program.name, path, place) if program.spare else None
                argv = [self._python, "-m", program.module, str(path)]
                self.children.append(spare or await child.start(program.name, argv, place, program.env))
            former.remember(folder / former.FILE, [c.pid for c in self.children])
            log.info("engine starts", engine=self.name, epoch=self.epoch.number, pids=[c.pid for c in self.children])
            reason = await self._watch(folder, programs)
            if reason is not None:
                self._fault_at = time.time()
                fault = incident.fault_of(folder / "fault.json")
                self._was_ready |= made_at(folder / "ready") is not None
                self._hopeless = fault.get("name") in HOPELESS and not self._was_ready
                if fault:  # the leader knows better what ended its epoch than what was seen of its processes
                    reason = f"{fault.get('name')}: {fault.get('detail')} ({reason})"
                self.last_reason = reason.partition("\n")[0]
                self._set(State.RECOVERING)
                log.error("engine fault", engine=self.name, epoch=self.epoch.number, reason=reason)
                await self._keep_evidence(folder, reason, fault)
                self._evidence_s = time.time() - self._fault_at
            else:
                await self.children[0].end(STOP_S)  # the leader tells its ranks to stop, and goes
                await asyncio.gather(*(c.end(STOP_S) for c in self.children[1:]))
            return reason
        finally:
            await asyncio.gather(*(c.end(0) for c in self.children))

    async def _watch(self, folder: Path, programs: list[Program]) -> str | None:
        """Until something ends or stands still: what it was. None: `stop` was called."""
        leader = self.children[0]
        loop = standing.Loop(leader.pid, standing.File(folder / "heartbeat", folder / f"{leader.name}.settings.json"))
        stopped = {c.name: standing.Stopped(c.pid) for c in self.children}
        progress = loading.Progress(self.name, self.children)
        ready = False
        control = control_socket(programs[0])
        waits = {asyncio.create_task(c.wait(), name=c.name) for c in self.children}
        stop = asyncio.create_task(self._stop.wait())
        try:
            while True:
                done, _ = await asyncio.wait({*waits, stop}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    return None
                if done:
                    ended = [c for c in self.children if c.exit_code is not None]
                    await self._last_word(folder)
                    return ", ".join(f"{c.name} {said_exit(c.exit_code)}" for c in ended)
                for c in self.children:
                    c.trim()
                    if fault := stopped[c.name].fault():
                        return f"{c.name} {fault}"
                fault = await loop.fault()
                if fault and leader.exit_code is None:
                    return f"{leader.name} {fault}"
                if is_gone(folder):
                    return f"{folder} has been removed: what runs without it cannot be supervised"
                if loop.begun:
                    self._set(State.RUNNING)
                if not ready and (at := made_at(folder / "ready")) is not None:
                    ready, self._ready_at = True, time.monotonic()
                    self._say_back(at)
                if not ready:
                    progress.say()
                    if fault := progress.fault():
                        return fault
                    continue
                if control and is_gone(control, stat.S_ISSOCK):
                    return f"control socket {control} has been removed: nobody can connect to this engine any more"
                for program in programs:
                    if program.spare and await self._spares.prepare(program.name, program.module, program.env):
                        break  # one at a time: they take their time from those that serve
        finally:
            for task in (*waits, stop):
                task.cancel()

    def _say_back(self, ready_at: float) -> None:
        """Once after a fault: how long it took, and how much of that the evidence."""
        if self._fault_at:
            took = round(ready_at - self._fault_at, 2)
            log.info("engine is back", engine=self.name, after_s=took, evidence_s=round(self._evidence_s, 2))
            self._fault_at = 0.0

    async def _last_word(self, folder: Path) -> None:
        """After a rank failed in its work: let the leader say which requests were in the step, and go."""
        leader, ranks = self.children[0], self.children[1:]
        crashed = [(n, c) for n, c in enumerate(ranks) if c.exit_code is not None and -c.exit_code in CRASHES]
        if leader.exit_code is not None or not (crashed or any(c.exit_code == FAULT for c in ranks)):
            return
        if crashed:
            number, rank = crashed[0]
            said = {"rank": number, "how": said_exit(rank.exit_code)}
            try:
                (folder / "ended.json").write_text(json.dumps(said))
            except OSError as error:
                log.error("the leader could not be told", engine=self.name, error=str(error))
                return
            leader.send(signal.SIGUSR2)
        try:
            await asyncio.wait_for(asyncio.shield(leader.wait()), LAST_WORD_S)
        except TimeoutError:
            log.warning("the leader had nothing to say", engine=self.name)

    async def _keep_evidence(self, folder: Path, reason: str, fault: dict[str, object]) -> None:
        self._count(fault)
        facts: dict[str, object] = {"engine": self.name, "epoch": self.epoch.number, "fault": fault}
        facts["detected"] = self._fault_at
        pids = [c.pid for c in self.children]
        try:
            drill = [entry for entry in read_record(self._folder.parent / RECORD) if entry.get("pid") in pids]
            if drill:
                facts["drill"] = drill
            extra = [*folder.glob("fault.json"), *sorted(folder.glob("*.stacks"))]
            whole = sorted(folder.glob("log/*.crlog"))[-1:]  # a segment can be replayed by itself, a part of it cannot
            self.last_incident = await incident.write(self.incidents, reason, self.children, facts, extra, whole)
        except OSError as error:  # a full disk, no descriptor left: neither must keep the engine down
            log.error("incident folder could not be written", engine=self.name, error=str(error))
            return
        log.error("evidence kept", engine=self.name, incident=str(self.last_incident))

    def _count(self, fault: dict[str, object]) -> None:
        """Remember a fault; one with a culprit explains those before it in which the same request took part."""
        now = time.monotonic()
        loaded = min(self._ready_at, now)
        self._age += min(loaded - self._began, LOADING_S) + now - loaded
        if fault.get("finished"):
            self._culprits = 0
        charged = fault.get("charged")
        requests = {str(room).partition(".")[0] for room in charged} if isinstance(charged, list) else set[str]()
        culprit = str(fault.get("culprit") or "").partition(".")[0]
        if culprit:
            self._faults = [(at, rooms) for at, rooms in self._faults if culprit not in rooms]
            self._culprits += 1
        else:
            self._faults.append((self._age, requests))

    def _is_storm(self) -> bool:
        """Whether it is the engine that fails, and no request."""
        causes: list[list[set[str]]] = []
        for at, requests in self._faults:
            if at > self._age - STORM_S:
                cause = next((c for c in causes if len(c) < SUSPECT and requests.intersection(*c)), None)
                if cause is None:
                    causes.append([requests])
                else:
                    cause.append(requests)
        return len(causes) >= STORM_EPOCHS or self._culprits >= CULPRITS

    def _set(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self._changed(self)

    def _prune(self) -> None:
        """Remove folders of epochs long past. One that stays is no reason to start none."""
        try:
            past = sorted((p for p in self._folder.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
        except FileNotFoundError:  # the first
            return
        except OSError as error:
            log.warning("past epochs could not be listed", engine=self.name, error=str(error))
            return
        for path in past[:-EPOCHS_KEPT]:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # somebody else removes them too
                continue
            except OSError as error:
                log.warning("a past epoch could not be removed", engine=self.name, error=str(error))

    def _last_epoch(self) -> tuple[int, int]:
        """Number of the last epoch and its origin; none, and a new origin, where that cannot be read."""
        try:
            number, *origin = (int(word) for word in (self._folder / "epoch").read_text().split())
        except (OSError, ValueError):
            number, origin = 0, []
        return number, origin[0] if origin else secrets.randbits(62) + 1

    def _remember_epoch(self, number: int, origin: int) -> None:
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has the control sockets
        self._folder.mkdir(exist_ok=True)
        new = self._folder / "epoch.new"
        with new.open("w") as file:
            file.write(f"{number} {origin}\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(self._folder / "epoch")  # whole or not at all: a number of an origin is never used twice


def said_exit(code: int | None) -> str:
    """`exited with 70 (fault)`, `was ended by signal 9`."""
    if code is None:
        return "runs"
    if code < 0:
        return f"was ended by signal {-code}"
    return f"exited with {code}" + (" (fault)" if code == FAULT else "")


def control_socket(leader: Program) -> Path | None:
    """The file of the socket at which others connect to a leader; None where there is none (TCP, abstract)."""
    kind, _, place = str(leader.settings.get("endpoint", "")).partition("://")
    return Path(place) if kind == "ipc" and not place.startswith("@") else None


def is_gone(path: Path, is_kind: Callable[[int], bool] = stat.S_ISDIR) -> bool:
    """Whether there certainly is no such thing (a folder); not where that cannot be told now."""
    try:
        return not is_kind(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def made_at(path: Path) -> float | None:
    """Unix time of a file's last change; None: there is none, or it cannot be told now."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
