"""Processes of an engine's last life, whose supervisor was killed: they end by themselves, but nobody has reaped them.

The next supervisor says of that life that it is over, and peers use pages again that it might have written to. So it
looks first.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from closeranks.supervise.platforms.base import Process
from closeranks.supervise.platforms.processes import line_of, lives

FILE = "pids"
"""In the folder of an epoch: pid and time of start (clock ticks since boot) of each process, a line each."""
THEMSELVES_S = 2.0
"""They have so long to end by themselves; then they are killed."""
PATIENCE_S = 10.0

log = structlog.get_logger()


def remember(path: Path, pids: Sequence[int]) -> None:
    """Write down who runs. Raises OSError."""
    lines = [line for pid in pids if (line := line_of(pid)) is not None]
    path.write_text("".join(f"{line.pid} {line.start}\n" for line in lines))


async def gone(path: Path) -> bool:
    """Wait until those that the file names are gone, and see to it. False: some are not to be ended (state D)."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the first life, or its folder is gone
        return True
    words = [line.split() for line in lines]
    known = [Process(int(w[0]), int(w[1])) for w in words if len(w) == 2 and w[0].isdecimal() and w[1].isdecimal()]
    began, killed = time.monotonic(), False
    while left := [process.pid for process in known if lives(process)]:
        waited = time.monotonic() - began
        if waited > PATIENCE_S:
            log.error("processes of a former life do not end", pids=left)
            return False
        if waited > THEMSELVES_S and not killed:
            killed = True
            log.warning("processes of a former life are killed", pids=left)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    return True
