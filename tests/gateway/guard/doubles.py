"""Doubles for the guard's tests: an upstream that writes exactly the bytes that a test gives it, and a raw client."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from closeranks.gateway.guard import Guard, GuardServer, Settings, decoders


@dataclass
class Request:
    """A request as it came over the wire."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Answer:
    """An answer as it came over the wire. `complete`: it was ended as its framing says."""

    status: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    complete: bool

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


Write = Callable[[bytes], Awaitable[None]]
Script = Callable[[Request, Write], Awaitable[None]]


@dataclass
class Upstream:
    """Runs `script` for each request; when it returns, the connection is closed."""

    script: Script
    seen: list[Request] = field(default_factory=list)
    gone: int = 0  # how often the other side left before the script was through
    url: str = ""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        tasks: list[asyncio.Future[Any]] = []
        try:
            request = await read_request(reader)
            self.seen.append(request)
            self.asked.set()
            work = asyncio.ensure_future(self.script(request, write))
            tasks = [work, asyncio.ensure_future(reader.read(1))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.exception() is not None:
                self._leaves()
        except (ConnectionError, asyncio.IncompleteReadError):
            self._leaves()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()

    def _leaves(self) -> None:
        self.gone += 1
        self.left.set()


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    headers = [(k, v.strip()) for k, v in (line.split(b":", 1) for line in head[1:])]
    request = Request(head[0], headers, b"")
    if (length := request.header(b"content-length")) is not None:
        request.body = await reader.readexactly(int(length))
    elif request.header(b"transfer-encoding"):
        while size := int((await reader.readline()).strip(), 16):
            request.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return request


@asynccontextmanager
async def guarded(script: Script, **settings: Any) -> AsyncIterator[tuple[Upstream, GuardServer]]:
    """An upstream and a guard before it, both on free ports."""
    upstream = Upstream(script)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, backlog=2048)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    guard = Guard(Settings(upstream=upstream.url, **settings), decoders())
    async with GuardServer(guard, "127.0.0.1", 0) as guard_server:
        yield upstream, guard_server
    server.close()


async def send(port: int, request: bytes) -> Answer:
    """Send raw bytes, read one answer. Chunked bodies are joined."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        answer = Answer(head[0], [tuple(line.split(b": ", 1)) for line in head[1:]], b"", True)  # type: ignore[misc]
        try:
            if request.startswith(b"HEAD") or head[0].split()[1] in (b"204", b"304"):
                return answer
            if (length := answer.header(b"content-length")) is not None:
                answer.body = await reader.readexactly(int(length))
            elif answer.header(b"transfer-encoding") == b"chunked":
                while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                    answer.body += (await reader.readexactly(size + 2))[:-2]
                await reader.readexactly(2)
            else:
                answer.body = await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            answer.body += getattr(error, "partial", b"")
            answer.complete = False
        return answer
    finally:
        writer.close()


def post(body: Any, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


def chunked(*pieces: bytes, head: str = "Content-Type: text/event-stream\r\n", end: bool = True) -> list[bytes]:
    """An HTTP answer with each piece as one chunk."""
    out = [f"HTTP/1.1 200 OK\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode()]
    out += [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece]
    return [*out, b"0\r\n\r\n"] if end else out


def writes(pieces: Sequence[bytes]) -> Script:
    """A script that writes these pieces, one write each."""

    async def script(request: Request, write: Write) -> None:
        for piece in pieces:
            await write(piece)

    return script


def event(index: int = 0, finish: str | None = None, **delta: Any) -> bytes:
    """A chunk of a stream, as vLLM and SGLang write it."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    top = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(top, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


@dataclass
class Seen:
    """What an OpenAI client makes of a stream, for one choice."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish: str | None = None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return [{"name": c["name"], "arguments": json.loads(c["arguments"])} for _, c in sorted(self.calls.items())]


def client(stream: bytes) -> dict[int, Seen]:
    """Reads a stream the way the OpenAI client does; asserts the rules that clients rely on."""
    choices: dict[int, Seen] = {}
    for block in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(line[6:] for line in block.split(b"\n") if line.startswith(b"data: "))
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        for choice in chunk.get("choices", ()):
            seen = choices.setdefault(choice["index"], Seen())
            assert seen.finish is None, "text after the finish reason"
            delta = choice["delta"]
            seen.content += delta.get("content") or ""
            seen.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                assert isinstance(call["index"], int)
                if call["index"] not in seen.calls:
                    assert call["id"], "the first delta of a call has its id and name"
                    assert call["function"]["name"]
                    seen.calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                seen.calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
            seen.finish = choice.get("finish_reason")
    return choices
