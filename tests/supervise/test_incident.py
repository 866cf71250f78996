"""Incident folders: bounded in number and whole, also where the disk takes nothing or not everything."""

import asyncio
import errno
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from closeranks.evidence import capture
from closeranks.supervise import child, incident


async def one(parent: Path, log: Path, extra: list[Path]) -> Path:
    started = await child.start("rank0", [sys.executable, "-c", "print('up')"], log)
    await started.wait()
    return await incident.write(parent, "by the test", [started], {"engine": "decode"}, extra)


def test_what_a_disk_does_not_take_is_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    never = tmp_path / ("x" * 300)  # no file system takes the name
    folder = asyncio.run(one(tmp_path / "incidents", tmp_path / "rank0.log", [never]))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["missing"].keys() == {never.name}
    assert os.strerror(errno.ENAMETOOLONG) in manifest["missing"][never.name]
    assert manifest["files"].keys() == {"rank0.log"}
    assert (folder / "rank0.log").read_text() == "up\n"


def test_where_no_thread_can_be_started_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> Path:
        started = await child.start("rank0", ["sleep", "60"], tmp_path / "rank0.log")
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        try:
            return await incident.write(tmp_path / "incidents", "by the test", [started], {}, [])
        finally:
            monkeypatch.undo()
            await started.end(0)

    manifest = json.loads((asyncio.run(main()) / "manifest.json").read_text())
    assert manifest["reason"] == "by the test"
    assert manifest["files"].keys() == {"rank0.log", "rank0.stacks.txt", "rank0.proc.txt"}


def test_their_number_is_bounded_where_no_folder_can_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "incidents"
    for number in range(60):
        (parent / f"20260101T000000-{number:06d}").mkdir(parents=True)

    def full(folder: Path, facts: dict[str, object]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(capture, "write_manifest", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(one(parent, tmp_path / "rank0.log", []))
    left = sorted(folder.name for folder in parent.iterdir())
    assert left == [f"20260101T000000-{number:06d}" for number in range(60 - incident.KEPT + 1, 60)]


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, turns = threading.Event(), 0

    def hanging(folder: Path, contents: object) -> dict[str, str]:
        hang.wait()
        return {}

    async def main() -> None:
        nonlocal turns
        writing = asyncio.create_task(one(tmp_path / "incidents", tmp_path / "rank0.log", []))
        while not writing.done():
            await asyncio.sleep(0.05)
            turns += 1
        with pytest.raises(OSError, match="the disk hangs"):
            await writing

    monkeypatch.setattr(capture, "write_files", hanging)
    monkeypatch.setattr(incident, "PATIENCE_S", 1.0)
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        hang.set()
    assert turns, "and whoever supervises goes on meanwhile"
