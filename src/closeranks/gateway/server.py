"""uvicorn with what a public port needs besides: time and size limits on headers, and an end that is bounded."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from closeranks.gateway.errors import Invalid, Slow, TooLarge
from closeranks.gateway.settings import Settings

LINGER_S = 3.0
"""How long a request that has been answered may go on sending its body."""


def protocol(settings: Settings) -> type[HttpToolsProtocol]:
    """The connection class for these limits."""

    class Protocol(HttpToolsProtocol):
        """Armed with a timer while headers are incomplete, and while an answered request still sends its body."""

        _timer: asyncio.TimerHandle | None = None
        _in_headers = False
        _header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm(settings.header_timeout_s, self._slow_headers)

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            begun = self._in_headers
            super().data_received(data)
            if self._in_headers:
                self._header_bytes = self._header_bytes + len(data) if begun else len(data)
                if self._header_bytes > settings.max_header_bytes:
                    said = f"request line and headers exceed {settings.max_header_bytes} bytes"
                    self._refuse(TooLarge(said, status=431, code="headers_too_large"))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["state"]["transport"] = self.transport  # to cut off a client that takes nothing
            self._in_headers = True
            self._arm(settings.header_timeout_s, self._slow_headers)

        def on_headers_complete(self) -> None:
            self._in_headers = False
            self._header_bytes = 0
            self._disarm()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            if self.cycle.response_complete:
                self._disarm()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.more_body and not self.transport.is_closing():
                self._unset_keepalive_if_required()
                self._arm(LINGER_S, self.transport.abort)

        def send_400_response(self, msg: str) -> None:
            self._refuse(Invalid(msg, code="invalid_http"))

        def _slow_headers(self) -> None:
            if self._in_headers:
                self._refuse(Slow(f"the headers did not arrive within {settings.header_timeout_s:g} s"))
            else:
                self.transport.abort()  # connected and never spoke

        def _refuse(self, error: Any) -> None:
            if self.transport.is_closing():
                return
            body = error.body()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()

        def _arm(self, seconds: float, then: Callable[[], None]) -> None:
            self._disarm()
            self._timer = self.loop.call_later(seconds, then)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol


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
