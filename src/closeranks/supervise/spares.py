"""Spare processes: started ahead, libraries loaded, waiting on a pipe for the settings that make them somebody.

Loading torch takes longer than everything else in a restart together. A spare has done that and nothing more: it holds
no model, no socket and no device, and knows no epoch. It ends with its parent, like every process here.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from closeranks.supervise import child

log = structlog.get_logger()

AGAIN_S = 30.0
"""Pause before another try to start one that the machine would not let start."""
REST_S, MOST_REST_S = 1.0, 300.0
"""Pause after one that ended before it was wanted: doubled each time, up to the second."""
OPTION = "--spare"
"""A module that can wait like this takes it in place of a settings file."""


class Spares:
    """At most one spare of each name."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._waiting: dict[str, child.Child] = {}
        self._again: dict[str, float] = {}
        """When one of that name may be started again."""
        self._ended: dict[str, int] = {}
        """How many of that name ended in a row before they were wanted."""

    async def prepare(self, name: str, module: str, env: Mapping[str, str] | None = None) -> bool:
        """Start the spare of that name, with `env` beside ours, unless there is one; whether it was started.

        Where none can be (a full disk, no process to be had), or where one ends by itself (libraries that cannot be
        loaded, no memory), that is said and tried again later: who serves does not need it."""
        waiting = self._waiting.get(name)
        if waiting is not None:
            if waiting.exit_code is None:
                return False
            del self._waiting[name]
            self._rest(name, waiting)
        if time.monotonic() < self._again.get(name, 0.0):
            return False
        argv = [self._python, "-m", module, OPTION]
        try:
            self._waiting[name] = await child.start(name, argv, self._folder / f"{name}.spare.log", env, listening=True)
        except OSError as error:
            self._again[name] = time.monotonic() + AGAIN_S
            log.warning("no spare can be started now", name=name, error=str(error), again_in_s=AGAIN_S)
            return False
        return True

    def take(self, name: str, settings: Path, log: Path) -> child.Child | None:
        """Let the spare of that name become the process of `settings`, its output in `log`; None: there is none.

        One that still loads reads its settings when it has; one that dies of them is a child that ended. Raises
        OSError, and stays a spare, if the log cannot be written.
        """
        spare = self._waiting.get(name)
        if spare is None or spare.exit_code is not None:
            return None
        log.touch()
        del self._waiting[name]
        self._ended.pop(name, None)
        spare.tell(json.dumps({"settings": str(settings), "log": str(log)}).encode() + b"\n")
        return child.Child(name, log, spare.process)

    def _rest(self, name: str, spare: child.Child) -> None:
        """One has ended before it was wanted: the next comes later than after the one before."""
        ended = self._ended.get(name, 0)
        self._ended[name] = ended + 1
        rest = min(MOST_REST_S, REST_S * 2 ** min(ended, 20))
        self._again[name] = time.monotonic() + rest
        if not ended:  # the others are in its log
            log.warning(
                "a spare ended, the next ones are started ever later",
                name=name,
                code=spare.exit_code,
                log=str(spare.log),
            )

    async def end(self) -> None:
        """Kill and reap those that wait."""
        for spare in self._waiting.values():
            await spare.end(0)
        self._waiting.clear()
