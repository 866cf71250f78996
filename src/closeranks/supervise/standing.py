"""A process that runs and does nothing: stopped by a signal, or with a loop that does not turn.

Silence alone is an inference (a busy host, a disk that takes no sign), so it needs a second, independent signal: the
main thread, which turns the loop, stands still; or the process used seconds of CPU without one turn; or the thread
sleeps again and again within one. What is left are processes that want to run and are not let.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Protocol

from closeranks.evidence import capture

HEARTBEAT_S = 3.5
"""A loop that has not beaten for so long, and whose thread stands still beside, has stopped."""
STILL_S = 1.0
"""For so long a thread is looked at that is to stand still."""
LOOP_S = 10.0
"""A loop that has not beaten for so long, while its process used half of that in CPU, goes round inside one turn."""
SLEEPS_S = 30.0
"""A loop that has not beaten for so long, though its thread sleeps, waits for something within one turn."""
FIRST_S = 120.0
"""A process that was started so long ago, has never beaten and stands still does not come any more."""
STOPPED_S = 3.0
"""A process that was stopped by a signal for so long is ended; one that goes on earlier is ridden through."""


class Stopped:
    """How long a process has been stopped by a signal."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None

    def fault(self) -> str | None:
        """What is wrong, to be said after the process's name; None: nothing."""
        if not capture.is_stopped(self._pid):
            self._since = None
        elif self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > STOPPED_S:
            return f"has been stopped by a signal for {STOPPED_S:g} s"
        return None


class Beats(Protocol):
    """The turns of a loop that its process shows."""

    def last(self) -> int | None:
        """Something that changes with each. None: none was shown yet, or it cannot be told now."""
        ...

    def carried(self) -> bool:
        """Whether one that was shown now would be seen."""
        ...


class Loop:
    """Whether a process's loop turns."""

    def __init__(self, pid: int, beats: Beats) -> None:
        self._pid = pid
        self._beats = beats
        self._seen: int | None = None
        self._since = time.monotonic()
        self._used = 0.0

    @property
    def begun(self) -> bool:
        """Whether it has beaten at all."""
        return self._seen is not None

    async def fault(self) -> str | None:
        """What is wrong, to be said after the process's name; None: nothing. Takes `STILL_S` where it has a doubt."""
        beat = self._beats.last()
        if beat is not None and beat != self._seen:
            self._seen = beat
            self._since = time.monotonic()
            self._used = cpu_s(self._pid) or 0.0
            return None
        silence = time.monotonic() - self._since
        if not self.begun:
            if silence > FIRST_S and await stands_still(self._pid):
                return f"has not begun to beat within {FIRST_S:g} s and does not run"
            return None
        if beat is None:
            return None
        used = cpu_s(self._pid)
        if silence > LOOP_S and used is not None and used - self._used > LOOP_S / 2 and self._beats.carried():
            return f"has not beaten for {silence:.1f} s, in which it used {used - self._used:.1f} s of CPU"
        if silence > SLEEPS_S and _state(self._pid) in ("S", "D") and self._beats.carried():
            return f"has not beaten for {silence:.1f} s, in which it slept within one turn"
        if silence > HEARTBEAT_S and await stands_still(self._pid) and self._beats.last() == beat:
            return f"has not beaten for {silence:.1f} s and does not run"
        return None


async def stands_still(pid: int) -> bool:
    """Whether the main thread did nothing for `STILL_S` though it could have. False where that cannot be read, and for
    a process that a debugger holds."""
    before = _main_thread(pid)
    if before is None or before[0] in "Rt":
        return False
    await asyncio.sleep(STILL_S)
    after = _main_thread(pid)
    return after is not None and after == before


def _main_thread(pid: int) -> tuple[str, int, int] | None:
    """(state, CPU ticks, context switches)."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text(errors="replace")
        fields = _fields(Path(f"/proc/{pid}/task/{pid}/stat"))
        switches = sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
        return fields[0], int(fields[11]) + int(fields[12]), switches
    except (OSError, IndexError, ValueError):
        return None


def _state(pid: int) -> str:
    """Of the main thread; empty: unknown."""
    found = _main_thread(pid)
    return found[0] if found else ""


def cpu_s(pid: int) -> float | None:
    """Seconds of CPU that all threads of a process have used; None: cannot be read."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def read_bytes(pid: int) -> int | None:
    """Bytes that a process has read, from disks or their cache (`rchar`); not what it maps. None: unknown."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(errors="replace")
        return int(text.partition("rchar:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


def _fields(path: Path) -> list[str]:
    return path.read_text(errors="replace").rsplit(")", 1)[1].split()


class File:
    """A file that the process touches. Only changes of its time count, so clocks do not matter. `beside` is a file on
    the same disk: one that does not take a touch now (read-only, damaged) takes none of the process's either."""

    def __init__(self, path: Path, beside: Path) -> None:
        self._path = path
        self._beside = beside

    def last(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None

    def carried(self) -> bool:
        try:
            os.utime(self._beside)
        except OSError:
            return False
        return True


class Pipe:
    """A pipe into which the process writes a byte: needs no disk. The process is handed `far`. Raises OSError."""

    def __init__(self) -> None:
        self._near, self.far = os.pipe()
        os.set_blocking(self._near, False)
        os.set_blocking(self.far, False)
        self._count = 0

    def close_far(self) -> None:
        """Once the process has it."""
        os.close(self.far)

    def close(self) -> None:
        os.close(self._near)

    def last(self) -> int | None:
        with contextlib.suppress(BlockingIOError):  # none since the last look
            self._count += len(os.read(self._near, 65536))
        return self._count or None

    def carried(self) -> bool:
        return True
