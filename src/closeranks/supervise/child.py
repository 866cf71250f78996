"""One child process: started in a session of its own, its output in a file, ended by pid and reaped."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOG_LIMIT = 64 * 2**20
"""Bytes of a child's log file before it is cut back (`trim`); the newest half is kept."""


@dataclass(slots=True)
class Child:
    """A started process. `exit_code` is None while it runs; negative: ended by that signal (as subprocess has it)."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

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
        """Keep the log bounded. The child appends (O_APPEND), so cutting the file under it is safe."""
        try:
            size = self.log.stat().st_size
        except FileNotFoundError:
            return
        if size > LOG_LIMIT:
            with self.log.open("rb") as file:
                file.seek(size - LOG_LIMIT // 2)
                tail = file.read()
            os.truncate(self.log, 0)
            with self.log.open("ab") as file:
                file.write(b"[older lines were cut]\n" + tail)


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
            env=dict(os.environ, **(env or {})),
            start_new_session=True,
        )
    return Child(name, log, process)
