"""Notifications: a webhook, a command. In the background, with time limits and a few tries; nobody waits for them.

    notifier = Notifier(webhooks=["https://…"], commands=["logger -t closeranks"])
    notifier.send({"event": "confirmed", "engine": "decode-31022", …})
    await notifier.close()          # what is queued has its last chance, bounded

The event is one JSON object, as the webhook's body and on the command's standard input. Its texts are redacted, however
deep they lie. Addresses of webhooks hold secrets in their path, so they are never logged whole.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp
import structlog

from closeranks.evidence.redact import redact

TRIES = 4
LIMIT_S = 5.0
COMMAND_S = 20.0
FIRST_PAUSE_S = 1.0
QUEUED = 200

log = structlog.get_logger()


class Notifier:
    """Sends events in order, each to all its receivers at once. `lost` counts those that no try brought through.

    Raises ValueError for a command that is no command line.
    """

    def __init__(
        self,
        webhooks: Sequence[str] = (),
        commands: Sequence[str] = (),
        limit_s: float = LIMIT_S,
        command_s: float = COMMAND_S,
        pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.lost = 0
        self._webhooks, self._commands = tuple(webhooks), [_words(c) for c in commands]
        self._limit_s, self._command_s, self._pause_s = limit_s, command_s, pause_s
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self._task: asyncio.Task[None] | None = None

    def send(self, event: Mapping[str, object]) -> None:
        """Queue an event; from the event loop. When the queue is full, the oldest goes."""
        if not self._webhooks and not self._commands:
            return
        if self._queue.full():
            self._queue.get_nowait()
            self._queue.task_done()
            self._count("the queue is full")
        self._queue.put_nowait(json.dumps({"schema": 1, **_clean(event)}, default=str).encode())
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="notify")

    async def close(self, patience_s: float = 10.0) -> None:
        """Wait for what is queued, not longer than `patience_s`."""
        if self._task is None:
            return
        try:
            await asyncio.wait_for(self._queue.join(), patience_s)
        except TimeoutError:
            self._count("closed before it was delivered", self._queue.qsize() + 1)  # and the one under way
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        async with aiohttp.ClientSession(trust_env=True) as session:
            while True:
                body = await self._queue.get()
                try:
                    await asyncio.gather(
                        *(self._post(session, url, body) for url in self._webhooks),
                        *(self._call(argv, body) for argv in self._commands),
                    )
                finally:
                    self._queue.task_done()

    async def _post(self, session: aiohttp.ClientSession, url: str, body: bytes) -> None:
        """A few tries with growing pauses; a 4xx other than 408 and 429 is final."""
        said = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                async with asyncio.timeout(self._limit_s):
                    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                        if answer.status < 300:
                            return
                        said = f"HTTP {answer.status}"
                        if 400 <= answer.status < 500 and answer.status not in (408, 429):
                            break
            except TimeoutError:
                said = f"no answer in {self._limit_s:.0f} s"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                said = type(error).__name__  # its text may hold the address
        self._count(f"webhook at {urlsplit(url).hostname}: {said}")

    async def _call(self, argv: Sequence[str], body: bytes) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._count(f"command {argv[0]}: {error.strerror}")
            return
        try:
            await asyncio.wait_for(process.communicate(body), self._command_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            self._count(f"command {argv[0]}: not done within {self._command_s:.0f} s")
            return
        if process.returncode:
            self._count(f"command {argv[0]}: exit code {process.returncode}")

    def _count(self, why: str, number: int = 1) -> None:
        self.lost += number
        log.error("notification lost", why=why, lost=self.lost)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command {command!r}: {error}") from None
    if not words:
        raise ValueError(f"command {command!r}: it is empty")
    return words


def _clean(value: Mapping[str, object]) -> dict[str, object]:
    return {key: _cleaned(inner) for key, inner in value.items()}


def _cleaned(value: object) -> object:
    if isinstance(value, str):
        return redact(value.encode(errors="replace").decode())
    if isinstance(value, Mapping):
        return _clean({str(key): inner for key, inner in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(inner) for inner in value]
    return value
