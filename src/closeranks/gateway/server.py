"""uvicorn with what a public port needs besides: time and size limits on headers, and an end that is bounded."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httptools
import msgspec
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from closeranks.gateway.errors import ApiError, Invalid, Slow, TooLarge
from closeranks.gateway.settings import Settings

LINGER_S = 3.0
"""How long a request that has been answered may go on sending its body."""
UNKNOWN = 1 << 62
"""Bytes of an answer that ends when the connection does."""
PIPELINED = 16
"""Requests that may wait behind the one being answered before their connection is not read any more."""

log = structlog.get_logger()


def protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """The connection class for these limits."""

    class Protocol(HttpToolsProtocol):
        """Armed with a timer while headers are incomplete, while an answered request still sends its body, and while
        bytes wait for a client that does not take them.

        An offer to speak another protocol (`Upgrade: h2c` is what some clients send with every request) is declined by
        ignoring it. The parser stops at such a head and skips its body, so the head is read again without the offer.

        An answer without a length is sent in chunks by uvicorn, also to those who speak HTTP/1.0 and cannot read them
        (RFC 9112 6.1): to them its end is the end of the connection.

        uvicorn queues pipelined requests but forgets the one that it answers: `_running` is that one. Its client's
        end must reach it, and what is wrong with a later request is said after its answer, not into it.
        """

        _timer: asyncio.TimerHandle | None = None
        _in_headers = False
        _in_body = False
        _header_bytes = 0
        """Of a head that is not complete yet, as it came. Where it began, what came before it does not count."""
        _begun = False
        """A head began in the bytes that are being read."""
        _head_bytes = 0
        """Of the head being read, as it was understood: one that came whole in one piece was never incomplete."""
        _frame_bytes = 0
        """Since the last byte of a body: sizes and extensions of its chunks, and its trailers, which nobody reads."""
        _running: RequestResponseCycle | None = None
        _refusal: ApiError | None = None
        """Due after the answers that are under way; what the client sends meanwhile is thrown away."""
        _stuck: asyncio.TimerHandle | None = None
        _unsent = 0

        # ---- in

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm(settings.header_timeout_s, self._slow_headers)

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._taken()
            super().connection_lost(exc)
            self.pipeline.clear()
            if self._answering is not None:
                self._answering.disconnected = True
                self._answering.message_event.set()

        def data_received(self, data: bytes) -> None:
            if self._refusal is not None:
                return
            self._begun = False
            self._frame_bytes += len(data)
            self._feed(data)
            if self._in_headers:
                self._header_bytes = self._head_bytes if self._begun else self._header_bytes + len(data)
                if self._header_bytes > settings.max_header_bytes:
                    self._large_head()
            elif self._frame_bytes > settings.max_header_bytes and self._in_body:
                said = f"more than {settings.max_header_bytes} bytes around the body: sizes of chunks, trailers"
                self._refuse(TooLarge(said, status=431, code="headers_too_large"))
            elif self._timer is None and self._answering is None and not self.transport.is_closing():
                self._wait_for_more()  # the end of a body that was not wanted, or empty lines between requests

        def _feed(self, data: bytes) -> None:
            """To the parser, which calls the methods below."""
            self._unset_keepalive_if_required()
            left = memoryview(data)
            try:
                while left:
                    try:
                        self.parser.feed_data(left)
                        return
                    except httptools.HttpParserUpgrade as offer:
                        left = left[offer.args[0] :]
                        self._feed_again()
            except httptools.HttpParserError:
                if self._head_bytes > settings.max_header_bytes:
                    self._large_head()
                else:
                    self.send_400_response("Invalid HTTP request received.")

        def _feed_again(self) -> None:
            """The head at which the parser stopped, without what made it stop."""
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError("this is no proxy")
            lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn makes it
            self.parser.feed_data(b"\r\n".join([method + b" " + self.url + b" HTTP/" + version, *lines, b"", b""]))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_headers = True
            self._begun = True
            self._head_bytes = 0
            self._arm(settings.header_timeout_s, self._slow_headers)

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._head_bytes += len(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_headers:
                self._head_bytes += len(name) + len(value) + 4
                super().on_header(name, value)
            # else a trailer: to keep it would let a client add to what has been checked, and without end

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            if self._head_bytes > settings.max_header_bytes:
                raise httptools.HttpParserError("the head is too large")  # ends the parser, and is told in `_feed`
            self._in_headers = False
            self._header_bytes = self._frame_bytes = 0
            self._disarm()
            super().on_headers_complete()
            self._in_body = True
            if 0 < len(self.pipeline) <= PIPELINED:
                self.flow.resume_reading()  # else nobody sees the client leave

        def on_body(self, body: bytes) -> None:
            self._frame_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            if self.parser.should_upgrade():
                return
            self._in_body = False
            super().on_message_complete()
            if self.cycle.response_complete:
                self._disarm()

        def send_400_response(self, msg: str) -> None:
            self._refuse(Invalid(msg, code="invalid_http"))

        def _large_head(self) -> None:
            said = f"request line and headers exceed {settings.max_header_bytes} bytes"
            self._refuse(TooLarge(said, status=431, code="headers_too_large"))

        def _slow_headers(self) -> None:
            if self._in_headers:
                self._refuse(Slow(f"the headers did not arrive within {settings.header_timeout_s:g} s"))
            else:
                self.transport.abort()  # connected and never spoke

        # ---- out

        @property
        def _answering(self) -> RequestResponseCycle | None:
            running = self._running
            return None if running is None or running.response_complete else running

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            self._running = cycle
            if cycle.scope["http_version"] != "1.1":
                cycle.keep_alive = False
                app = partial(until_close, app, cycle)
            super()._start_asgi_task(cycle, app)

        def on_response_complete(self) -> None:
            done = self._running
            super().on_response_complete()
            if self.transport.is_closing():
                self._watch_unsent()
            elif self._refusal is not None and self._answering is None:
                self._refuse(self._refusal)
            elif done is self.cycle and done is not None and done.more_body:
                self._unset_keepalive_if_required()
                self._arm(LINGER_S, self.transport.abort)

        def _refuse(self, error: ApiError) -> None:
            """Say what is wrong with what the client sends, and close."""
            if self.transport.is_closing():
                return
            running = self._answering
            if running is not None and not (running is self.cycle and running.more_body):
                self._refusal = self._refusal or error  # it is a later request that is wrong
                return
            if (running is None and not self._in_body) or (running is not None and not running.response_started):
                body = error.body()
                head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            log.info("refused", client=self.client, status=error.status, code=error.code, why=error.message)
            self.transport.close()
            self._watch_unsent()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_unsent()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._taken()
            if self.transport.is_closing():
                self._watch_unsent()

        def timeout_keep_alive_handler(self) -> None:
            if self.flow.write_paused:
                self._wait_for_more()  # it still takes its answer
                return
            super().timeout_keep_alive_handler()
            self._watch_unsent()

        def _watch_unsent(self) -> None:
            """While writing is paused or the connection closes nothing is added: bytes that do not get fewer are bytes
            that the client does not take. Closing alone would wait for it, holding them, for ever.
            """
            self._taken()
            self._unsent = self.transport.get_write_buffer_size()
            if self._unsent:
                self._stuck = self.loop.call_later(settings.write_timeout_s, self._look_unsent)

        def _look_unsent(self) -> None:
            if self.transport.get_write_buffer_size() < self._unsent:
                self._watch_unsent()
                return
            seconds = settings.write_timeout_s
            log.warning("client takes nothing, cut off", client=self.client, unsent=self._unsent, seconds=seconds)
            self.transport.abort()

        def _taken(self) -> None:
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None

        # ---- timers

        def _wait_for_more(self) -> None:
            """For a next request, or the client's end."""
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def _arm(self, seconds: float, then: Callable[[], None]) -> None:
            self._disarm()
            self._timer = self.loop.call_later(seconds, then)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol


async def until_close(app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any) -> None:
    """The app, with an answer of unknown length neither in chunks nor measured: the connection's end is its end."""

    async def unmeasured(message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, UNKNOWN
        elif cycle.expected_content_length > UNKNOWN // 2 and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, unmeasured)


class Server(uvicorn.Server):
    """Signals are the process's, not uvicorn's, which would raise them again after its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot bind {host}:{port}: {error.strerror}") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def make(app: Any, settings: Settings) -> Server:
    """The server for an app; run it with `serve(sockets=[bind(...)])`."""
    config = uvicorn.Config(
        app,
        http=protocol(settings),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=2,  # the gateway has drained before
    )
    return Server(config)


def said(port: int, pid: int) -> bytes:
    """Content of `gateway.json`."""
    return msgspec.json.encode({"port": port, "pid": pid})
