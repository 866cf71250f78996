"""The gateway under supervision: started again when it ends, and ended when it stands still. Engines do not notice."""

import asyncio
import contextlib
import json
import signal
import time
from pathlib import Path

import structlog

from closeranks.lifeline import HEART
from closeranks.supervise import child, incident, standing
from closeranks.supervise.engine import AGAIN_S, LOOK_S, Program, said_exit

REST_S = 1.0
"""Pause before one that ended is started again."""
HURRY_S = 2.5
"""What it has to end its streams with a word, once it was asked not to wait for them."""

log = structlog.get_logger()


def write_settings(folder: Path, gateway: Program) -> Path:
    """The gateway's settings file, for its user only (it may hold API keys), in a folder that is its user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "gateway.settings.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(gateway.settings, indent=1) + "\n")
    return path


class Gateway:
    """Runs a gateway in `folder` until `stop`, one process after another.

    What it holds of its clients ends with it: their streams are cut. So one that is only slow is left alone; one that a
    signal has stopped, or whose event loop does not turn (see `standing`), serves nobody and is ended, evidence first.
    """

    def __init__(self, program: Program, python: str, folder: Path, drain_s: float) -> None:
        self.log = folder / "gateway.log"
        self.child: child.Child | None = None
        self._program = program
        self._python = python
        self._folder = folder
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Let open streams go on for `drain_s`, then end; asked again: end them with a word; and again: kill."""
        if self._hurry.is_set() and self.child:
            self.child.send(signal.SIGKILL)
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def hurry(self) -> None:
        """Let no stream go on, however often this or `stop` is called."""
        self._stop.set()
        self._hurry.set()

    async def run(self) -> None:
        """Returns after `stop`, its last process reaped."""
        while not self._stop.is_set():
            try:
                self.child, beats = await self._start()
            except OSError as error:  # a full disk, no process to be had: may pass; the engines go on
                log.error("gateway cannot be started now", error=str(error), again_in_s=AGAIN_S)
                await self._rest(AGAIN_S)
                continue
            signs = standing.Stopped(self.child.pid), standing.Loop(self.child.pid, beats)
            try:
                reason = await self._watch(self.child, *signs, self._stop)
                if reason is None:
                    await self._drain(self.child, *signs)
                else:
                    log.error("gateway is started again", reason=reason)
                    if self.child.exit_code is None:
                        await self._keep_evidence(self.child, reason)
                    else:
                        await self._rest(REST_S)
            finally:
                beats.close()
                await self.child.end(0)

    async def _start(self) -> tuple[child.Child, standing.Pipe]:
        """Raises OSError."""
        path = write_settings(self._folder, self._program)  # each time: somebody may have cleared the folder
        for left in self._folder.glob("gateway.*.new"):  # by one that ended, or found the disk full, while it wrote it
            left.unlink(missing_ok=True)
        argv = [self._python, "-m", self._program.module, str(path)]
        with contextlib.ExitStack() as undo:
            beats = standing.Pipe()
            undo.callback(beats.close)
            try:
                env = {**self._program.env, HEART: str(beats.far)}
                started = await child.start("gateway", argv, self.log, env, pass_fds=[beats.far])
            finally:
                beats.close_far()
            undo.pop_all()
        return started, beats

    async def _watch(
        self, gateway: child.Child, stopped: standing.Stopped, loop: standing.Loop, until: asyncio.Event
    ) -> str | None:
        """Until it ends or stands still: what it was. None: `until` came first."""
        ended, told = asyncio.create_task(gateway.wait()), asyncio.create_task(until.wait())
        try:
            while True:
                done, _ = await asyncio.wait({ended, told}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if told in done:
                    return None
                if ended in done:
                    return f"gateway {said_exit(gateway.exit_code)}"
                gateway.trim()
                fault = stopped.fault() or await loop.fault()
                if fault and gateway.exit_code is None:
                    return f"gateway {fault}"
        finally:
            ended.cancel()
            told.cancel()

    async def _drain(self, gateway: child.Child, stopped: standing.Stopped, loop: standing.Loop) -> None:
        """Ask it to end; when hurried, ask again by the other signal: two of the same may arrive as one."""
        gateway.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            fault = await asyncio.wait_for(self._watch(gateway, stopped, loop, self._hurry), self._drain_s)
            if fault is None:
                gateway.send(signal.SIGINT)
                await asyncio.wait_for(gateway.wait(), HURRY_S)

    async def _keep_evidence(self, gateway: child.Child, reason: str) -> None:
        facts: dict[str, object] = {"engine": "gateway", "detected": time.time()}
        try:
            extra = sorted(self._folder.glob("gateway.stacks"))
            found = await incident.write(self._folder / "gateway" / "incidents", reason, [gateway], facts, extra)
        except OSError as error:  # a full disk must not keep the gateway down
            log.error("incident folder could not be written", engine="gateway", error=str(error))
            return
        log.error("evidence kept", engine="gateway", incident=str(found))

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
