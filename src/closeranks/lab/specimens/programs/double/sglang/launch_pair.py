"""Both engines under one launcher, which is the router as well: forks ranks, serves HTTP, aborts what clients leave."""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import secrets
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from aiohttp import web

from closeranks.lab.specimens.stage import LogFormat, die_with_parent, log_to_stderr

from .srt.managers.scheduler import run_scheduler_process

ENGINES = ("prefill", "decode")
NOTICE_SECONDS = {"prefill": 0.0, "decode": 0.2}
"""How long an engine takes at most to see that its client is gone: decode looks while it waits for a token."""


class Router:
    """`/v1/completions` over both engines. A client that leaves is an abort at each of them."""

    def __init__(self, folder: Path) -> None:
        context = zmq.asyncio.Context()
        self.engines = {}
        for engine in ENGINES:
            self.engines[engine] = context.socket(zmq.PUSH)
            self.engines[engine].connect(f"ipc://{folder}/{engine}.ipc")
        self.tokens = context.socket(zmq.PULL)
        self.tokens.bind(f"ipc://{folder}/tokens.ipc")
        self.streams: dict[int, asyncio.Queue[int]] = {}
        self.rooms = itertools.count(secrets.randbits(62))
        self.starting = list(ENGINES)
        self.ready = asyncio.Event()
        self.aborts = set[asyncio.Task[None]]()

    async def pump(self) -> None:
        """Hand the tokens that decode's entry rank sends to their streams."""
        while True:
            message = json.loads(await self.tokens.recv())
            if "ready" in message:
                self.starting.remove(message["ready"])
                if not self.starting:
                    self.ready.set()
                continue
            stream = self.streams.get(message["room"])
            if stream is not None:
                stream.put_nowait(message["token"])

    async def say(self, engine: str, **message: Any) -> None:
        await self.engines[engine].send(json.dumps(message).encode())

    async def abort(self, engine: str, room: int) -> None:
        await asyncio.sleep(random.random() * NOTICE_SECONDS[engine])
        await self.say(engine, kind="abort", room=room)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        room, count = next(self.rooms), int(body["max_tokens"])
        stream = self.streams[room] = asyncio.Queue[int]()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            for engine in ENGINES:
                await self.say(engine, kind="req", room=room, pages=max(1, len(body["prompt"]) // 64), new=count)
            for _ in range(count):
                chunk = {"choices": [{"index": 0, "token_ids": [await stream.get()]}]}
                await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await answer.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            for engine in ENGINES:
                task = asyncio.create_task(self.abort(engine, room))
                self.aborts.add(task)
                task.add_done_callback(self.aborts.discard)
            raise
        finally:
            del self.streams[room]
        return answer

    async def health(self, request: web.Request) -> web.Response:
        """A flag that was set at the start."""
        return web.Response()


async def serve(folder: Path, port: int) -> None:
    router = Router(folder)
    app = web.Application()
    app.add_routes([web.post("/v1/completions", router.completions), web.get("/health", router.health)])
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    pump = asyncio.create_task(router.pump())
    server = site._server
    assert server is not None
    await router.ready.wait()
    found = {"port": server.sockets[0].getsockname()[1], "pid": os.getpid()}  # type: ignore[attr-defined]
    (folder / "ready.part").write_text(json.dumps(found))
    (folder / "ready.part").rename(folder / "ready.json")
    await pump


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tp-size", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parent", type=int, default=0, help="end with this process")
    args = parser.parse_args()
    die_with_parent(args.parent)
    log_to_stderr(LogFormat(""))
    own, context = os.getpid(), multiprocessing.get_context("fork")
    pids: dict[str, list[int]] = {}
    for engine in ENGINES:
        ranks = [
            context.Process(target=run_scheduler_process, args=(engine, rank, args.tp_size, args.folder, own))
            for rank in range(args.tp_size)
        ]
        for rank in ranks:
            rank.start()
        pids[engine] = [rank.pid or 0 for rank in ranks]
    (args.folder / "pids.json").write_text(json.dumps(pids))
    asyncio.run(serve(args.folder, args.port))


if __name__ == "__main__":
    main()
