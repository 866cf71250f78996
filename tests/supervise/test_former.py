"""Processes of a life whose supervisor was killed: waited for, ended, and never mistaken for others."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.supervise import former


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    code = "import signal; print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_one_that_lives_is_killed_and_waited_for(
    tmp_path: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former, "THEMSELVES_S", 0.1)
    former.remember(tmp_path / "pids", [process.pid])
    assert asyncio.run(former.gone(tmp_path / "pids"))
    assert process.wait() == -9


def test_one_that_does_not_end_is_said(
    tmp_path: Path, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former, "PATIENCE_S", 0.2)
    monkeypatch.setattr(former, "THEMSELVES_S", 9.0)  # as one in state D, which no signal ends
    former.remember(tmp_path / "pids", [process.pid])
    assert not asyncio.run(former.gone(tmp_path / "pids"))


def test_another_process_of_the_same_number_is_left_alone(tmp_path: Path, process: "subprocess.Popen[bytes]") -> None:
    (tmp_path / "pids").write_text(f"{process.pid} 12345\nrubbish\n{os.getpid()}\n")
    assert asyncio.run(former.gone(tmp_path / "pids"))
    assert process.poll() is None


def test_a_first_life_has_no_former_one(tmp_path: Path) -> None:
    assert asyncio.run(former.gone(tmp_path / "0" / "pids"))
