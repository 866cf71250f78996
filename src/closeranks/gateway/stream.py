"""Writing a reply to its client, and noticing that the client has left."""

import asyncio
import contextlib
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from closeranks.gateway.reply import Reply

LINGER_S = 3.0
"""How long the body of a refused request is read."""
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Refusal(Response):
    """An error before the request's body was read: goes on reading it for a while, throwing it away.

    A server that closes on a client that is still sending resets the connection, and the client never sees why.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


class ReplyResponse(Response):
    """Sends a `Reply`. `clock`: for the time of the last write; `closed(status)` is called once, however it ends.

    The status line waits for the first event, comment or error, so that a refusal has its own status even where a
    stream was asked for.
    """

    def __init__(self, reply: Reply, clock: Callable[[], float], closed: Callable[[int], None]) -> None:
        self._reply = reply
        self._clock = clock
        self._closed = closed
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply
        watch = asyncio.create_task(_until_gone(receive, reply))
        status = 499  # as nginx logs a client that left
        try:
            await reply.wake.wait()
            if reply.gone:
                return
            status = reply.error.status if reply.error else 200
            if reply.streams and not reply.error:
                await self._stream(send)
            else:
                await self._whole(send, status)
            if reply.gone:
                status = 499
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            watch.cancel()
            self._closed(status)

    async def _whole(self, send: Send, status: int) -> None:
        reply = self._reply
        while not reply.done and not reply.gone:
            reply.wake.clear()
            await reply.wake.wait()
        if reply.gone:
            return
        body = reply.error.body() if reply.error else reply.take()
        status = reply.error.status if reply.error else status
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", reply.rid.encode()),
        ]
        if reply.error:
            headers += [(name.encode(), value.encode()) for name, value in reply.error.headers().items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        reply = self._reply
        headers = [*_SSE, (b"x-request-id", reply.rid.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not reply.gone:
            reply.wake.clear()
            done = reply.done  # before the take: what comes between is sent by the next round
            data = reply.take()
            if data or done:
                message: Message = {"type": "http.response.body", "body": data, "more_body": not done}
                reply.written = self._clock()
                await send(message)
            if done:
                return
            await reply.wake.wait()


async def _until_gone(receive: Receive, reply: Reply) -> None:
    """The request's body is read: what still comes from the client is its end."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.leave()
