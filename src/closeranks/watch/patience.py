"""Bounds on waits that do not count the time in which we ourselves were stopped, or got no CPU.

After a pause of this process (SIGSTOP, a machine that was held) a plain time limit is over at once, and what has long
been done beside it counts as late.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

SLICE_S = 1.0
PAUSE_S = 2.0
"""A slice that took so much longer was a pause: it counts as half of one, so that every wait has an end."""


async def within(
    task: "asyncio.Future[Any]",
    limit_s: float,
    over: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait for a task; False when it is not done after `limit_s`, or when `over` says so, asked once a second. It is
    not cancelled."""
    left = limit_s
    while left > 0:
        began, patience = clock(), min(SLICE_S, left)
        if (await asyncio.wait({task}, timeout=patience))[0]:
            return True
        if over():
            return False
        left -= patience / 2 if clock() - began > patience + PAUSE_S else patience
        left = left if left > 0.001 else 0.0
    return task.done()
