"""One HTTP client for all signals: short deadlines, and a clear word for each way in which an answer fails to come."""

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

BODY_BYTES = 8 << 20
PLAIN = {"Accept-Encoding": "identity"}
"""Nothing is unpacked: a few kilobytes of a compressed answer can be gigabytes."""
REDIRECTS = 3


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
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, limit_s: float = 0.0) -> Answer:
        """Fetch; at most `limit_s` seconds (default: the client's)."""
        return await self._ask("GET", url, None, limit_s)

    async def post(self, url: str, body: object, limit_s: float = 0.0) -> Answer:
        """Post `body` as JSON; reads the whole answer."""
        return await self._ask("POST", url, msgspec.json.encode(body), limit_s)

    async def _ask(self, method: str, url: str, body: bytes | None, limit_s: float) -> Answer:
        if self._session is None:
            # A connection of its own per request: one kept alive tells nothing about a port that stopped accepting.
            connector = aiohttp.TCPConnector(force_close=True, limit=64)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers | PLAIN, trust_env=False, auto_decompress=False
            )
        began, limit = time.monotonic(), limit_s or self.limit_s
        timeout = aiohttp.ClientTimeout(total=limit, connect=min(2.0, limit))
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(
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
            return Answer(0, b"", time.monotonic() - began, f"{type(error).__name__}: {error}"[:160], accepted=True)

    async def close(self) -> None:
        """Close what is open."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # lets the transports see their end
            self._session = None
