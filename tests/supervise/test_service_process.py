"""A service as a process of its own: who reads its output, what its machine has left and which signal comes."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

HERE = Path(__file__).parent
NOFILE = resource.RLIMIT_NOFILE


class Toy:
    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder = folder
        self.process = process

    def until(self, holds: Callable[[], object], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, "the service has ended"
            assert time.monotonic() < end
            time.sleep(0.05)

    def epochs(self) -> int:
        """Those whose rank is up."""
        return len([log for log in self.folder.glob("both/*/rank0.log") if log.read_text()])

    def kill_rank(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if b"rank0.settings" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                return
        raise AssertionError(f"no rank among {children}")

    def ends(self, number: signal.Signals) -> int:
        """Exit code after a signal; its gateway must have had time for a word."""
        self.process.send_signal(number)
        code = self.process.wait(40)
        assert "last word" in (self.folder / "gateway.log").read_text()[-100:]
        return code


@contextlib.contextmanager
def toy(folder: Path, stderr: int | IO[bytes], *before: str) -> Iterator[Toy]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    argv = [*before, sys.executable, str(HERE / "toy_service.py"), str(folder)]
    heard = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        process = subprocess.Popen(argv, stdout=stderr, stderr=stderr, env=env, start_new_session=True)
    finally:
        signal.signal(signal.SIGHUP, heard)
    try:
        found = Toy(folder, process)
        log = folder / "gateway.log"
        found.until(lambda: found.epochs() == 1 and log.exists() and log.stat().st_size)
        yield found
    finally:
        process.kill()
        process.wait()


def test_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """A pager that waits, a terminal after Ctrl-S, a log shipper that stands still."""
    reading, writing = os.pipe()
    with toy(tmp_path, writing) as service:
        os.close(writing)
        service.until(lambda: (tmp_path / "gateway.log").stat().st_size > 4 * 65536)  # the pipe is full
        service.kill_rank()
        service.until(lambda: service.epochs() == 2)
        assert len(list(tmp_path.glob("both/incidents/*/manifest.json"))) == 1
        assert service.ends(signal.SIGTERM) == 0
    os.close(reading)


def test_a_terminal_that_is_closed_ends_it_as_sigterm_does(tmp_path: Path) -> None:
    with toy(tmp_path, subprocess.DEVNULL) as service:
        assert service.ends(signal.SIGHUP) == 0


@pytest.mark.slow
def test_under_nohup_it_outlives_its_terminal(tmp_path: Path) -> None:
    with toy(tmp_path, subprocess.DEVNULL, "nohup") as service:
        service.process.send_signal(signal.SIGHUP)
        size = (tmp_path / "gateway.log").stat().st_size
        service.until(lambda: (tmp_path / "gateway.log").stat().st_size > size + 50_000)
        assert service.ends(signal.SIGTERM) == 0


def test_no_descriptor_is_left_for_a_while(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as output, toy(tmp_path / "run", output) as service:
        soft, hard = resource.prlimit(service.process.pid, NOFILE)
        resource.prlimit(service.process.pid, NOFILE, (3, hard))
        service.until(lambda: b"a log cannot be shown now" in said.read_bytes())
        service.kill_rank()
        service.until(lambda: b"engine cannot be started now" in said.read_bytes())
        resource.prlimit(service.process.pid, NOFILE, (soft, hard))
        service.until(lambda: service.epochs() == 2)
        assert service.ends(signal.SIGTERM) == 0
    text = said.read_text()
    assert text.count("a log cannot be shown now") <= 6, "once for each log"
    assert "rank0.settings.json last word" in text
