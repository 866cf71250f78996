"""What happens on a confirmation: evidence first, then the verdict, both bounded, whatever the engines do.

The two rounds of stacks taken under suspicion are used; after a death, which needs no suspicion, they are taken now.
A source that gives nothing is a note in the manifest.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
import structlog

from closeranks.evidence import capture, gather, sockets
from closeranks.evidence.redact import redact
from closeranks.watch import procfs
from closeranks.watch import verdict as judging
from closeranks.watch.aside import Aside
from closeranks.watch.signals import stacks
from closeranks.watch.signals.counters import CountersSignal
from closeranks.watch.signals.fetch import Answer, Client
from closeranks.watch.signals.gpu import GpuSignal
from closeranks.watch.signals.loads import LoadsSignal
from closeranks.watch.signals.log import LogSignal
from closeranks.watch.signals.stacks import Rounds
from closeranks.watch.snapshot import EngineSeen, Snapshot, State

HEALTH_S = 5.0
"""How long a `/health` may take that is asked while stacks are being taken."""
ASK_AGAIN_S = 30.0
"""An engine's `/health` costs it a request; its probes pile up in one that stands."""
RECORDER_FILES = 64
PICKLE = b"\x80"
"""A pickle begins so, and no text does."""
STORE_S = 10.0
"""Patience with the disk of the bundles."""
LAST_WAIT_S = 1.0
"""For an answer that has not come when everything else has."""
GATHER_S = 8.0
"""Bound on everything that is asked of the engines for a bundle, after what a verdict rests on."""
ESSENTIALS_S = 6.0
"""Bound on that, for each engine. Cleaning half a megabyte of a log can take longer on a machine without a free CPU."""
LOG_END_BYTES = 48 << 10
"""The end of a log comes first, all of it when there is time."""
P = ParamSpec("P")
T = TypeVar("T")
log = structlog.get_logger()


class Incident(msgspec.Struct, frozen=True):
    """One confirmation, what was kept of it and what it was judged to be. Times are epoch seconds."""

    engine: str
    began: float
    """When the engine was confirmed."""
    why: tuple[str, ...]
    folder: str = ""
    """The bundle; empty when no disk took it."""
    bundle_s: float = 0.0
    verdict_s: float = 0.0
    verdict: judging.Judged = judging.NONE
    notes: tuple[str, ...] = ()
    news: bool = True
    """False where the same has been told of this engine a moment before."""


def reasons(state: State) -> tuple[str, ...]:
    """Why it is what it is, in words."""
    return tuple(f"[{e.signal}{f' {e.rank}' if e.rank else ''}] {e.text}" for e in state.why)


class Keeper:
    """Makes bundles from what the signals keep."""

    def __init__(
        self,
        folder: Path,
        client: Client,
        pages: CountersSignal,
        loads: LoadsSignal,
        logs: LogSignal,
        gpu: GpuSignal,
        recorder: str = "",
    ) -> None:
        self._folder = folder
        self._client, self._pages, self._loads, self._logs, self._gpu = client, pages, loads, logs, gpu
        self._recorder = (recorder,) if recorder else ()
        self._judge = judging.Judge()
        self._disk = Aside("bundles")
        self._reads: dict[str, Aside] = {}
        self._asked: dict[str, dict[str, tuple[float, asyncio.Task[Answer]]]] = {}

    async def prepare(self, engines: Sequence[EngineSeen]) -> None:
        """Under suspicion, while stacks are being taken: begin what takes its time."""
        now = time.monotonic()
        for engine in engines:
            asked = self._asked.setdefault(engine.name, {})
            for path in ("/health", "/version" if engine.kind == "vllm" else "/server_info", *self._recorder):
                if engine.url is not None and now - asked.get(path, (-1e9,))[0] > ASK_AGAIN_S:
                    asked[path] = (now, asyncio.create_task(self._client.get(engine.url + path, HEALTH_S)))
        await self._judge.prepare()

    async def close(self) -> None:
        """Give up what was begun."""
        tasks = [task for asked in self._asked.values() for _, task in asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._judge.close()

    async def keep(
        self, state: State, snapshot: Snapshot, states: Mapping[str, State], rounds: Rounds | None
    ) -> Incident:
        """Bundle and verdict of one confirmation. Never raises for what engines, disk or diagnosis do."""
        began = time.time()
        files = await self.collect(sorted(snapshot.engines, key=lambda e: e.name != state.engine), rounds)
        files.add("watch.json", redact(_told(state, snapshot, states)), clean=False)
        why = reasons(state)
        facts: dict[str, object] = {"engine": state.engine, "confirmed": began, "why": why}
        judged_later = asyncio.create_task(self._judge.judge(files.contents))
        folder = await self._store(files, state.engine, facts)
        bundle_s = time.time() - began
        judged = await judged_later
        deeper: dict[str, str] = {}
        if state.proof:
            judged = judging.beside_proof(judged, state.why[0].text)
        elif state.cls:
            judged = judging.by_signs(judged, state.cls, "; ".join(e.text for e in state.why))
        elif judged.cls == judging.NONE.cls and judged.files:
            deeper = await self._deeper(files, [e for e in snapshot.engines if e.name == state.engine])
            judged = await self._judge.judge(files.contents) if deeper else judged
        verdict_s = time.time() - began
        if folder is not None:
            said = {"verdict": judged.cls, "certainty": judged.certainty, "summary": judged.summary}
            more, facts = {**deeper, **judged.files}, {**facts, **said}
            try:
                await asyncio.wait_for(self._disk.run(partial(gather.extend, folder, more, facts)), STORE_S)
            except (OSError, ValueError) as error:  # ValueError: its manifest is not what was written
                log.error("verdict could not be stored", folder=str(folder), error=str(error) or "the disk hangs")
        return Incident(
            state.engine,
            began,
            why,
            str(folder or ""),
            round(bundle_s, 2),
            round(verdict_s, 2),
            judged,
            tuple(files.notes),
        )

    async def _deeper(self, files: gather.Files, engines: Sequence[EngineSeen]) -> dict[str, str]:
        """The native frames of the engine's ranks, added to the files, for stacks that do not decide by themselves: who
        holds the GIL, or waits inside a library, shows only there."""
        await self._judge.prepare()
        added = {}
        for engine in engines:
            for label, text in (await stacks.native(engine)).items():
                name = f"{engine.name}/native/pyspy_{label}.txt"
                await _add(files, name, text)
                added[name] = files.contents[name].decode() if name in files.contents else ""
        return added

    async def _store(self, files: gather.Files, engine: str, facts: Mapping[str, object]) -> Path | None:
        try:
            storing = self._disk.run(partial(gather.store, files, self._folder, engine, facts))
            return await asyncio.wait_for(storing, STORE_S)
        except TimeoutError:
            log.error("bundle could not be stored: the disk does not answer", folder=str(self._folder))
        except OSError as error:
            log.error("bundle could not be stored", folder=str(self._folder), error=error.strerror)
        return None

    async def collect(self, engines: Sequence[EngineSeen], rounds: Rounds | None) -> gather.Files:
        """Everything about all engines, in memory; what a verdict rests on first, engine after engine."""
        files = gather.Files()
        for name, text in _stacks(rounds) if rounds is not None else ():
            await _add(files, name, text)
        names = sockets.Names()
        for engine in engines:
            await _within(files, ESSENTIALS_S, [self._essentials(files, engine, names)])
        await _within(files, GATHER_S, [self._rest(files, engine) for engine in engines])
        if self._gpu.page:
            await _add(files, "nvidia-smi.csv", self._gpu.page)
        await _add(files, "ps.txt", _ps(engines))
        return files

    async def _essentials(self, files: gather.Files, engine: EngineSeen, names: sockets.Names) -> None:
        """Flags, connections, the end of the log, loads and counters."""
        name = engine.name
        await _add(files, f"{name}/flags.txt", " ".join(engine.argv) + "\n")
        await _add(files, f"{name}/ss.txt", await self._read(engine, sockets.waiting, _living(engine), names))
        await self._log(files, engine, LOG_END_BYTES)
        if name in self._loads.bodies:
            await _add(files, f"{name}/loads.json", self._loads.bodies[name])
        pages = list(self._pages.pages.get(name, ()))
        if pages:
            await _add(files, f"{name}/metrics_1.txt", pages[0][1])
        if len(pages) > 1:
            await _add(files, f"{name}/metrics_2.txt", pages[-1][1])

    async def _rest(self, files: gather.Files, engine: EngineSeen) -> None:
        name = engine.name
        head = engine.head or (engine.procs[0] if engine.procs else None)
        if head is not None and procfs.reused(head.pid, head.start_time):
            head = None
        if head is not None:
            await _add(files, f"{name}/environment.txt", await self._read(engine, gather.environment, head.pid))
        await self._answers(files, engine)
        await self._log(files, engine, gather.LOG_BYTES)
        if head is not None:  # last, as they are the largest: what there is no time for is lost
            for record in await self._read(engine, recorder_files, head.pid, self._logs.paths(engine)):
                await self._recording(files, engine, record)

    async def _read(self, engine: EngineSeen, what: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """A blocking call about one engine: one that hangs holds up no other engine's."""
        return await self._reads.setdefault(engine.name, Aside("evidence")).run(lambda: what(*args, **more))

    async def _log(self, files: gather.Files, engine: EngineSeen, limit: int) -> None:
        for number, path in enumerate(self._logs.files(engine)):
            text = await self._read(engine, gather.log_tail, Path(path), limit)
            await _add(files, f"{engine.name}/engine{number or ''}.log", text)

    async def _recording(self, files: gather.Files, engine: EngineSeen, path: Path) -> None:
        """A pickle as its bytes, which hold operations and places in code; anything else as text."""
        name = f"{engine.name}/{path.name}"
        data = await self._read(engine, capture.head, path, gather.BINARY_BYTES + 1)
        if data.startswith(PICKLE):
            files.keep(name, data)
        else:
            await _add(files, name, await self._read(engine, capture.tail, path, gather.FILE_BYTES))

    async def _answers(self, files: gather.Files, engine: EngineSeen) -> None:
        """What the engine has answered over HTTP."""
        name = engine.name
        if engine.url is None:
            files.notes.append(f"{name}: its address is not known, nothing was asked over HTTP")
            return
        for path, (_, task) in self._asked.get(name, {}).items():
            done, _ = await asyncio.wait({task}, timeout=LAST_WAIT_S)
            answer = task.result() if done else Answer(0, b"", HEALTH_S, "no answer yet")
            if path == "/health":
                said = answer.status or "no answer"
                await _add(files, f"{name}/health.txt", f"GET {path} -> {said} in {answer.seconds:.2f} s\n")
            elif answer.ok:
                await _add(files, f"{name}/{path.rpartition('/')[2]}.json", gather.settings(answer.body))
            else:
                files.notes.append(f"{name}{path}: {answer.said}")


def recorder_files(pid: int, logs: Sequence[str]) -> list[Path]:
    """Files of torch's flight recorder that this life of an engine has written: where its variables say, in its
    working folder, or beside its log."""
    variables = dict(entry.partition("=")[::2] for entry in gather.environment(pid).splitlines())
    places = [Path(p).parent for p in logs]
    try:
        places.append(Path(os.readlink(f"/proc/{pid}/cwd")))
        born = os.stat(f"/proc/{pid}").st_mtime
    except OSError:  # it has ended: whose files these are cannot be told any more
        return []
    found: dict[Path, None] = {}
    patterns = [(place, "nccl_trace_rank_*") for place in places]
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        if prefix := variables.get(name):
            patterns.append((Path(prefix).parent, Path(prefix).name + "*"))
    for place, pattern in patterns:
        for path in sorted(place.glob(pattern)):
            try:
                if path.is_file() and path.stat().st_mtime >= born - 1:
                    found[path] = None
            except OSError:  # it was renamed
                continue
    return list(found)[:RECORDER_FILES]


async def _within(files: gather.Files, limit_s: float, parts: Iterable[Coroutine[None, None, None]]) -> None:
    """Run them at the same time; what is late or fails becomes a note."""
    tasks = [asyncio.create_task(part) for part in parts]
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=limit_s)
    for task in late:
        task.cancel()
        files.notes.append(f"not everything could be read within {limit_s:.0f} s")
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(answer, Exception):
            files.notes.append(f"not read: {type(answer).__name__}: {answer}")


async def _add(files: gather.Files, name: str, content: str | bytes) -> None:
    """Add a file. Cleaning takes a second or so a megabyte: in a thread, as the looks go on meanwhile."""
    text = content if isinstance(content, str) else content.decode(errors="replace")
    files.add(name, await asyncio.to_thread(gather.scrub, text), clean=False)


def _stacks(rounds: Rounds) -> Iterator[tuple[str, str]]:
    """Names and texts of what two rounds gave."""
    for number, dumps in (("round1", rounds.first), ("round2", rounds.second)):
        for key, text in dumps.items():
            engine, _, label = key.partition("/")
            yield f"{engine}/{number}/pyspy_{label}.txt", text
    for name, texts in (("proc_1.txt", rounds.proc_first), ("proc_2.txt", rounds.proc_second)):
        by_engine: dict[str, list[str]] = {}
        for key, text in texts.items():
            by_engine.setdefault(key.partition("/")[0], []).append(f"==> {key} <==\n{text}")
        for engine, parts in by_engine.items():
            yield f"{engine}/{name}", "\n".join(parts)


def _living(engine: EngineSeen) -> list[int]:
    """Its processes, but those whose pid is another's by now."""
    return [p.pid for p in engine.procs if not procfs.reused(p.pid, p.start_time)]


def _ps(engines: Sequence[EngineSeen]) -> str:
    """The processes with titles only: command lines are in `flags.txt`, redacted."""
    lines = ["  PID  PPID STAT WCHAN COMMAND"]
    for engine in engines:
        for process in engine.procs:
            now = procfs.main_thread(process.pid)
            gone = now is None or now.start_time != process.start_time
            state, wchan = ("gone", "-") if now is None or gone else (now.state, now.wchan or "-")
            title = process.title if "::" in process.title else f"{process.title} ({engine.kind} {process.role})"
            if not gone:
                defunct = " <defunct>" if state == "Z" else ""
                lines.append(f"{process.pid:>5} {process.ppid:>5} {state:4} {wchan} {title}{defunct}")
    return "\n".join(lines) + "\n"


def _told(state: State, snapshot: Snapshot, states: Mapping[str, State]) -> str:
    """What the watch itself saw, for people: no part of the evidence that is diagnosed."""
    told = {
        "schema": 1,
        "confirmed": state,
        "states": list(states.values()),
        "engines": [
            {"name": e.name, "kind": e.kind, "role": e.role, "url": e.url, "procs": e.procs, "backend": e.backend}
            for e in snapshot.engines
        ],
        "readings": snapshot.readings,
    }
    return msgspec.json.format(msgspec.json.encode(told), indent=1).decode()
