"""The watch on real processes that wedge, or only seem to, end to end: confirmed, bundled, named; or left alone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from closeranks.lab.specimens import SPECIMENS, start
from closeranks.watch.incident import Incident
from closeranks.watch.loop import Watch
from closeranks.watch.settings import Settings
from tests.watch.test_recover_plain import free_port

pytestmark = pytest.mark.slow
STOPPED_S = 60.0
LIMIT_S = 180.0
"""On a machine whose CPUs are taken; how fast it is, `bench/watch_specimens.py` measures."""


async def watched(pid: int, bundles: Path, until_s: float) -> Watch:
    """Watch the engine of a process until its incident is over, or for `until_s` seconds."""
    watch, stop = Watch(Settings(pid=(pid,), bundle_dir=str(bundles))), asyncio.Event()

    async def over(found: Incident) -> None:
        stop.set()

    watch.on_incident = over
    asyncio.get_running_loop().call_later(until_s, stop.set)
    await watch.run(stop)
    return watch


@pytest.mark.parametrize("name", ["different_collectives", "dead_peer", "helper_dead", "lost_message", "gil_held"])
def test_a_wedge_is_confirmed_bundled_and_named(name: str, tmp_path: Path) -> None:
    specimen = SPECIMENS[name]
    with start(name, folder=tmp_path / "specimen") as running:
        running.wait_onset()
        watch = asyncio.run(watched(running.helpers["launcher"], tmp_path / "bundles", LIMIT_S))
    found = watch.incidents[0]
    assert found.verdict.cls in {specimen.verdict_class, *specimen.also}
    folder = Path(found.folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["verdict"] == found.verdict.cls
    assert {"verdict.json", "verdict.html", "verdict.md", "issue.md", "watch.json"} <= {
        p.name for p in folder.iterdir()
    }
    engine = next(p for p in folder.iterdir() if p.is_dir())
    assert list((engine / "round1").iterdir())
    assert list((engine / "round2").iterdir())
    assert (engine / "engine.log").stat().st_size > 0


@pytest.mark.parametrize("name", ["idle", "vllm_idle", "long_step", "startup", "paused"])
def test_what_only_looks_like_a_wedge_is_left_alone(name: str, tmp_path: Path) -> None:
    with start(name, folder=tmp_path / "specimen") as running:
        running.wait_onset()
        watch = asyncio.run(watched(running.helpers["launcher"], tmp_path / "bundles", 20.0))
    assert watch.incidents == []
    assert watch.confirmations == {}
    assert len(watch.states) == 1


def looks(port: int) -> int:
    """How often it has looked; -1 while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
    except OSError:
        return -1
    found = re.search(r"^closeranks_watch_looks_total (\d+)", page, re.MULTILINE)
    return int(found[1]) if found else -1


def until_looks(port: int, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while looks(port) < number:
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_watch_that_was_stopped_alarms_about_nothing(tmp_path: Path) -> None:
    """What was not looked at for a minute has not stood for a minute."""
    port, log = free_port(), tmp_path / "watch.log"
    with start("idle", folder=tmp_path / "specimen", timeout=LIMIT_S) as running, log.open("wb") as file:
        running.wait_onset()
        command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--json", "--port", str(port)]
        command += ["--pid", str(running.helpers["launcher"]), "--bundle-dir", str(tmp_path / "bundles")]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file) as watch:
            try:
                until_looks(port, 15)
                os.kill(watch.pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(watch.pid, signal.SIGCONT)
                until_looks(port, looks(port) + 20)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/states", timeout=30) as answer:
                    (state,) = json.load(answer)["states"]
            finally:
                os.kill(watch.pid, signal.SIGCONT)
                watch.terminate()
                watch.wait(90)
    assert state["phase"] == "healthy", state
    said = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line.get("phase") for line in said} & {"suspect", "confirmed"} == set(), said
    assert watch.returncode == 0
