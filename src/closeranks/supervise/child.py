"""One child process: started in a session of its own, its output in a file, ended by pid and reaped."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from closeranks.lifeline import PARENT

log = structlog.get_logger()

LOG_LIMIT = 64 * 2**20
"""Bytes of a child's log file before it is cut back (`trim`); the newest half is kept."""
TRIM_AGAIN_S = 60.0
"""A log that could not be cut back (full or read-only disk) is left alone for so long."""


@dataclass(slots=True)
class Child:
    """A started process. `exit_code` is None while it runs; negative: ended by that signal (as subprocess has it)."""

    name: str
    log: Path
    process: asyncio.subprocess.Process
    _trim_again: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode

    async def wait(self) -> int:
        """Until it has ended and is reaped; its exit code."""
        return await self.process.wait()

    def tell(self, line: bytes) -> None:
        """Write a line to its standard input and close that; for a child that was started `listening`."""
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.close()

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs. The pid cannot have been reused: it is not reaped before `exit_code` is set."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def end(self, patience_s: float) -> int:
        """SIGTERM, then SIGKILL (with SIGCONT's effect: a stopped process dies too) after `patience_s` seconds."""
        if self.process.returncode is None and patience_s > 0:
            self.send(signal.SIGTERM)
            try:
                return await asyncio.wait_for(self.process.wait(), patience_s)
            except TimeoutError:
                pass
        self.send(signal.SIGKILL)
        return await self.process.wait()

    def trim(self) -> None:
        """Keep the log bounded. The child appends (O_APPEND), so cutting the file under it is safe. Never raises for a
        disk that is full or read-only: a log is no reason to end who writes it."""
        if time.monotonic() < self._trim_again:
            return
        try:
            size = self.log.stat().st_size
            if size > LOG_LIMIT:
                with self.log.open("rb") as file:
                    file.seek(size - LOG_LIMIT // 2)
                    tail = file.read()
                os.truncate(self.log, 0)
                with self.log.open("ab") as file:
                    file.write(b"[older lines were cut]\n" + tail)
        except FileNotFoundError:
            return
        except OSError as error:
            self._trim_again = time.monotonic() + TRIM_AGAIN_S
            log.warning("a log could not be cut back", child=self.name, error=str(error), again_in_s=TRIM_AGAIN_S)


async def start(
    name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, listening: bool = False
) -> Child:
    """Start `argv` with stdout and stderr appended to `log`; `listening`: with a pipe to its standard input.

    A session of its own keeps a Ctrl-C at the terminal from reaching it before its supervisor has decided what ends
    first. Raises OSError if the program or the log cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.PIPE if listening else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, PARENT: str(os.getpid()), **(env or {})},
            start_new_session=True,
        )
    return Child(name, log, process)
