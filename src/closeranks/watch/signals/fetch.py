"""One HTTP client for all signals: short deadlines, and a clear word for each way in which an answer fails to come.

Polls keep a connection to each server, since half of what a watch costs would be connections. A kept one tells nothing
of the way to it: whether the port still accepts, whether the queue before `accept` is full, whether the address still
leads to that process. So every few polls go over a new connection, the next one after a failure does, and so does all
that decides something (probes, `/health`). A kept connection that turns out to be closed is no answer either: the
request goes out once more, over a new one, within the same time limit. One that nothing comes back on is an answer that
failed to come: a server that stands is seen as soon as over a new one.
"""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

BODY_BYTES = 8 << 20
PLAIN = {"Accept-Encoding": "identity"}
"""Nothing is unpacked: a few kilobytes of a compressed answer can be gigabytes."""
REDIRECTS = 3
FRESH_EVERY = 4
"""So many polls of an address, the first among them, bring one over a new connection."""
KEPT_S = 15.0
"""A connection that is not used for so long is closed."""


class Answer(msgspec.Struct, frozen=True):
    """What came of one request. `status` 0: nothing did, and `error` says why."""

    status: int
    body: bytes
    seconds: float
    error: str = ""
    accepted: bool = False
    """The port took the connection, whatever came of it."""
    cut: bool = False
    """There was more than `BODY_BYTES`: what is here tells nothing."""
    dropped: bool = False
    """The connection ended before the answer did."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.cut

    @property
    def said(self) -> str:
        """In words, without the body."""
        if self.cut:
            return f"HTTP {self.status} with more than {BODY_BYTES >> 20} MiB"
        return f"HTTP {self.status}" if self.status else self.error

    def json(self) -> Any:
        """The body decoded; None if it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):  # of ten thousand brackets, too
            return None


class Client:
    """`get` and `post` never raise for what a server does. `key` is sent as a bearer token."""

    def __init__(self, limit_s: float = 3.0, key: str = "") -> None:
        self.limit_s = limit_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._fresh: aiohttp.ClientSession | None = None
        self._kept: aiohttp.ClientSession | None = None
        self._polls: dict[str, int] = {}

    async def get(self, url: str, limit_s: float = 0.0) -> Answer:
        """Fetch over a new connection; at most `limit_s` seconds (default: the client's)."""
        return await self._ask("GET", url, None, limit_s)

    async def poll(self, url: str) -> Answer:
        """Fetch what is fetched again and again, mostly over a connection that is kept. Must do nothing at the server
        that it may not do twice."""
        began, number = time.monotonic(), self._polls.get(url, 0)
        self._polls[url] = (number + 1) % FRESH_EVERY
        if number == 0:
            answer = await self._ask("GET", url, None, 0.0)
        else:
            answer = await self._ask("GET", url, None, 0.0, kept=True)
            left = self.limit_s - (time.monotonic() - began)
            if answer.dropped and left > 0:
                again = await self._ask("GET", url, None, left)
                answer = msgspec.structs.replace(again, seconds=time.monotonic() - began)
        if not answer.status:
            self._polls[url] = 0
        return answer

    async def post(self, url: str, body: object, limit_s: float = 0.0) -> Answer:
        """Post `body` as JSON; reads the whole answer."""
        return await self._ask("POST", url, msgspec.json.encode(body), limit_s)

    def _session(self, kept: bool) -> aiohttp.ClientSession:
        session = self._kept if kept else self._fresh
        if session is None:
            how: dict[str, Any] = {"keepalive_timeout": KEPT_S} if kept else {"force_close": True}
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=64, **how),
                headers=self._headers | PLAIN,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                auto_decompress=False,
            )
            if kept:
                self._kept = session
            else:
                self._fresh = session
        return session

    async def _ask(self, method: str, url: str, body: bytes | None, limit_s: float, kept: bool = False) -> Answer:
        began, limit = time.monotonic(), limit_s or self.limit_s
        timeout = aiohttp.ClientTimeout(total=limit, connect=min(2.0, limit))
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session(kept).request(
                method, url, data=body, headers=headers, timeout=timeout, max_redirects=REDIRECTS
            ) as answer:
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    if len(content) > BODY_BYTES:
                        return Answer(answer.status, b"", time.monotonic() - began, accepted=True, cut=True)
                return Answer(answer.status, bytes(content), time.monotonic() - began, accepted=True)
        except aiohttp.TooManyRedirects as error:  # an answer, though none that leads anywhere
            return Answer(error.history[-1].status, b"", time.monotonic() - began, accepted=True)
        except aiohttp.ClientConnectorError as error:
            return Answer(0, b"", time.monotonic() - began, f"cannot connect: {error.os_error.strerror or error}")
        except aiohttp.ConnectionTimeoutError:
            return Answer(0, b"", time.monotonic() - began, "cannot connect in time")
        except TimeoutError:
            return Answer(0, b"", time.monotonic() - began, f"no answer in {limit:.0f} s", accepted=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            said, dropped = f"{type(error).__name__}: {error}"[:160], isinstance(error, aiohttp.ClientError | OSError)
            return Answer(0, b"", time.monotonic() - began, said, accepted=True, dropped=dropped)

    async def close(self) -> None:
        """Close what is open."""
        open_ones = [session for session in (self._fresh, self._kept) if session is not None]
        self._fresh = self._kept = None
        for session in open_ones:
            await session.close()
        await asyncio.sleep(0)  # lets the transports see their end
