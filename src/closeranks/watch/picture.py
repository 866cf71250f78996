"""A picture of the engines for people: states, rates and processes, from two looks. Takes no stacks, keeps no bundle.

A watch may run beside it: two py-spy at one process hinder each other, two readers of /proc do not.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from closeranks.watch import machine
from closeranks.watch.discover import Finder
from closeranks.watch.limits import DEFAULT
from closeranks.watch.procfs import TICKS
from closeranks.watch.recover_journal import JournalDamaged, episodes, read
from closeranks.watch.settings import Settings
from closeranks.watch.signals import Readings, Signal
from closeranks.watch.signals.counters import QUEUES, CountersSignal, HttpSignal
from closeranks.watch.signals.fetch import Client
from closeranks.watch.signals.loads import LoadsSignal
from closeranks.watch.signals.proc import ProcSignal
from closeranks.watch.signals.steps import StepsSignal
from closeranks.watch.snapshot import Blind, EngineSeen, Snapshot, Values
from closeranks.watch.snapshot import Signal as SignalName

LATEST = 253402300800.0
"""The year 10000: there is no time after it."""
SHOWN = 5
"""Incidents and recoveries that are shown."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One process. Rates are of the time between two looks; None: there was one look only, or it is gone."""

    label: str
    pid: int
    state: str
    cpu_percent: float | None
    switches_s: float | None
    threads: int
    wchan: str


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    name: str
    kind: str
    role: str
    url: str
    phase: str
    why: tuple[str, ...]
    blind: tuple[str, ...]
    running: float | None
    waiting: float | None
    queues: dict[str, float]
    tokens_s: float | None
    http: str
    ranks: tuple[Rank, ...]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is shown at a moment."""

    at: float
    """Epoch seconds."""
    engines: tuple[Engine, ...]
    incidents: tuple[dict[str, str], ...] = ()
    recoveries: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()


class Observer:
    """Looks when it is asked to. Close it."""

    def __init__(self, settings: Settings, state_dir: Path) -> None:
        self._bundles, self._journal = Path(settings.bundle_dir), state_dir / "journal"
        ports = [int(p) for url in settings.url if (p := url.rstrip("/").rpartition(":")[2]).isdecimal()]
        self._finder = Finder(settings.pid, ports)
        self._client = Client(2.0, settings.api_key)
        counters = CountersSignal(self._client)
        self._signals: tuple[Signal, ...] = (
            ProcSignal(),
            counters,
            LoadsSignal(self._client),
            StepsSignal(self._client, counters),
        )
        self._http = HttpSignal(counters)
        self._memory = machine.Memory()
        self._before: Snapshot | None = None

    async def look(self) -> Picture:
        """One picture. A signal that does not answer within its limit is blind, and does not hold the others up."""
        engines = await asyncio.to_thread(self._finder.find)
        found = await asyncio.gather(*(_limited(s, engines) for s in self._signals))
        readings: dict[SignalName, Readings] = {
            signal.name: reading for signal, reading in zip(self._signals, found, strict=True)
        }
        readings["http"] = await _limited(self._http, engines)
        now = Snapshot(time.monotonic(), time.time(), engines, readings)
        self._memory = machine.step(self._memory, now, DEFAULT)
        notes: list[str] = []
        made = Picture(
            at=now.wall,
            engines=tuple(self._engine(engine, now) for engine in engines),
            incidents=tuple(await asyncio.to_thread(incidents, self._bundles)),
            recoveries=tuple(await asyncio.to_thread(recoveries, self._journal, notes)),
            notes=tuple(notes),
        )
        self._before = now
        return made

    async def close(self) -> None:
        await self._client.close()

    def _engine(self, engine: EngineSeen, now: Snapshot) -> Engine:
        state = self._memory.states.get(engine.name)
        counts = _of(now, "counters", engine.name) or _of(now, "steps", engine.name) or {}
        loads = _of(now, "loads", engine.name) or {}
        http = _of(now, "http", engine.name) or {}
        numbers = {**counts, **{k: v for k, v in loads.items() if k in ("running", "waiting", *QUEUES)}}
        return Engine(
            name=engine.name,
            kind=engine.kind,
            role=engine.role,
            url=engine.url or "",
            phase=state.phase if state else "unknown",
            why=tuple(f"[{e.signal}] {e.text}" for e in state.why) if state else (),
            blind=state.blind if state else (),
            running=_number(numbers.get("running")),
            waiting=_number(numbers.get("waiting")),
            queues={name: n for name in QUEUES if (n := _number(numbers.get(name)))},
            tokens_s=self._rate(now, "steps" if engine.kind == "closeranks" else "counters", engine.name, "tokens"),
            http=str(http.get("said", "")),
            ranks=tuple(self._rank(f"{engine.name}/{p.label}", p.label, p.pid, now) for p in engine.procs),
        )

    def _rank(self, key: str, label: str, pid: int, now: Snapshot) -> Rank:
        values = _of(now, "proc", key) or {}
        ticks = self._rate(now, "proc", key, "all_ticks")
        return Rank(
            label=label,
            pid=pid,
            state=str(values.get("state", "?")),
            cpu_percent=None if ticks is None else 100.0 * ticks / TICKS,
            switches_s=self._rate(now, "proc", key, "switches"),
            threads=int(_number(values.get("threads")) or 0),
            wchan=str(values.get("wchan", "")),
        )

    def _rate(self, now: Snapshot, signal: SignalName, key: str, field: str) -> float | None:
        """Growth per second of a counter since the last look; None when it is not known or began anew."""
        old = _of(self._before, signal, key) if self._before is not None else None
        new = _of(now, signal, key)
        if not old or not new or old.get("start") != new.get("start"):
            return None
        first, second = _number(old.get(field)), _number(new.get(field))
        seconds = (_number(new.get("at")) or 0.0) - (_number(old.get("at")) or 0.0)
        if first is None or second is None or second < first or seconds <= 0:
            return None
        return (second - first) / seconds


async def _limited(signal: Signal, engines: Sequence[EngineSeen]) -> Readings:
    try:
        return await asyncio.wait_for(signal.read(engines, frozenset()), signal.limit_s)
    except TimeoutError:
        reason = f"{signal.name} did not answer in {signal.limit_s:.0f} s"
    except (OSError, ValueError) as error:  # as a signal says that it gives nothing at all
        reason = f"{type(error).__name__}: {error}"[:200]
    return {engine.name: Blind(reason) for engine in engines}


def _of(snapshot: Snapshot, signal: SignalName, key: str) -> Values | None:
    found = snapshot.readings.get(signal, {}).get(key)
    return None if found is None or isinstance(found, Blind) else found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def incidents(folder: Path) -> list[dict[str, str]]:
    """The newest bundles, newest first: when, of which engine, the verdict."""
    found = []
    try:
        folders = sorted((p for p in folder.iterdir() if (p / "manifest.json").is_file()), reverse=True)
    except OSError:
        return []
    for path in folders[:SHOWN]:
        try:
            manifest: Any = json.loads((path / "manifest.json").read_text())
        except (OSError, ValueError, RecursionError):  # it is being written, was cut, or is another's
            continue
        if not isinstance(manifest, dict):
            continue
        found.append(
            {
                "time": _time(manifest.get("confirmed")),
                "engine": str(manifest.get("engine", "")),
                "verdict": str(manifest.get("verdict", "")),
                "certainty": str(manifest.get("certainty", "")),
                "summary": str(manifest.get("summary", "")),
                "bundle": str(path),
            }
        )
    return found


def recoveries(journal: Path, notes: list[str]) -> list[dict[str, str]]:
    """The last plans of recovery, newest first: when, what it is about, how far it is."""
    try:
        entries = read(journal)
    except (OSError, JournalDamaged) as error:
        notes.append(str(error))
        return []
    found = []
    for _, own in list(episodes(entries))[: -SHOWN - 1 : -1]:
        last = own[-1]
        ladder = next((e.ladder for e in own if e.ladder is not None), None)
        now = last.says if last.event == "over" else f"{last.event} {last.action.kind if last.action else ''}"
        found.append(
            {
                "time": _time(own[0].at.wall),
                "engines": ", ".join(ladder.case.blamed) if ladder else "",
                "verdict": ladder.case.verdict if ladder else "",
                "now": now,
                "took_s": f"{last.took_s:.1f}" if last.event == "over" else "",
            }
        )
    return found


def _time(at: object) -> str:
    number = _number(at)
    if number is None or not 0 <= number < LATEST:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(number))
