"""Supervision with real processes: whole replacement at any end, evidence before it, no process left, storms stop."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from closeranks.supervise import engine as engine_module
from closeranks.supervise.engine import Engine, Epoch, Program, State

# A leader that beats, or a rank that waits; either does what its settings say to do at which epoch.
PROGRAM = """
import json, os, pathlib, sys, time
settings = json.load(open(sys.argv[1]))
folder = pathlib.Path(sys.argv[1]).parent
(folder / (settings["name"] + ".pid")).write_text(str(os.getpid()))
while True:
    if settings["beats"]:
        (folder / "heartbeat").touch()
    if settings["exit"] is not None:
        (folder / "fault.json").write_text('{"name": "planned"}')
        sys.exit(settings["exit"])
    time.sleep(0.05)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scripted.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "scripted"


def planned(module: str, exits: Callable[[int, str], int | None]) -> engine_module.Plan:
    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        return [
            Program(name, module, {"name": name, "beats": name == "leader", "exit": exits(epoch.number, name)})
            for name in ("leader", "rank0", "rank1")
        ]

    return plan


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def drive(engine: Engine, seen: asyncio.Queue[State], steps: Callable[[], Awaitable[None]]) -> None:
    run = asyncio.create_task(engine.run())
    try:
        await asyncio.wait_for(steps(), 60)
    finally:
        engine.stop()
        await asyncio.wait_for(run, 30)


def make(tmp_path: Path, plan: engine_module.Plan) -> tuple[Engine, asyncio.Queue[State]]:
    seen: asyncio.Queue[State] = asyncio.Queue()
    return Engine("prefill", sys.executable, tmp_path / "run", plan, lambda e: seen.put_nowait(e.state)), seen


async def until(seen: asyncio.Queue[State], state: State) -> None:
    while await seen.get() is not state:
        pass


def test_a_dead_rank_replaces_the_whole_engine(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            first = {c.name: c.pid for c in engine.children}
            os.kill(first["rank1"], signal.SIGKILL)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            assert engine.epoch.ended == 1
            assert not any(alive(pid) for pid in first.values())
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert manifest["exit_codes"]["rank1"] == -signal.SIGKILL
            assert "rank1 was ended by signal 9" in manifest["reason"]
            assert "scripted" in (engine.last_incident / "rank0.stacks.txt").read_text()

        await drive(engine, seen, steps)
        assert engine.state is State.STOPPED
        assert not any(alive(c.pid) for c in engine.children)

    asyncio.run(main())


def test_a_stopped_leader_is_noticed(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            os.kill(engine.children[0].pid, signal.SIGSTOP)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_storm_stops_the_engine_and_keeps_evidence(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: 70 if name == "leader" else None))

        async def steps() -> None:
            await until(seen, State.GIVEN_UP)
            assert engine.epoch.number == engine_module.STORM_EPOCHS
            assert len(list(engine.incidents.iterdir())) == engine_module.STORM_EPOCHS
            assert not any(alive(c.pid) for c in engine.children)

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_epochs_go_on_after_a_new_supervisor(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        for expected in (1, 2):
            engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

            async def steps(seen: asyncio.Queue[State] = seen) -> None:
                await until(seen, State.RUNNING)

            await drive(engine, seen, steps)
            assert engine.epoch.number == expected

    asyncio.run(main())
