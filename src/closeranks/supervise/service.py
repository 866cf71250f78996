"""A whole service: engines and a gateway under one parent, started together, ended in order."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from closeranks.supervise import child
from closeranks.supervise.engine import AGAIN_S, Engine, Program, State, said_exit

DRAIN_S = 30.0
"""How long a SIGTERM lets open requests of the gateway go on."""

log = structlog.get_logger()


def write_settings(folder: Path, gateway: Program) -> Path:
    """The gateway's settings file, for its user only (it may hold API keys), in a folder that is its user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "gateway.settings.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(gateway.settings, indent=1) + "\n")
    return path


class Service:
    """Runs `engines` and, if given, `gateway` until a signal, then ends the gateway first (it drains), engines after.

    `gateway` is restarted alone when it ends by itself: engines do not depend on it. Output of all children is shown
    on stderr, line by line, while it also stays in their log files.
    """

    def __init__(
        self, engines: Sequence[Engine], gateway: Program | None, python: str, folder: Path, drain_s: float
    ) -> None:
        self.engines = engines
        self._gateway = gateway
        self._python = python
        self._folder = folder
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._gateway_child: child.Child | None = None
        self._shown: dict[Path, int] = {}

    async def run(self, started: Callable[[], None] | None = None) -> int:
        """Until SIGINT or SIGTERM. 0: ended as wanted; 70: every engine has given up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        engines = [asyncio.create_task(e.run(), name=e.name) for e in self.engines]
        show = asyncio.create_task(self._show())
        gateway = asyncio.create_task(self._run_gateway()) if self._gateway else None
        watched = [*engines, show, *([gateway] if gateway else [])]
        stop = asyncio.create_task(self._stop.wait())
        if started:
            started()
        try:
            done, _ = await asyncio.wait([*watched, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # a supervisor's own error ends the service, loudly
        finally:
            stop.cancel()
            log.info("service stops", drain_s=self._drain_s)
            self._stop.set()
            if gateway:
                await asyncio.gather(gateway, return_exceptions=True)
            for engine in self.engines:
                engine.stop()
            await asyncio.gather(*engines, return_exceptions=True)
            show.cancel()
            self._show_new()
        return 70 if all(e.state is State.GIVEN_UP for e in self.engines) and self.engines else 0

    def _signalled(self) -> None:
        if self._stop.is_set() and self._gateway_child:  # asked twice: do not wait for open streams
            self._gateway_child.send(signal.SIGKILL)
        self._stop.set()

    async def _run_gateway(self) -> None:
        assert self._gateway is not None
        earlier = self._folder / "gateway.log"
        self._shown[earlier] = earlier.stat().st_size if earlier.exists() else 0  # an earlier service's lines
        while not self._stop.is_set():
            try:
                path = write_settings(self._folder, self._gateway)  # each time: somebody may have cleared the folder
                argv = [self._python, "-m", self._gateway.module, str(path)]
                self._gateway_child = await child.start(
                    "gateway", argv, self._folder / "gateway.log", self._gateway.env
                )
            except OSError as error:  # a full disk, no process to be had: may pass; the engines go on
                log.error("gateway cannot be started now", error=str(error), again_in_s=AGAIN_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), AGAIN_S)
                continue
            ended = asyncio.create_task(self._gateway_child.wait())
            stop = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not stop.done():
                    log.error("gateway ended, starting it again", how=said_exit(self._gateway_child.exit_code))
                    await asyncio.wait({stop}, timeout=1.0)
            finally:
                for task in (ended, stop):
                    task.cancel()
                await self._gateway_child.end(self._drain_s)

    async def _show(self) -> None:
        while True:
            self._show_new()
            await asyncio.sleep(0.25)

    def _show_new(self) -> None:
        """Pass on what the children have written since the last look."""
        children = [c for e in self.engines for c in e.children]
        if self._gateway_child:
            children.append(self._gateway_child)
            self._gateway_child.trim()
        for c in children:
            seen = self._shown.get(c.log, 0)
            try:
                with c.log.open("rb") as file:
                    file.seek(0, 2)
                    if file.tell() < seen:
                        seen = 0
                    file.seek(seen)
                    text = file.read()
            except FileNotFoundError:
                continue
            end = text.rfind(b"\n") + 1
            self._shown[c.log] = seen + end
            if end:
                sys.stderr.write(text[:end].decode(errors="replace"))
                sys.stderr.flush()
