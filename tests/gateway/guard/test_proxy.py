"""The guard over real sockets: what is not watched passes byte for byte, and no upstream can break it."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.gateway.guard.doubles import (
    DONE,
    Request,
    Script,
    Upstream,
    Write,
    chunked,
    client,
    event,
    guarded,
    post,
    send,
    tools,
    writes,
)

BLOCK = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
ASK = {"model": "m", "messages": [], "stream": True, "tools": tools("get_weather")}
JSON = "Content-Type: application/json\r\n"


def go(script: Script, talk: Callable[[int, Upstream], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with guarded(script, **settings) as (upstream, server):
            return await asyncio.wait_for(talk(server.port, upstream), 30)

    return asyncio.run(main())


def one(pieces: list[bytes], request: bytes | None = None, **settings: Any) -> Any:
    """The answer that a client gets for one request when the upstream writes `pieces`."""

    async def talk(port: int, upstream: Upstream) -> Any:
        return await send(port, post(ASK) if request is None else request)

    return go(writes(pieces), talk, **settings)


def answer(body: bytes, head: str = "", status: str = "200 OK") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body]


# What is not watched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH", "POST"])
def test_requests_pass_as_they_were_sent(method: str) -> None:
    body = b"\x00\xff<tool>" if method in ("PUT", "PATCH", "POST") else b""
    path = "/v1/some%2Fthing;p=1?q=a%20b&q=%E2%82%AC+&empty="
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-CuStOm: A, b\r\nX-Custom: c\r\nAuthorization: Bearer k\r\n"
    head += f"Cookie: a=b\r\nAccept-Encoding: br, gzip\r\nContent-Length: {len(body)}\r\n\r\n"

    async def talk(port: int, upstream: Upstream) -> Request:
        await send(port, head.encode() + body)
        return upstream.seen[0]

    request = go(writes(answer(b"ok")), talk)
    assert request.line == f"{method} {path} HTTP/1.1".encode()
    assert request.body == body
    for pair in [(b"X-CuStOm", b"A, b"), (b"X-CuStOm", b"c"), (b"Authorization", b"Bearer k"), (b"Cookie", b"a=b")]:
        assert pair in request.headers
    assert request.header(b"accept-encoding") == b"br, gzip"
    assert request.header(b"user-agent") is None, "nothing is added"


@pytest.mark.parametrize(
    "status",
    ["200 OK", "201 Created", "302 Found", "400 Bad Request", "404 Nope", "418 I'm a teapot", "500 Oh", "599 X"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_answers_pass_as_they_were_sent(status: str, path: str) -> None:
    body = json.dumps({"error": "<｜DSML｜tool_calls>"}).encode() if status[0] != "2" else b"\x1f\x00 </think> \xff"
    head = (
        "Server: up/1\r\nDate: today\r\nX-A: 1\r\nX-A: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nLocation: /there\r\n"
    )
    got = one(answer(body, head + "Content-Type: x/y\r\n", status), post(b"{}", path))
    assert got.status == b"HTTP/1.1 " + status.encode()
    assert got.body == body
    sent = [tuple(line.encode().split(b": ")) for line in head.splitlines()]
    assert [pair for pair in got.headers if pair in sent] == sent


def test_a_compressed_answer_stays_compressed() -> None:
    body = gzip.compress(b"hello")
    got = one(answer(body, "Content-Encoding: gzip\r\nContent-Type: a/b\r\n"), b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (got.body, got.header(b"content-encoding")) == (body, b"gzip")


def test_head_and_empty_answers() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"
    got = one([head], b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (got.header(b"content-length"), got.body) == (b"77", b"")
    got = one([b"HTTP/1.1 204 No Content\r\n\r\n"], b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (got.status, got.body) == (b"HTTP/1.1 204 No Content", b"")


def test_a_chat_request_reaches_the_upstream_byte_for_byte() -> None:
    body = b'{ "tools" : [] ,\n "x": 1.50, "messages":[{"content":"\\u003c\xe2\x82\xac"}]}'

    async def talk(port: int, upstream: Upstream) -> Request:
        await send(port, post(body, headers="Accept-Encoding: gzip\r\n"))
        return upstream.seen[0]

    request = go(writes(answer(b"{}", JSON)), talk)
    assert request.body == body
    assert request.header(b"accept-encoding") == b"identity", "what is compressed cannot be watched"


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b'{"tools": 7}', b'{"tools": [1, {"function": {}}]}', b"\xff"]
)
def test_requests_that_make_no_sense_are_the_upstreams_to_refuse(body: bytes) -> None:
    got = one(answer(b'{"error":1}', JSON, "400 Bad Request"), post(body))
    assert (got.status, got.body) == (b"HTTP/1.1 400 Bad Request", b'{"error":1}')


def test_an_answer_of_another_kind_passes() -> None:
    for kind in ("text/html", "application/octet-stream", "application/x-ndjson"):
        got = one(answer(b"data: {broken </think>", f"Content-Type: {kind}\r\n"))
        assert got.body == b"data: {broken </think>"
    got = one(answer(b'{"choices": [{"message": {"content": "</think>"', JSON))
    assert got.body == b'{"choices": [{"message": {"content": "</think>"'


# Chat ---------------------------------------------------------------------------------------------------------------


def test_a_clean_answer_passes_byte_for_byte() -> None:
    body = b'{ "choices": [ {"message": {"content": "2 < 3", "x": 1.10}, "finish_reason":"stop"} ] }\n'
    assert one(answer(body, JSON)).body == body
    stream = event(content="a") + b": ping\r\n\r\n" + event(content=" <b") + event(finish="stop") + DONE
    assert one(chunked(*[stream[n : n + 11] for n in range(0, len(stream), 11)])).body == stream


@pytest.mark.parametrize("size", [1, 7, 64, 100000])
def test_a_leak_in_a_stream_is_repaired(size: int) -> None:
    stream = (
        event(role="assistant") + b"".join(event(content=c) for c in "Hi.\n\n" + BLOCK) + event(finish="stop") + DONE
    )
    got = one(chunked(*[stream[n : n + size] for n in range(0, len(stream), size)]))
    seen = client(got.body)[0]
    assert seen.tool_calls == [{"name": "get_weather", "arguments": {"city": "Oslo"}}]
    assert (seen.content.strip(), seen.finish, got.complete) == ("Hi.", "tool_calls", True)
    assert got.body.endswith(DONE)


@pytest.mark.parametrize("coding", ["identity", "gzip", "deflate"])
def test_a_leak_in_one_piece_is_repaired_compressed_or_not(coding: str) -> None:
    import zlib

    message = {"role": "assistant", "content": "Hi.\n\n" + BLOCK, "tool_calls": None}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    packed = {"identity": body, "gzip": gzip.compress(body), "deflate": zlib.compress(body)}[coding]
    got = one(answer(packed, f"{JSON}Content-Encoding: {coding}\r\n"), post({**ASK, "stream": False}))
    choice = json.loads(got.body)["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert (choice["finish_reason"], choice["message"]["content"].strip()) == ("tool_calls", "Hi.")


def test_an_upstream_killed_in_mid_stream_ends_the_stream_with_an_error_event() -> None:
    async def script(request: Request, write: Write) -> None:
        for piece in chunked(event(content="a"), event(content="b <｜DS"), end=False):
            await write(piece)

    async def talk(port: int, upstream: Upstream) -> Any:
        return await send(port, post(ASK))

    got = go(script, talk)
    assert got.complete, "the client's own connection is in order"
    assert b"DS" not in got.body
    last = json.loads(got.body.rstrip().rsplit(b"data: ", 1)[1])
    assert last["error"]["type"] == "upstream_disconnected"


NONSENSE = {
    "no size": b"zz\r\nabc",
    "a negative size": b"-5\r\nabc",
    "a size beyond all bounds": b"f" * 40 + b"\r\nabc",
    "no end of a chunk": b"5\r\nhelloXXXX",
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json", "a/b"])
def test_chunks_that_turn_into_nonsense_end_the_answer(kind: str, nonsense: bytes) -> None:
    """No client waits for an upstream whose connection is over, whatever was on it last."""
    begun = asyncio.Event()

    async def script(request: Request, write: Write) -> None:
        for piece in chunked(event(content="a"), head=f"Content-Type: {kind}\r\n", end=False):
            await write(piece)
        await begun.wait()
        await write(nonsense)
        await asyncio.Event().wait()

    async def talk(port: int, upstream: Upstream) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(ASK, headers="Connection: close\r\n"))
        first = b""
        if kind == "application/json":  # read as a whole before anything is answered
            await upstream.asked.wait()
        else:
            first = await reader.readuntil(event(content="a"))
        begun.set()
        rest = await reader.read()
        writer.close()
        return first + rest

    got = go(script, talk)
    if kind == "text/event-stream":
        assert b'"type":"upstream_disconnected"' in got
        assert got.endswith(b"0\r\n\r\n"), "the client's own connection is in order"
    elif kind == "a/b":
        assert not got.endswith(b"0\r\n\r\n"), "a short body must not look whole"
    else:
        assert got.startswith(b"HTTP/1.1 502")


def test_a_length_that_cuts_an_event_ends_the_stream_with_an_error_event() -> None:
    whole = event(content="a") + event(content="b")
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(whole) - 20}\r\n\r\n"
    got = one([head.encode() + whole[:-20]])
    assert got.body.startswith(event(content="a"))
    assert json.loads(got.body.rstrip().rsplit(b"data: ", 1)[1])["error"]["type"] == "upstream_disconnected"


@pytest.mark.parametrize("end", [b"", DONE[:-2], DONE[:-1], event(finish="stop")[:-2]])
def test_a_stream_without_its_last_newlines_is_whole(end: bytes) -> None:
    stream = event(content="a") + end
    assert one(chunked(stream)).body == stream


def test_a_request_for_an_absolute_url_is_one_for_its_path() -> None:
    async def talk(port: int, upstream: Upstream) -> tuple[Any, bytes]:
        got = await send(port, post(ASK, path="http://elsewhere:1/v1/chat/completions?a=b"))
        return got, upstream.seen[0].line

    got, line = go(writes(chunked(event(content="Hi." + BLOCK) + DONE)), talk)
    assert line == b"POST /v1/chat/completions?a=b HTTP/1.1"
    assert client(got.body)[0].tool_calls == [{"name": "get_weather", "arguments": {"city": "Oslo"}}]


@pytest.mark.parametrize("line", [b"OPTIONS *", b"CONNECT elsewhere:1", b"GET ftp://elsewhere/"])
def test_what_is_no_path_is_refused(line: bytes) -> None:
    assert one([], line + b" HTTP/1.1\r\nHost: x\r\n\r\n").status.startswith((b"HTTP/1.1 501", b"HTTP/1.0 400"))


def test_an_upstream_that_breaks_off_after_the_end_of_its_answer_did_no_harm() -> None:
    stream = event(content="a") + event(finish="stop") + DONE
    got = one(chunked(stream, end=False))
    assert (got.body, got.complete) == (stream, True)


@pytest.mark.parametrize("finished", [False, True])
def test_an_answer_that_ends_with_its_connection(finished: bool) -> None:
    """Without a length or chunks only the answer itself tells whether it is whole."""
    stream = event(content="a") + (event(finish="stop") if finished else b"")
    got = one([b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + stream])
    assert got.body.startswith(stream)
    assert (b"upstream_disconnected" in got.body) is not finished


def test_a_broken_transfer_of_anything_else_breaks_for_the_client_too() -> None:
    got = one(chunked(b"abc", head="Content-Type: a/b\r\n", end=False), b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert got.body == b"abc"
    assert not got.complete


@pytest.mark.parametrize(
    "junk", [b"", b"\x00\x01\x02", b"SSH-2.0-x\r\n", b"HTTP/1.1 banana\r\n\r\n", b"HTTP/1.1 200 OK\r\nX"]
)
def test_an_upstream_that_speaks_no_http_gives_502(junk: bytes) -> None:
    got = one([junk])
    assert got.status.startswith(b"HTTP/1.1 502")
    assert json.loads(got.body)["error"]["type"] in ("upstream_broken", "upstream_disconnected")


def test_an_upstream_that_is_not_there_gives_502() -> None:
    async def talk(port: int, upstream: Upstream) -> Any:
        return await send(port, post(ASK))

    async def main() -> Any:
        from closeranks.gateway.guard import Guard, GuardServer, Settings, decoders

        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        free = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        guard = Guard(Settings(upstream=f"http://127.0.0.1:{free}"), decoders())
        async with GuardServer(guard, "127.0.0.1", 0) as listening:
            return await talk(listening.port, Upstream(writes([])))

    got = asyncio.run(main())
    assert got.status.startswith(b"HTTP/1.1 502")
    assert json.loads(got.body)["error"]["type"] == "upstream_unreachable"


def test_a_silent_upstream_ends_in_a_timeout() -> None:
    async def silent(request: Request, write: Write) -> None:
        await asyncio.Event().wait()

    async def half(request: Request, write: Write) -> None:
        for piece in chunked(event(content="a"), end=False):
            await write(piece)
        await asyncio.Event().wait()

    async def talk(port: int, upstream: Upstream) -> Any:
        return await send(port, post(ASK))

    assert go(silent, talk, read_timeout=0.2).status.startswith(b"HTTP/1.1 504")
    got = go(half, talk, read_timeout=0.2)
    assert json.loads(got.body.rstrip().rsplit(b"data: ", 1)[1])["error"]["type"] == "upstream_timeout"


def test_a_client_that_leaves_ends_the_upstreams_work() -> None:
    async def endless(request: Request, write: Write) -> None:
        for piece in chunked(event(content="a"), end=False):
            await write(piece)
        await asyncio.Event().wait()

    async def talk(port: int, upstream: Upstream) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(ASK))
        await reader.readuntil(event(content="a"))
        writer.close()
        await upstream.left.wait()
        return upstream.gone

    assert go(endless, talk) == 1


def test_oversized_parts_pass_unwatched_and_are_counted() -> None:
    async def talk(port: int, upstream: Upstream) -> tuple[Any, Any]:
        got = await send(port, post(ASK))
        return got, await send(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")

    body = b'{"choices": [{"message": {"content": "' + b"x" * 5000 + b'"}}]}'
    got, metrics = go(writes(answer(body, JSON)), talk, max_body=1000)
    assert got.body == body
    assert b'closeranks_guard_unwatched_total{reason="body_too_large"} 1.0' in metrics.body
    big = json.dumps({**ASK, "messages": ["x" * 5000]}).encode()

    async def ask(port: int, upstream: Upstream) -> Any:
        return await send(port, post(big)), upstream.seen[0].body

    got, reached = go(writes(answer(body, JSON)), ask, max_request=1000)
    assert (got.body, reached) == (body, big)


def test_metrics_and_samples() -> None:
    stream = event(content="Hi " + BLOCK) + event(finish="stop") + DONE

    async def talk(port: int, upstream: Upstream) -> tuple[bytes, Any]:
        await send(port, post(ASK))
        metrics = await send(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        samples = await send(port, b"GET /.closeranks/guard/samples HTTP/1.1\r\nHost: x\r\n\r\n")
        return metrics.body, json.loads(samples.body)

    metrics, samples = go(writes(chunked(stream)), talk)
    line = b'closeranks_guard_leaks_total{action="repaired",field="content",model="m",shape="call"} 1.0'
    assert line in metrics.replace(b",model", b",model")
    assert samples["samples"][0]["shape"] == "call"
    assert "Oslo" not in json.dumps(samples)


def test_the_upstream_is_not_read_while_the_client_does_not_read() -> None:
    """Back-pressure: an endless upstream is stopped by a client that stands still."""
    written = 0

    async def endless(request: Request, write: Write) -> None:
        nonlocal written
        piece = event(content="x" * 8000)
        await write(chunked(end=False)[0])
        while True:
            await write(b"%x\r\n%s\r\n" % (len(piece), piece))
            written += len(piece)

    async def talk(port: int, upstream: Upstream) -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        writer.write(post(ASK))
        await reader.readexactly(1)
        before, still = -1, 0
        while still < 20:  # until the upstream stands still for 20 rounds
            await asyncio.sleep(0.01)
            still = still + 1 if written == before else 0
            before = written
        writer.close()
        return written, still

    total, _ = go(endless, talk)
    assert total < 32 << 20, "what fits into the sockets' and the guard's buffers"


@pytest.mark.slow
def test_a_thousand_streams_at_once() -> None:
    stream = b"".join(event(content=c) for c in "Hi.\n\n" + BLOCK) + event(finish="stop") + DONE
    started = 0
    all_there = asyncio.Event()

    async def script(request: Request, write: Write) -> None:
        nonlocal started
        started += 1
        if started == 1000:
            all_there.set()
        await all_there.wait()
        for piece in chunked(*[stream[n : n + 500] for n in range(0, len(stream), 500)]):
            await write(piece)

    async def talk(port: int, upstream: Upstream) -> list[Any]:
        return await asyncio.gather(*(send(port, post(ASK)) for _ in range(1000)))

    async def main() -> list[Any]:
        async with guarded(script) as (upstream, server):
            return await asyncio.wait_for(talk(server.port, upstream), 200)

    answers = asyncio.run(main())
    assert {json.dumps(client(a.body)[0].tool_calls) for a in answers} == {
        '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    }
