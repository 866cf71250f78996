"""Leaves out as many of a seed's choices as the failure can do without (delta debugging)."""

import time
from collections.abc import Callable

from tests.simulation.run import Run


def fails(run: Run) -> BaseException | None:
    try:
        run.go()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the failure that is looked at
        return error
    return None


def shorten(
    make: Callable[[frozenset[int]], Run], kind: str, choices: int, seconds: float
) -> tuple[Run, BaseException | None, frozenset[int]]:
    """The shortest run found within `seconds` that still fails with an error whose kind (`kind_of`) is `kind`.

    Halves, quarters, ... of the choices are left out as long as that fails in the same way.
    """
    stop_at = time.monotonic() + seconds
    skip: frozenset[int] = frozenset()
    kept = list(range(1, choices + 1))
    size = len(kept) // 2
    while size and time.monotonic() < stop_at:
        start, smaller = 0, False
        while start < len(kept) and time.monotonic() < stop_at:
            tried = skip | frozenset(kept[start : start + size])
            error = fails(make(tried))
            if error is not None and kind_of(error) == kind:
                skip, smaller = tried, True
                kept = [x for x in kept if x not in skip]
            else:
                start += size
        if not smaller or size > 1:
            size //= 2
    run = make(skip)
    return run, fails(run), skip


def kind_of(error: BaseException) -> str:
    """An error without its numbers: two failures of one kind have one cause, most of the time."""
    text = "".join(x for x in str(error).split(":")[-1] if not x.isdigit())
    return f"{type(error).__name__} {text[:40]}"
