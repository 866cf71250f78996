"""The HTTP side of a specimen's launcher: an asyncio server with the engines' endpoints, on the process's main thread.

Its answers come from the board, which only live loops write. Small on purpose: no framework, so that the stack of the
launcher's main thread is asyncio's and nothing else.
"""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable
from logging import Logger
from multiprocessing.process import BaseProcess
from typing import Any

from closeranks.lab.specimens.stage import Stage

Answer = tuple[int, str, str]
"""Status, content type, body."""

Routes = dict[str, Callable[[], "Answer | asyncio.Future[Answer]"]]

Posts = dict[str, Callable[[dict[str, Any]], "Answer | asyncio.Future[Answer]"]]
"""Routes that take a JSON body."""

JSON, TEXT = "application/json", "text/plain; version=0.0.4"


class StandIn:
    """Serves `routes`; stops answering, while it goes on accepting, once `silent` is set."""

    def __init__(self, stage: Stage, logger: Logger, routes: Routes, posts: Posts | None = None) -> None:
        self.stage, self.logger, self.routes, self.posts = stage, logger, routes, posts or {}
        self.silent = False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def serve(self) -> None:
        """Bind the port, tell it, and serve until the process ends."""
        self.loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.stage.port)
        self.stage.tell("http", None, port=server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, fields = head.decode("latin-1").split(" ", 2)
            length = re.search(r"(?im)^content-length: *(\d+)", fields)
            sent = await reader.readexactly(int(length[1])) if length else b""
            if self.silent:
                await asyncio.Event().wait()
            status, kind, body = await self._answer(method, target.split("?")[0], sent)
            client = writer.get_extra_info("peername")
            self.logger.info(
                'INFO:     %s:%d - "%s %s HTTP/1.1" %d %s', *client, method, target, status, _REASON.get(status, "")
            )
            payload = body.encode()
            writer.write(
                f"HTTP/1.1 {status} {_REASON.get(status, '')}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
                + payload
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError) as gone:
            self.logger.info("client left before its answer: %s", gone)
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, sent: bytes) -> Answer:
        if method == "POST" and path in self.posts:
            answer = self.posts[path](json.loads(sent))
        elif path in self.routes:
            answer = self.routes[path]()
        else:
            return 404, JSON, json.dumps({"detail": "Not Found"})
        return answer if isinstance(answer, tuple) else await answer


_REASON = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


def watch_children(children: list[BaseProcess], on_death: Callable[[str, int, int], None]) -> None:
    """Side thread: report the first child that ended, with name, pid and exit code; leaves it unreaped (state Z)."""

    def watch() -> None:
        names = {child.pid: child.name for child in children}
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if info is not None:
            code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
            on_death(names.get(info.si_pid, "?"), info.si_pid, code)

    threading.Thread(target=watch, name="SubprocessWatchdog", daemon=True).start()
