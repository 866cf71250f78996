"""A process that stands still is told from one that is slow, starved, or cannot show that it runs."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from closeranks.evidence import capture
from closeranks.supervise import standing

BEATING = """
import os, pathlib, sys, threading, time
beat = pathlib.Path(sys.argv[1])
until = {"sticks": lambda: threading.Event().wait(), "loops": lambda: [0 for _ in iter(int, 1)],
         "naps": lambda: [time.sleep(0.02) for _ in iter(int, 1)], "goes on": None}
if sys.argv[3:] == ["busy thread"]:
    threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], daemon=True).start()
while True:
    beat.touch()
    if beat.with_name("now").exists() and until[sys.argv[2]]:
        until[sys.argv[2]]()
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("HEARTBEAT_S", 0.6),
        ("STILL_S", 0.3),
        ("LOOP_S", 1.0),
        ("SLEEPS_S", 1.5),
        ("STOPPED_S", 0.5),
    ):
        monkeypatch.setattr(standing, name, seconds)


@contextlib.contextmanager
def running(folder: Path, *argv: str) -> Iterator[tuple[int, standing.Loop]]:
    """A process that beats, and then does what it was told; a supervisor's view of it."""
    beside = folder / "settings"
    beside.touch()
    process = subprocess.Popen([sys.executable, "-c", BEATING, str(folder / "heartbeat"), *argv])
    try:
        while not (folder / "heartbeat").exists():
            time.sleep(0.02)
        yield process.pid, standing.Loop(process.pid, standing.File(folder / "heartbeat", beside))
    finally:
        process.kill()
        process.wait()


def first_fault(loop: standing.Loop, seconds: float = 20.0, begin: Callable[[], object] = lambda: None) -> str | None:
    """What is found within that time; `begin` is called after the first beat was seen."""

    async def main() -> str | None:
        until = time.monotonic() + seconds
        assert await loop.fault() is None
        begin()
        while time.monotonic() < until:
            if fault := await loop.fault():
                return fault
            await asyncio.sleep(0.05)
        return None

    return asyncio.run(main())


@pytest.mark.parametrize("beside", ["", "busy thread"])
def test_a_loop_that_is_held_is_found_whatever_other_threads_do(tmp_path: Path, beside: str) -> None:
    with running(tmp_path, "sticks", *([beside] if beside else [])) as (_, loop):
        found = first_fault(loop, begin=(tmp_path / "now").touch)
    assert found is not None
    assert "has not beaten for" in found
    assert found.endswith("and does not run")


def test_a_loop_that_goes_round_within_one_turn_is_found(tmp_path: Path) -> None:
    with running(tmp_path, "loops") as (_, loop):
        found = first_fault(loop, begin=(tmp_path / "now").touch)
    assert found is not None
    assert found.endswith("s of CPU")


def test_a_loop_that_sleeps_again_and_again_within_one_turn_is_found(tmp_path: Path) -> None:
    with running(tmp_path, "naps") as (_, loop):
        found = first_fault(loop, begin=(tmp_path / "now").touch)
    assert found is not None
    assert found.endswith("in which it slept within one turn")


def test_a_loop_that_turns_is_left_alone_and_one_whose_beats_cannot_be_seen_too(tmp_path: Path) -> None:
    with running(tmp_path, "goes on") as (_, loop):
        assert first_fault(loop, 1.0) is None
        assert first_fault(loop, 1.0, (tmp_path / "heartbeat").unlink) is None  # it comes again
        assert loop.begun


def test_a_disk_that_takes_no_beat_is_no_fault_of_the_loop(tmp_path: Path) -> None:
    with running(tmp_path, "loops") as (_, loop):
        (tmp_path / "settings").unlink()
        assert first_fault(loop, 2.0, (tmp_path / "now").touch) is None


def test_one_that_never_begins_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "FIRST_S", 0.5)
    process = subprocess.Popen(["sleep", "60"])
    try:
        found = first_fault(standing.Loop(process.pid, standing.File(tmp_path / "heartbeat", tmp_path)))
    finally:
        process.kill()
        process.wait()
    assert found == "has not begun to beat within 0.5 s and does not run"


def test_a_stop_is_ridden_through_unless_it_lasts(tmp_path: Path) -> None:
    with running(tmp_path, "goes on") as (pid, _):
        stopped = standing.Stopped(pid)
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                assert stopped.fault() is None
                time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            while capture.is_stopped(pid):
                time.sleep(0.01)
            assert stopped.fault() is None
        os.kill(pid, signal.SIGSTOP)
        while not (found := stopped.fault()):
            time.sleep(0.05)
        assert found == "has been stopped by a signal for 0.5 s"


def test_beats_come_through_a_pipe_that_nobody_looks_at_for_long() -> None:
    pipe = standing.Pipe()
    assert pipe.last() is None
    with contextlib.suppress(BlockingIOError):  # full: the writer does not wait
        while True:
            os.write(pipe.far, b"." * 4096)
    full = pipe.last()
    assert full is not None
    os.write(pipe.far, b".")
    assert pipe.last() == full + 1
    pipe.close_far()
    assert pipe.last() == full + 1, "and its end is no beat"
    pipe.close()


def test_a_name_that_is_cut_inside_a_character_is_read(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of it."""
    program = tmp_path / "sh模型服务器进程"
    shutil.copy("/bin/sh", program)
    with subprocess.Popen([program, "-c", "while :; do :; done"]) as child:
        try:
            assert not asyncio.run(standing.stands_still(child.pid)), "it works all the time"
            assert standing.cpu_s(child.pid) is not None
        finally:
            child.kill()
