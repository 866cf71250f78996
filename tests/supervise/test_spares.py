"""Spares wait loaded, become somebody at a word, and never outlive who keeps them."""

import asyncio
import itertools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from closeranks.supervise import spares as spares_module
from closeranks.supervise.spares import Spares

PROGRAM = """
import json, os, sys
if sys.argv[1] == "--spare":
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    said = json.loads(line)
    told = json.load(open(said["settings"])) | {"tuned": os.environ.get("TUNED")}
    print(json.dumps(told), file=open(said["log"], "a"))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waits.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "waits"


def test_a_spare_becomes_the_process_of_its_settings(tmp_path: Path, module: str) -> None:
    async def main() -> None:
        spares = Spares(sys.executable, tmp_path)
        assert await spares.prepare("rank0", module, {"TUNED": "yes"})
        assert not await spares.prepare("rank0", module)
        settings, log = tmp_path / "s.json", tmp_path / "rank0.log"
        settings.write_text(json.dumps({"epoch": 7}))
        assert spares.take("rank1", settings, log) is None
        taken = spares.take("rank0", settings, log)
        assert taken is not None
        assert await taken.wait() == 0
        assert json.loads(log.read_text()) == {"epoch": 7, "tuned": "yes"}
        assert spares.take("rank0", settings, log) is None, "it is somebody else now"
        await spares.end()

    asyncio.run(main())


def test_a_spare_that_died_is_none(tmp_path: Path, module: str) -> None:
    async def main() -> None:
        spares = Spares(sys.executable, tmp_path)
        await spares.prepare("rank0", "no_such_module")
        for _ in range(100):
            if await spares.prepare("rank0", module):  # until the first one is seen to have ended
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the dead spare was never replaced")
        await spares.end()
        assert spares.take("rank0", tmp_path / "s.json", tmp_path / "l") is None

    asyncio.run(main())


def test_no_spare_is_left(tmp_path: Path, module: str) -> None:
    async def main() -> int:
        spares = Spares(sys.executable, tmp_path)
        await spares.prepare("rank0", module)
        pid = spares._waiting["rank0"].pid
        await spares.end()
        return pid

    pid = asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_spare_that_cannot_be_started_is_tried_later_and_nothing_is_raised(tmp_path: Path, module: str) -> None:
    async def main() -> None:
        (tmp_path / "run").touch()
        spares = Spares(sys.executable, tmp_path / "run" / "below")
        assert not await spares.prepare("rank0", module)
        (tmp_path / "run").unlink()
        assert not await spares.prepare("rank0", module), "not again at once"
        await spares.end()

    asyncio.run(main())


def test_one_that_ends_while_it_loads_is_started_ever_later_and_that_is_said_once(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spares_module, "REST_S", 0.05)

    async def main() -> list[float]:
        spares, starts = Spares(sys.executable, tmp_path), list[float]()
        while len(starts) < 5:
            if await spares.prepare("rank0", "no_such_module"):
                starts.append(time.monotonic())
            await asyncio.sleep(0.01)
        taken = None
        while taken is None:
            await spares.prepare("rank0", module)
            taken = spares.take("rank0", tmp_path / "s.json", tmp_path / "l")
            await asyncio.sleep(0.01)
        await taken.end(5.0)
        assert await spares.prepare("rank0", "no_such_module"), "one that was of use ends the count"
        await spares.end()
        return starts

    starts = asyncio.run(main())
    assert [b - a >= 0.05 * 2**n for n, (a, b) in enumerate(itertools.pairwise(starts))] == [True] * 4
    said = "".join(capfd.readouterr())
    assert said.count("a spare ended") == 1
    assert "code=1" in said
    assert "rank0.spare.log" in said


def test_one_whose_log_cannot_be_written_stays_a_spare(tmp_path: Path, module: str) -> None:
    async def main() -> None:
        spares = Spares(sys.executable, tmp_path)
        await spares.prepare("rank0", module)
        with pytest.raises(OSError, match="No such file"):
            spares.take("rank0", tmp_path / "s.json", tmp_path / "none" / "l")
        assert not await spares.prepare("rank0", module), "it waits still"
        await spares.end()

    asyncio.run(main())
