"""One child process: started in a session of its own, its output in a file, ended by pid and reaped."""

import asyncio
import contextlib
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
LOOK_S = 0.05
"""Between two looks for an end that nobody tells of."""


@dataclass(slots=True)
class Child:
    """A started process. `exit_code` is None while it runs; negative: ended by that signal (as subprocess has it).

    Neither a thread nor a descriptor is needed to see and reap its end (asyncio's own children take one each): where
    a machine has none left, what runs is supervised as ever.
    """

    name: str
    log: Path
    process: "subprocess.Popen[bytes]"
    _trim_again: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    async def wait(self) -> int:
        """Until it has ended and is reaped; its exit code."""
        while (code := self.process.poll()) is None:
            await _ended(self.process.pid)
        return code

    def tell(self, line: bytes) -> None:
        """Write a short line to its standard input and close that; for a child that was started `listening`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:  # it has ended, as `wait` will say
            pipe.write(line)

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still runs. The pid cannot have been reused: it is not reaped before `exit_code` is set."""
        self.process.send_signal(number)

    async def end(self, patience_s: float) -> int:
        """SIGTERM, then SIGKILL (with SIGCONT's effect: a stopped process dies too) after `patience_s` seconds."""
        if patience_s > 0:
            self.send(signal.SIGTERM)
            try:
                return await asyncio.wait_for(self.wait(), patience_s)
            except TimeoutError:
                pass
        self.send(signal.SIGKILL)
        return await self.wait()

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
    name: str,
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    listening: bool = False,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `argv` with stdout and stderr appended to `log`; `listening`: with a pipe to its standard input.

    A session of its own keeps a Ctrl-C at the terminal from reaching it before its supervisor has decided what ends
    first. `pass_fds` are descriptors that it keeps. Raises OSError if the program or the log cannot be opened, or there
    is no process or descriptor to be had.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own call is this one, too
            argv,
            stdin=subprocess.PIPE if listening else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, PARENT: str(os.getpid()), **(env or {})},
            start_new_session=True,
            pass_fds=pass_fds,
        )
    return Child(name, log, process)


async def _ended(pid: int) -> None:
    """Until a child of this process has ended, or, where there is no descriptor to wait on, for a moment."""
    try:
        watched = os.pidfd_open(pid)
    except OSError:  # none left, or a kernel without
        await asyncio.sleep(LOOK_S)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(watched, ended.set)
        await ended.wait()
    except OSError:  # not even a place among the watched ones
        await asyncio.sleep(LOOK_S)
    finally:
        loop.remove_reader(watched)
        os.close(watched)
