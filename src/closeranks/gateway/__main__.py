"""`python -m closeranks.gateway SETTINGS.json`: the gateway process.

Exits 0 after SIGTERM or SIGINT, 2 if the settings are wrong, 70 if it cannot serve (port taken, key file, template).
"""

import asyncio
import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec
import setproctitle
import structlog
import uvloop

from closeranks.gateway import app, logs, server, service, settings
from closeranks.gateway.engines import CurveKeyError
from closeranks.lifeline import BEAT_S, PARENT, Heart, end_with_parent

log = structlog.get_logger()


async def serve(given: settings.Settings) -> int:
    """Until a signal."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    place = Path(given.run_dir) / "gateway.json"
    sock = _bind(given, place)
    gateway = service.Gateway(given)
    heart = Heart()

    def beat() -> None:
        heart.beat()
        loop.call_later(BEAT_S, beat)

    def signalled() -> None:
        if stop.is_set():  # asked twice
            gateway.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    gateway.start()
    beat()
    http = server.make(app.make(gateway), given)
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    port = sock.getsockname()[1]
    _write(place, server.said(port, os.getpid()))
    log.info("gateway listens", host=given.host, port=port)
    stopping = asyncio.create_task(stop.wait())
    turning = gateway.turning()
    await asyncio.wait({serving, stopping, turning}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if turning.done():  # nothing keeps deadlines, retries and comments any more: another process does
        log.error("gateway is broken", error=repr(turning.exception()), exc_info=turning.exception())
        await gateway.stop()
        return 70
    if not serving.done():
        await gateway.drain()
        http.should_exit = True
    await serving
    await gateway.stop()
    log.info("gateway stops")
    return 0


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m closeranks.gateway SETTINGS.json", file=sys.stderr)
        return 2
    try:
        given = settings.read(argv[1])
    except (OSError, msgspec.DecodeError) as error:
        print(f"{argv[1]}: {error}", file=sys.stderr)
        return 2
    logs.configure(given)
    setproctitle.setproctitle("closeranks::gateway")
    if PARENT in os.environ:  # started by hand it outlives the terminal's shell
        end_with_parent()
    _raise_file_limit()
    run_dir = Path(given.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    stacks = (run_dir / "gateway.stacks").open("a")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        return uvloop.run(serve(given))
    except (OSError, CurveKeyError) as error:
        log.error("gateway cannot serve", error=str(error))
        return 70


def _bind(given: settings.Settings, place: Path) -> socket.socket:
    """The listening socket. With port 0, a gateway that is started again takes the port that clients know."""
    if given.port == 0 and place.exists():
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, TypeError):
            return server.bind(given.host, int(msgspec.json.decode(place.read_bytes())["port"]))
    return server.bind(given.host, given.port)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, for readers that wait for it."""
    new = path.with_suffix(f".{os.getpid()}.new")
    new.write_bytes(content)
    os.replace(new, path)


def _raise_file_limit() -> None:
    """Each client is a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
