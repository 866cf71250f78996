"""The transport: one aiohttp server before one upstream. What is watched goes through `StreamWatch` or `watch_body`.

Everything else is handed through: path and query as they were written, headers in order and spelling (less those of
the hop itself), status and reason, bodies in the pieces in which they come, compressed or not. Reading the upstream
stops while the client does not read (aiohttp pauses the socket at twice `READ_BUFFER`), so a slow client costs a
bounded amount of memory; a client that goes away ends the upstream request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import aiohttp
import structlog
from aiohttp import hdrs, web
from multidict import CIMultiDict
from prometheus_client import generate_latest
from yarl import URL

from closeranks.codec import Decoder
from closeranks.gateway.guard.asked import Asked, Unreadable, decompress, read_request
from closeranks.gateway.guard.body import watch_body
from closeranks.gateway.guard.chunk import dump
from closeranks.gateway.guard.counters import Counters
from closeranks.gateway.guard.settings import SAMPLES_PATH, Settings
from closeranks.gateway.guard.watch import StreamWatch

READ_BUFFER = 1 << 14
HEADER_LIMIT = 1 << 16

# Headers of one hop (RFC 9110, 7.6.1); Content-Length and Transfer-Encoding are set anew by aiohttp.
_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)

log = structlog.get_logger("closeranks.guard")

MakeDecoder = Callable[[Asked, bool], Decoder]


class UpstreamFailed(Exception):
    """The upstream could not be reached or broke off. `kind` is a metric label."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind

    def body(self) -> bytes:
        """The error as an OpenAI error object."""
        return dump({"error": {"message": str(self), "type": self.kind, "param": None, "code": self.kind}})


class NoPath(ValueError):
    """A request for something that is no path of the upstream (`CONNECT host`, `OPTIONS *`)."""


class Guard:
    """Holds the upstream session. `handle` is the handler for `aiohttp.web.Server`."""

    def __init__(self, settings: Settings, make_decoder: MakeDecoder, counters: Counters | None = None) -> None:
        self.settings = settings
        self.counters = counters or Counters()
        self._make_decoder = make_decoder
        self._registry = self.counters.registry()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Guard":
        self._session = aiohttp.ClientSession(
            # An upstream closes idle connections after a time of its own (uvicorn: 5 s); stay well below.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self.settings.connect_timeout, sock_read=self.settings.read_timeout
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BUFFER,
            max_line_size=HEADER_LIMIT,
            max_field_size=HEADER_LIMIT,
            skip_auto_headers=[hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE],
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of a client."""
        path = request.path
        if request.method == "GET" and path == self.settings.metrics_path:
            return web.Response(
                body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"}
            )
        if request.method == "GET" and path == SAMPLES_PATH:
            return web.json_response({"schema": "closeranks.guard-samples/1", "samples": list(self.counters.samples)})
        if hdrs.UPGRADE in request.headers and "upgrade" in request.headers.get(hdrs.CONNECTION, "").lower():
            return web.json_response({"error": {"message": "guard does not pass protocol upgrades on"}}, status=501)
        watched = request.method == "POST" and path.endswith("/chat/completions")
        try:
            if watched:
                response = await self._chat(request)
            else:
                response = await self._exchange(request, _body_of(request), None)
        except UpstreamFailed as error:
            self.counters.upstream_errors[error.kind] += 1
            log.warning("upstream failed", kind=error.kind, error=str(error), path=path)
            status = 504 if error.kind == "upstream_timeout" else 502
            response = web.Response(body=error.body(), status=status, content_type="application/json")
        except NoPath as error:
            said = {"error": {"message": f"guard passes on requests for a path, not for {str(error)[:80]!r}"}}
            response = web.json_response(said, status=501)
        self.counters.requests["yes" if watched else "no", str(response.status)] += 1
        return response

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = bytearray()
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > self.settings.max_request:
                self.counters.unwatched["request_too_large"] += 1
                return await self._exchange(request, _rest(bytes(body), request), None)
        try:
            asked = read_request(bytes(body), request.headers.get(hdrs.CONTENT_ENCODING, ""))
        except Unreadable:
            # The upstream will refuse it in its own words. Should it answer all the same, no tool was offered.
            self.counters.unwatched["request_not_json"] += 1
            asked = Asked()
        self.counters.open_streams += 1
        try:
            return await self._exchange(request, bytes(body), asked)
        finally:
            self.counters.open_streams -= 1

    async def _exchange(self, request: web.BaseRequest, body: object, asked: Asked | None) -> web.StreamResponse:
        """Send the request on and relay the answer; watched if `asked` is given."""
        assert self._session is not None, "use `async with Guard(...)`"
        headers = _forwarded(request.raw_headers, request.headers.get(hdrs.CONNECTION, ""))
        headers.popall(hdrs.HOST, None)
        headers.popall(hdrs.EXPECT, None)  # answered here
        if asked is not None and hdrs.ACCEPT_ENCODING in headers:
            headers[hdrs.ACCEPT_ENCODING] = "identity"  # what is compressed cannot be watched
        url = URL(self.settings.upstream + _target(request), encoded=True)
        try:
            upstream = await self._session.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(error, "reached") from error
        try:
            with _ends_with_connection(upstream):
                return await self._relay(request, upstream, asked)
        finally:
            # Ends the exchange at the upstream too if it is not over (a client that left, an error).
            upstream.close() if not upstream.content.at_eof() else upstream.release()

    async def _relay(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, asked: Asked | None
    ) -> web.StreamResponse:
        kind = upstream.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
        if asked is not None and upstream.status == 200:
            if kind == "text/event-stream":
                return await self._relay_stream(request, upstream, asked)
            if kind == "application/json" or kind.endswith("+json"):
                return await self._relay_json(request, upstream, asked)
            self.counters.unwatched["content_type"] += 1
        return await self._relay_plain(request, upstream)

    async def _relay_plain(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, first: bytes = b""
    ) -> web.StreamResponse:
        response = _response(upstream)
        if hdrs.CONTENT_LENGTH in upstream.headers:
            response.headers[hdrs.CONTENT_LENGTH] = upstream.headers[hdrs.CONTENT_LENGTH]
        await response.prepare(request)
        if first:
            await response.write(first)
        try:
            async for piece in upstream.content.iter_any():
                await response.write(piece)
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, TimeoutError) as error:
            failure = _failure(error, "read")
            self.counters.upstream_errors[failure.kind] += 1
            log.warning("upstream failed", kind=failure.kind, error=str(failure), path=request.path)
            # Not a clean end: the client must see that bytes are missing, so its connection breaks as well.
            if request.transport is not None:
                request.transport.close()
        return response

    async def _relay_json(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, asked: Asked
    ) -> web.StreamResponse:
        body = bytearray()
        try:
            async for piece in upstream.content.iter_any():
                body += piece
                if len(body) > self.settings.max_body:
                    self.counters.unwatched["body_too_large"] += 1
                    return await self._relay_plain(request, upstream, bytes(body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failure(error, "read") from error
        response = _response(upstream)
        coding = upstream.headers.get(hdrs.CONTENT_ENCODING, "")
        sent = bytes(body)
        try:
            plain = decompress(sent, coding, self.settings.max_body)
        except ValueError:
            self.counters.unwatched["content_encoding"] += 1
        else:
            watched = watch_body(
                plain,
                lambda thinking: self._make_decoder(asked, thinking),
                self.counters,
                model=asked.model,
                report_only=self.settings.report_only,
            )
            if watched is not plain:
                sent = watched
                response.headers.popall(hdrs.CONTENT_ENCODING, None)
        response.headers[hdrs.CONTENT_LENGTH] = str(len(sent))
        await response.prepare(request)
        await response.write(sent)
        return response

    async def _relay_stream(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, asked: Asked
    ) -> web.StreamResponse:
        if upstream.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() not in ("", "identity"):
            self.counters.unwatched["content_encoding"] += 1
            return await self._relay_plain(request, upstream)
        watch = StreamWatch(
            lambda thinking: self._make_decoder(asked, thinking),
            self.counters,
            model=asked.model,
            report_only=self.settings.report_only,
            max_event=self.settings.max_event,
        )
        response = _response(upstream)
        await response.prepare(request)
        content = upstream.content
        failure: UpstreamFailed | None = None
        try:
            while piece := await content.readany():
                if out := watch.feed(piece):
                    await response.write(out)
        except (
            aiohttp.ClientPayloadError,
            aiohttp.ServerDisconnectedError,
            TimeoutError,
            aiohttp.ClientOSError,
        ) as error:
            failure = _failure(error, "read")
        else:
            # A body that ends with its connection cannot tell its end from a broken one. The answer itself can; one
            # that ends within an event was cut, whatever its framing says.
            framed = hdrs.CONTENT_LENGTH in upstream.headers or "chunked" in upstream.headers.get(
                hdrs.TRANSFER_ENCODING, ""
            )
            if not watch.complete and (not framed or watch.cut):
                failure = UpstreamFailed(
                    "upstream_disconnected", "The upstream ended the answer before it was complete."
                )
        if failure is not None:
            self.counters.upstream_errors[failure.kind] += 1
            log.warning("upstream failed in mid-stream", kind=failure.kind, error=str(failure), model=asked.model)
        # After [DONE] the client has all; an error event would only spoil it.
        if out := watch.close(failure.body() if failure is not None and not watch.ended else None):
            await response.write(out)
        return response


@contextmanager
def _ends_with_connection(upstream: aiohttp.ClientResponse) -> Iterator[None]:
    """Sees to it that a read of the body ends when the connection does.

    aiohttp (3.14) closes a connection whose chunks turn into nonsense and ends its read timeout too, but leaves whoever
    reads the body waiting for ever.
    """
    body = upstream.content
    protocol = upstream.connection.protocol if upstream.connection is not None else None
    closed = protocol.closed if protocol is not None else None
    if closed is None:
        yield  # the answer is here as a whole, or its end
        return

    def ended(closed: "asyncio.Future[None]") -> None:
        if not closed.cancelled():
            closed.exception()  # taken note of: the body's own error says the same
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("the connection ended before the answer"))

    closed.add_done_callback(ended)
    try:
        yield
    finally:
        closed.remove_done_callback(ended)


def _target(request: web.BaseRequest) -> str:
    """The path and query to ask the upstream for. Of a request for an absolute URL, that of the URL.

    Raises `NoPath`.
    """
    target = request.raw_path
    if not target.startswith("/"):
        scheme, _, rest = target.partition("://")
        if scheme.lower() not in ("http", "https"):
            raise NoPath(target)
        target = "/" + rest.partition("/")[2]
    return target


def _failure(error: BaseException, doing: str) -> UpstreamFailed:
    if isinstance(error, TimeoutError):
        return UpstreamFailed("upstream_timeout", f"The upstream could not be {doing} in time.")
    if isinstance(error, aiohttp.ClientConnectorError):
        return UpstreamFailed(
            "upstream_unreachable", f"The upstream could not be reached: {error.os_error.strerror or 'no connection'}."
        )
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionError):
        return UpstreamFailed("upstream_disconnected", "The upstream broke off in the middle of its answer.")
    return UpstreamFailed("upstream_broken", f"The upstream's answer is no HTTP: {type(error).__name__}.")


def _forwarded(raw: tuple[tuple[bytes, bytes], ...], connection: str) -> CIMultiDict[str]:
    """Headers to hand on: all but those of the hop and those that `Connection` names.

    A name that comes twice keeps the spelling of its first time: aiohttp's client would drop one that differs.
    """
    named = {name.strip().lower() for name in connection.split(",")}
    headers: CIMultiDict[str] = CIMultiDict()
    spelling: dict[str, str] = {}
    for key, value in raw:
        name = key.decode("ascii", "surrogateescape")
        lower = name.lower()
        if lower not in _HOP and lower not in named:
            headers.add(spelling.setdefault(lower, name), value.decode("utf-8", "surrogateescape"))
    return headers


def _response(upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = _forwarded(upstream.raw_headers, upstream.headers.get(hdrs.CONNECTION, ""))
    headers.popall(hdrs.CONTENT_LENGTH, None)
    return web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=headers)


def _body_of(request: web.BaseRequest) -> object:
    return request.content if request.body_exists else None


async def _rest(first: bytes, request: web.BaseRequest) -> AsyncIterator[bytes]:
    yield first
    async for piece in request.content.iter_any():
        yield piece
