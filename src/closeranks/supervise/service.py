"""A whole service: engines and a gateway under one parent, started together, ended in order."""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog

from closeranks.supervise.child import Child
from closeranks.supervise.engine import Engine, Program, State
from closeranks.supervise.gateway import Gateway, write_settings
from closeranks.supervise.show import Render, Show

__all__ = ["DRAIN_S", "Service", "write_settings"]

DRAIN_S = 30.0
"""How long a SIGTERM lets open requests of the gateway go on."""

log = structlog.get_logger()


class Service:
    """Runs `engines` and, if given, `gateway` until a signal, then ends the gateway first (it drains), engines after.

    Its engines are one pair, or one: when one has given up, nothing can be served any more, and whoever started the
    service has to know, so that it is started anew. It ends, its gateway without draining, instead of holding clients
    for an engine that does not come back.

    `gateway` is restarted alone when it ends or stands still: engines do not depend on it. Output of all children is
    shown on stderr, line by line (`render`: see `Show`), while it also stays in their log files. All that is written
    there, log lines too, is written in the event loop that supervises: give stderr to `output.make_unblocking` first.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        gateway: Program | None,
        python: str,
        folder: Path,
        drain_s: float,
        render: Render | None = None,
    ) -> None:
        self.engines = engines
        self._gateway = Gateway(gateway, python, folder, drain_s) if gateway else None
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._show = Show(self._children, self._write, render)

    async def run(self, started: Callable[[], None] | None = None) -> int:
        """Until SIGINT, SIGTERM or SIGHUP (if not ignored), or an engine has given up. 0: ended as wanted; 70: one
        has given up."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the terminal's end is to be outlived
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._signalled)
        if self._gateway:
            self._show.skip(self._gateway.log)
        engines = [asyncio.create_task(e.run(), name=e.name) for e in self.engines]
        show = asyncio.create_task(self._show.run())
        gateway = asyncio.create_task(self._gateway.run()) if self._gateway else None
        watched = [*engines, show, *([gateway] if gateway else [])]
        stop = asyncio.create_task(self._stop.wait())
        if started:
            started()
        try:
            done, _ = await asyncio.wait([*watched, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # a supervisor's own error ends the service, loudly; an engine that gave up has none
        finally:
            stop.cancel()
            given_up = self._given_up()
            log.info("service stops", drain_s=0 if given_up else self._drain_s)
            if not self._stop.is_set():
                self._signalled()
            if gateway:
                await self._drained(gateway, engines)
            given_up = self._given_up()
            for engine in self.engines:
                engine.stop()
            await asyncio.gather(*engines, return_exceptions=True)
            show.cancel()
            self._show.now()
        if not given_up:
            return 0
        for engine in given_up:
            log.error(
                "engine had given up", engine=engine.name, last=engine.last_reason, incidents=str(engine.incidents)
            )
        log.error("service ended: nothing can be served without it", exit_code=70)
        return 70

    async def _drained(self, gateway: "asyncio.Task[None]", engines: Sequence["asyncio.Task[None]"]) -> None:
        """Until the gateway has ended. Once an engine has given up there is nothing to drain for."""
        running = {gateway, *engines}
        while not gateway.done():
            if self._gateway and self._given_up():
                self._gateway.hurry()
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    def _given_up(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.state is State.GIVEN_UP]

    def _signalled(self) -> None:
        if self._gateway:
            self._gateway.stop()
        self._stop.set()

    def _children(self) -> Iterable[Child]:
        for engine in self.engines:
            yield from engine.children
        if self._gateway and self._gateway.child:
            yield self._gateway.child

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
