"""The service around engines and gateway: what cannot be started now is started later."""

import asyncio
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import pytest

from closeranks.supervise.engine import Engine, Epoch, Program, State
from closeranks.supervise.service import Service

PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("pid", os.getpid(), "gateway is up", flush=True)
signal.pause()
"""


def test_a_gateway_that_cannot_be_started_is_started_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "waits.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, log = tmp_path / "run", tmp_path / "run" / "gateway.log"
    log.mkdir(parents=True)  # a log that cannot be opened

    async def main() -> int:
        service = Service([], Program("gateway", "waits", {}), sys.executable, run, 5.0)
        serving = asyncio.create_task(service.run())
        said = ""
        while "gateway cannot be started now" not in said:
            await asyncio.sleep(0.05)
            assert not serving.done()
            said += "".join(capfd.readouterr())
        log.rmdir()
        while not log.is_file() or "gateway is up" not in log.read_text():
            await asyncio.sleep(0.05)
            assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        return await serving

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 0


def test_a_gateway_starts_again_after_its_folder_was_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners of temporary folders remove what is old: settings are read at every start, and may be gone by then."""
    (tmp_path / "reads.py").write_text("import json, sys\nprint(json.load(open(sys.argv[1])), flush=True)\n" + PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, log = tmp_path / "run", tmp_path / "run" / "gateway.log"

    async def main() -> int:
        service = Service([], Program("gateway", "reads", {"port": 1}), sys.executable, run, 5.0)
        serving = asyncio.create_task(service.run())
        for life in range(3):
            while not log.is_file() or "gateway is up" not in log.read_text():
                await asyncio.sleep(0.05)
                assert not serving.done()
            assert "{'port': 1}" in log.read_text()
            assert stat.S_IMODE(run.stat().st_mode) == 0o700
            assert not list(run.glob("*.new"))
            if life < 2:
                pid = int(log.read_text().split("pid ")[1].split()[0])
                if life == 0:
                    shutil.rmtree(run)
                else:
                    log.unlink()
                    (run / f"gateway.{pid}.new").touch()  # what one leaves that finds the disk full
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM)
        return await serving

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 0


LEADER = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1]).parent
while not (folder.parent.parent / f"{folder.parent.name}.broken").exists():
    (folder / "heartbeat").touch()
    time.sleep(0.05)
sys.exit(70)
"""
STUBBORN = """
import signal, sys
said = []
signal.signal(signal.SIGTERM, lambda *_: said.append("drains"))
signal.signal(signal.SIGINT, lambda *_: said.append("hurries"))
print("gateway is up", flush=True)
while len(said) < 2:
    signal.pause()
print("last word after", sorted(said), flush=True)
"""


@pytest.mark.parametrize("draining", [False, True], ids=["serving", "draining"])
@pytest.mark.parametrize("broken", [["decode"], ["prefill", "decode"]])
def test_a_service_ends_when_an_engine_of_its_pair_has_given_up(
    broken: list[str],
    draining: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Half a pair serves nobody: clients would wait for an engine that does not come back, and whoever starts services
    anew would not hear of it. Not only once somebody sends a signal: nobody would. Clients get a word, but nothing is
    waited for that cannot go on, and the other engine is ended as well."""
    (tmp_path / "leader_like.py").write_text(LEADER)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tmp_path / "run"

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        return [Program("leader", "leader_like", {})]

    async def main() -> int:
        engines = [
            Engine(name, sys.executable, run / name, plan, lambda engine: None) for name in ("prefill", "decode")
        ]
        service = Service(engines, Program("gateway", "stubborn", {}), sys.executable, run, 600.0)
        serving = asyncio.create_task(service.run())
        log = run / "gateway.log"
        while True:
            await asyncio.sleep(0.05)
            if log.is_file() and "gateway is up" in log.read_text():
                break
        if draining:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)  # it has arrived, and the gateway lets its streams go on for 600 s
        for name in broken:
            (run / f"{name}.broken").touch()
        code = await serving
        assert "last word after ['drains', 'hurries']" in log.read_text()
        first = min(engines, key=lambda engine: engine.state is not State.GIVEN_UP)
        assert first.name in broken
        assert len(list(first.incidents.iterdir())) == 3
        assert all(engine.state is State.STOPPED for engine in engines if engine.name not in broken)
        return code

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 70
    said = capfd.readouterr().out.splitlines()  # where one looks first
    assert "service ended: nothing can be served without it" in said[-1]
    ended = f"engine={broken[-1]} incidents={run / broken[-1] / 'incidents'} last='leader exited with 70 (fault)'"
    assert broken == ["prefill", "decode"] or ended in said[-2]
