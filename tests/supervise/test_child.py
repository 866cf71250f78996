"""A child's end is seen and reaped also where the machine has nothing left to see it with."""

import asyncio
import errno
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from closeranks.supervise import child

ENDS_WHEN_TOLD = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(7)"]


@pytest.mark.parametrize("how", ["pidfd", "none left"])
def test_its_end_is_seen_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def none_left(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    if how == "none left":
        monkeypatch.setattr(os, "pidfd_open", none_left)
    monkeypatch.setattr("threading.Thread.start", no_thread)

    async def main() -> None:
        started = await child.start("rank0", ENDS_WHEN_TOLD, tmp_path / "log", listening=True)
        waits = [asyncio.create_task(started.wait()) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert started.exit_code is None
        started.tell(b"go\n")
        assert await asyncio.wait_for(asyncio.gather(*waits), 20) == [7, 7]
        assert started.exit_code == 7
        started.send(signal.SIGKILL)  # nobody is hit
        assert await started.end(1.0) == 7

    asyncio.run(main())


def test_with_no_descriptor_left_what_runs_can_be_ended_and_a_start_fails_with_an_os_error(tmp_path: Path) -> None:
    async def main() -> None:
        started = await child.start("rank0", ["sleep", "60"], tmp_path / "log")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                await child.start("rank1", ["sleep", "60"], tmp_path / "log1")
            assert await asyncio.wait_for(started.end(5.0), 20) == -signal.SIGTERM
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    asyncio.run(main())


def test_one_that_does_not_heed_is_killed_and_one_that_is_gone_can_be_told(tmp_path: Path) -> None:
    async def main() -> None:
        deaf = [
            sys.executable,
            "-c",
            "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=1); signal.pause()",
        ]
        started = await child.start("rank0", deaf, tmp_path / "log")
        while not (tmp_path / "log").read_text():  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.05)
        assert await started.end(0.2) == -signal.SIGKILL
        gone = await child.start("rank0", ["true"], tmp_path / "log", listening=True)
        assert await gone.wait() == 0
        gone.tell(b"too late\n")

    asyncio.run(main())
