"""The watch on a real pair of processes whose hand-overs all fail at once, while both answer and hold nothing."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from closeranks.watch.incident import Incident
from closeranks.watch.loop import Watch
from closeranks.watch.settings import Settings
from tests.watch.test_recover_plain import free_port

pytestmark = pytest.mark.slow
LIMIT_S = 240.0


@contextlib.contextmanager
def pair(folder: Path) -> Iterator[tuple[int, ...]]:
    """The launchers of a prefill and a decode engine, under the names that real ones have."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "launch_server.py").write_text("from tests.watch.refusing import main\n\nmain()\n")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    with contextlib.ExitStack() as stack:
        pids = []
        for role in ("prefill", "decode"):
            command = [sys.executable, "-m", "sglang.launch_server", "--port", str(free_port())]
            command += ["--disaggregation-mode", role, "--folder", str(folder)]
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            process = stack.enter_context(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )
            stack.callback(process.wait, 30)
            stack.callback(os.killpg, process.pid, 9)
            pids.append(process.pid)
        yield tuple(pids)


def test_a_pair_that_fails_every_hand_over_is_confirmed_and_one_under_an_abort_storm_is_not(tmp_path: Path) -> None:
    changes: list[tuple[str, str]] = []
    incidents: list[Incident] = []
    looked = asyncio.Event()

    async def until(what: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not what():
                await looked.wait()
                looked.clear()

    async def story(watch: Watch) -> None:
        def healthy() -> bool:
            phases = [state.phase for state in watch.states.values()]
            return phases == ["healthy", "healthy"]

        await until(healthy)
        (tmp_path / "storm").touch()
        looks = watch.looks
        await until(lambda: watch.looks >= looks + 12)
        assert {phase for _, phase in changes} <= {"blind", "excluded", "healthy"}, changes
        (tmp_path / "storm").unlink()
        (tmp_path / "cut").touch()
        await until(lambda: bool(incidents))
        (decode,) = (name for name, state in watch.states.items() if state.phase == "confirmed")
        assert decode == incidents[0].engine
        assert decode.startswith("decode-")
        assert incidents[0].verdict.cls in {"KV_TRANSFER", "STALE_PEER"}
        assert "requests of its own through the real path fail at once: HTTP 500" in " ".join(incidents[0].why)
        assert Path(incidents[0].folder, "watch.json").is_file()
        (tmp_path / "cut").unlink()
        await until(healthy)

    async def go(pids: tuple[int, ...]) -> None:
        watch, stop = Watch(Settings(pid=pids, bundle_dir=str(tmp_path / "bundles"))), asyncio.Event()

        async def heard(found: Incident) -> None:
            incidents.append(found)

        look = watch.look

        def counted() -> None:
            look()
            looked.set()

        watch.look = counted  # type: ignore[method-assign]
        watch.on_incident = heard
        watch.on_change = lambda old, state: changes.append((state.engine, state.phase))
        running = asyncio.create_task(watch.run(stop))
        try:
            await story(watch)
        finally:
            stop.set()
            await running

    with pair(tmp_path) as pids:
        asyncio.run(go(pids))
