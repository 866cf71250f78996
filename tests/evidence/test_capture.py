"""What /proc says of a process, whatever its name."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from closeranks.evidence import capture


def test_a_name_that_is_cut_inside_a_character_is_read(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of it."""
    program = tmp_path / "sh模型服务器进程"
    shutil.copy("/bin/sh", program)
    with subprocess.Popen([program, "-c", "while :; do :; done"]) as child:
        try:
            assert not capture.is_stopped(child.pid)
            assert "State" in capture.proc(child.pid)
        finally:
            child.kill()


class Stuck:
    """A program that waits inside the kernel: no signal ends it until it may go on."""

    def __init__(self, started: list["Stuck"]) -> None:
        self.pid, self.returncode, self.killed = os.getpid(), None, 0
        started.append(self)

    async def communicate(self) -> tuple[bytes, bytes]:
        await asyncio.Event().wait()
        return b"", b""

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    def kill(self) -> None:
        self.killed += 1


def test_a_py_spy_that_sigkill_does_not_end_is_left_and_no_other_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Stuck] = []

    async def start(*_: object, **__: object) -> Stuck:
        return Stuck(started)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(capture, "py_spy", lambda: "py-spy")
    monkeypatch.setattr(capture, "ENDS_S", 0.01)
    monkeypatch.setattr(capture, "_left", {})

    async def go() -> tuple[str, str, int, str]:
        first, again = await capture.stacks(os.getpid(), 0.01), await capture.stacks(os.getpid(), 0.01)
        alone = len(started)
        started[0].returncode = -9  # type: ignore[assignment]
        return first, again, alone, await capture.stacks(os.getpid(), 0.01)

    first, again, alone, later = asyncio.run(asyncio.wait_for(go(), 60))
    assert "did not answer" in first
    assert "SIGKILL does not end it" in first
    assert "SIGKILL does not end it" in again
    assert "did not answer" in later, "the first one has come out: a dump is tried again"
    assert (alone, len(started)) == (1, 2)
    assert all(process.killed for process in started)
