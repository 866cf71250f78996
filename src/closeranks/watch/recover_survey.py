"""What a plan is made from: of each engine its platform, processes, address, version, and what stands in the way.

Reads only. `remember` must have been called while a launcher lived for an engine whose launcher has ended.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from closeranks.evidence.redact import redact
from closeranks.supervise.platforms import (
    Launch,
    Platform,
    PlatformError,
    Process,
    Seen,
    Target,
    ends_with_us,
    platform_of,
    processes,
)
from closeranks.supervise.platforms.plain import read_launch
from closeranks.watch import procfs
from closeranks.watch.recover_state import Loop, Policy, Side
from closeranks.watch.recover_units import is_own_engine, is_service, services_of, to_blame, units_of
from closeranks.watch.recover_wire import Endpoint, Wire, endpoint_of
from closeranks.watch.snapshot import EngineSeen


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator said about an engine, in place of what was found."""

    platform: str = ""
    unit: str = ""
    command: tuple[str, ...] = ()


class Remembered(msgspec.Struct, frozen=True):
    """An engine as it was while its launcher lived."""

    unit: EngineSeen
    launch: Launch
    platform: str
    place: str


class Surveyed(msgspec.Struct, frozen=True):
    """What was found of all units: as a plan needs it, and as its steps do."""

    sides: tuple[Side, ...]
    targets: dict[str, Target]
    ends: dict[str, Endpoint]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine would be ended and started, for people. Command lines are redacted."""

    engine: str
    platform: str
    unit: str
    processes: tuple[tuple[int, int, str], ...]
    """Its whole tree now: pid, parent, title."""
    end: tuple[str, ...]
    start: tuple[str, ...]
    """Empty: its supervisor starts it."""
    detail: str
    """Where and as what it would be started."""


class Survey:
    """Looks at units (`recover_units`). `platforms` gives the platform of a name, `folder` is recovery's own."""

    def __init__(
        self,
        policy: Policy,
        choices: Mapping[str, Choice],
        platforms: Callable[[str], Platform],
        folder: Path | None = None,
    ) -> None:
        self._policy, self._choices, self._platforms, self._folder = policy, choices, platforms, folder
        self._remembered: dict[str, Remembered] = {}
        self._services: dict[str, str] = {}

    def remember(self, engines: Sequence[EngineSeen]) -> list[str]:
        """Keep in mind how those with a launcher were started, and by whom. Returns the names of new ones."""
        new = []
        self._services |= services_of(engines)
        for unit in units_of(engines):
            head = unit.launcher
            if head is None:
                continue
            old = self._remembered.get(unit.name)
            if old is not None and old.unit.head == head:
                self._remembered[unit.name] = msgspec.structs.replace(old, unit=unit)
                continue
            with contextlib.suppress(OSError, PlatformError):  # it shows as an obstacle when a plan is made
                name, place = platform_of(head.pid, self._folder)
                self._remembered[unit.name] = Remembered(unit, read_launch(head.pid), name, place)
                new.append(unit.name)
        return new

    def knows(self, name: str) -> bool:
        """Whether an engine that is gone as a whole could be started again."""
        return name in self._remembered or self._services.get(name, "") in self._remembered

    def units(self, blamed: Collection[str], engines: Sequence[EngineSeen]) -> tuple[tuple[str, ...], list[EngineSeen]]:
        """Names of the units to blame, and all units: those that are seen, and of the others those that are blamed and
        remembered. Of an engine of closeranks' that is gone with its supervisor, that is its service."""
        units = list(units_of(engines))
        seen = {unit.name for unit in units}
        named: dict[str, None] = {}
        for name in to_blame(blamed, engines):
            service = self._services.get(name, "")
            named[service if name not in seen and service in self._remembered else name] = None
        named = dict.fromkeys(to_blame(named, engines))  # a service covers those of its parts that are blamed too
        units += [self._remembered[name].unit for name in named if name not in seen and name in self._remembered]
        return tuple(named), units

    async def look(
        self, units: Sequence[EngineSeen], blamed: Collection[str], loops: Mapping[str, Loop], wire: Wire
    ) -> Surveyed:
        """All of them, within the limits that the wire has."""
        ends = await wire.listed({unit.name: self._endpoint(unit) for unit in units})
        told = await asyncio.gather(*(wire.version(ends[unit.name]) for unit in units))
        versions = dict(zip(ends, told, strict=True))
        lives = await asyncio.gather(*(wire.epoch(ends[u.name]) if is_own_engine(u) else _none() for u in units))
        for unit, life in zip(units, lives, strict=True):
            ends[unit.name] = msgspec.structs.replace(ends[unit.name], epoch=life)
        targets: dict[str, Target] = {}
        obstacles: dict[str, str] = {}
        for unit in units:
            try:
                targets[unit.name] = await asyncio.to_thread(self._find, unit)
            except (PlatformError, KeyError) as error:
                obstacles[unit.name] = str(error)
        sides = []
        for unit in units:
            obstacle = obstacles.get(unit.name) or _obstacle(targets[unit.name], targets.values())
            if not ends[unit.name].url:
                said = "its HTTP address is not known, so it could not be checked afterwards"
                obstacle = obstacle or said + (": give its gateway as --router" if unit.kind == "closeranks" else "")
            sides.append(
                Side(
                    name=unit.name,
                    kind=unit.kind,
                    role=unit.role,
                    version=versions[unit.name],
                    group=ends[unit.name].group,
                    loop=loops.get(unit.name, "stands" if unit.name in blamed else "unknown"),
                    obstacle=obstacle,
                    wanted=targets[unit.name].wanted if unit.name in targets else "",
                )
            )
        return Surveyed(tuple(sides), targets, ends)

    def _endpoint(self, unit: EngineSeen) -> Endpoint:
        """As `endpoint_of`; one of closeranks' whose gateway is not seen here is reached through the router."""
        end = endpoint_of(unit)
        if unit.kind != "closeranks":
            return end
        url, key = end.url or self._policy.router.rstrip("/"), end.key or self._policy.router_key
        return msgspec.structs.replace(end, url=url, key=key, supervised=not is_service(unit), own_name=unit.own_name)

    def _find(self, unit: EngineSeen) -> Target:
        choice = self._choices.get(unit.name, Choice())
        head = unit.launcher or (unit.procs[0] if unit.procs else None)
        remembered = self._remembered.get(unit.name)
        name, place = platform_of(head.pid if head else 0, self._folder)
        if remembered is not None and not (head and processes.lives(Process(head.pid, head.start_time))):
            name, place = remembered.platform, remembered.place  # a process that is gone is in no cgroup
        if choice.platform:
            name, place = choice.platform, choice.unit
        if unit.kind == "closeranks" and not choice.platform and not is_service(unit):
            name, place = "supervised", ""
        return self._platforms(name).find(
            Seen(
                name=unit.name,
                processes=_processes(unit),
                orphaned=unit.launcher is None,
                unit=choice.unit or place,
                command=choice.command,
                remembered=remembered.launch if remembered else None,
            )
        )


def ending(target: Target, platform: Platform) -> Ending:
    """What ending and starting this target would come to. Blocking."""
    tree = []
    for process in processes.tree(target.processes):
        line, row = processes.line_of(process.pid), procfs.row(process.pid)
        tree.append((process.pid, line.ppid if line else 0, redact(row.title if row else "?")[:120]))
    launch = target.launch
    detail = ""
    if launch is not None:
        output = launch.stderr or "a log in recovery's folder"
        detail = f"in {launch.cwd}, with its {len(launch.env)} variables, as user {launch.uid}, its output to {output}"
        detail += f"; {but}" if target.platform == "plain" and (but := ends_with_us()) else ""
    return Ending(
        engine=target.name,
        platform=target.platform,
        unit=target.unit,
        processes=tuple(tree),
        end=platform.describe(target, "end"),
        start=platform.describe(target, "start"),
        detail=detail,
    )


async def _none() -> None:
    return None


def _obstacle(target: Target, everyone: Iterable[Target]) -> str:
    """Why this target could not be replaced alone, or not at all; empty: it can."""
    shared = [t.name for t in everyone if target.unit and t.unit == target.unit and t.name != target.name]
    if shared:
        return f"{target.unit} runs {', '.join(shared)} too: it cannot be ended alone; say which platform runs each"
    return target.detail


def _processes(unit: EngineSeen) -> tuple[Process, ...]:
    """As platforms know them: with whether each leads a session, which discovery does not keep."""
    now = {p.pid: p for p in processes.known(p.pid for p in unit.procs)}
    return tuple(
        now[p.pid] if p.pid in now and now[p.pid].start == p.start_time else Process(p.pid, p.start_time)
        for p in unit.procs
    )
