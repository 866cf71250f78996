"""The watch on real processes that wedge, or only seem to, end to end: confirmed, bundled, named; or left alone."""

import asyncio
import json
from pathlib import Path

import pytest

from closeranks.lab.specimens import SPECIMENS, start
from closeranks.watch.incident import Incident
from closeranks.watch.loop import Watch
from closeranks.watch.settings import Settings

pytestmark = pytest.mark.slow
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
