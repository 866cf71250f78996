"""One connection's life: pipelined requests, clients that leave, do not read, or stay without a word."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .client import Raw, call, chat
from .conftest import Running, gateway, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKEN = b'"delta":{"content":'
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def _impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gw")
    with gateway(folder, header_timeout_s=1.0, write_timeout_s=0.5, keep_alive_s=1.0) as running:
        yield running


@pytest.fixture
def impatient(_impatient: Running) -> Running:
    _impatient.leader.reset()
    return _impatient


def post(body: object, path: str = CHAT) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def connections(running: Running) -> int:
    """Sockets that the gateway holds open towards clients, this test's own look included."""
    held = set()
    for entry in Path(f"/proc/{running.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was read: not held
            held.add(os.readlink(entry))
    with open(f"/proc/{running.process.pid}/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    here = f":{running.port:04X}"
    return sum(row[1].endswith(here) and row[3] != "0A" and f"socket:[{row[9]}]" in held for row in rows)


def test_pipelined_requests_are_answered_in_their_order(impatient: Running) -> None:
    raw = Raw(impatient.port)
    raw.send(post(chat(max_tokens=3, rid="one")) + HEALTH + post(chat(max_tokens=2, rid="two", stream=True)))
    answer = raw.read_until(b"[DONE]")
    assert answer.index(b"chatcmpl-one") < answer.index(b'"ok":true') < answer.index(b"chatcmpl-two")
    raw.close()


@pytest.mark.slow
def test_a_pipelined_request_whose_body_comes_late_is_answered_whole(impatient: Running) -> None:
    impatient.leader.step_s = 0.02
    first, second = post(chat(max_tokens=5, stream=True)), post(chat(max_tokens=200, stream=True))
    raw = Raw(impatient.port)
    raw.send(first + second[:-10])
    raw.read_until(b"[DONE]")
    raw.send(second[-10:])
    assert raw.read_until(b"[DONE]").count(TOKEN) == 200
    raw.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_requests_in_the_pipeline_has_the_running_one_aborted(
    impatient: Running, stream: bool
) -> None:
    impatient.leader.step_s = 0.05
    raw = Raw(impatient.port)
    raw.send(post(chat(max_tokens=400, stream=stream)) + HEALTH + post(chat(max_tokens=400)))
    wait_for(lambda: impatient.leader.submits)
    raw.close()
    wait_for(lambda: impatient.leader.aborts, 5)
    after = Raw(impatient.port)
    after.send(post(chat(max_tokens=1, stream=True)))
    after.read_until(b"[DONE]")
    assert len(impatient.leader.submits) == 2, "what was never begun stays undone"
    after.close()


@pytest.mark.parametrize(
    ("junk", "status"), [(b"\x16\x03\x01 what\r\n\r\n", b" 400 "), (b"GET /hea", b" 408 "), (b"GET /", b" 431 ")]
)
def test_what_is_wrong_with_a_later_request_is_said_after_the_answer(
    impatient: Running, junk: bytes, status: bytes
) -> None:
    impatient.leader.step_s = 0.01
    raw = Raw(impatient.port)
    raw.send(post(chat(max_tokens=150, stream=True)))
    raw.read_until(TOKEN)
    raw.send(junk)
    if status == b" 431 ":
        for _ in range(100):
            raw.send(b"x" * 1000)
    answer = raw.read_all()
    stream, end, refusal = answer.partition(b"0\r\n\r\n")
    assert end, answer[-300:]
    assert stream.rstrip().endswith(b"[DONE]")
    assert refusal.count(b"HTTP/1.1") == 1
    assert status in refusal.split(b"\r\n")[0]
    raw.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_a_client_that_never_reads_its_answer_holds_nothing_for_long(
    impatient: Running, stream: bool, close: bytes
) -> None:
    impatient.leader.script = lambda submit: [5] * 400
    impatient.leader.step_s = 0.0005
    before = connections(impatient)
    raw = Raw(impatient.port)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = {"prompt": "hi", "n": 100, "max_tokens": 400, "logprobs": 20, "stream": stream, "rid": "r" * 100}
    raw.send(post(body, COMPLETIONS).replace(b"host: x\r\n", b"host: x\r\n" + close))
    wait_for(lambda: impatient.leader.submits)
    wait_for(lambda: call(impatient.url + "/server_info")[2]["open_requests"] == 0)
    wait_for(lambda: connections(impatient) == before, 15)
    raw.close()


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_everything(impatient: Running) -> None:
    """Longer than the time-out of writes in all, never without a byte for so long."""
    raw = Raw(impatient.port)
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.send(post({"prompt": "hello " * 30_000}, "/tokenize"))
    got = 0
    while True:
        piece = raw.socket.recv(30_000)
        got += len(piece)
        time.sleep(0.002)
        if not piece or piece.endswith(b"}"):
            break
    assert got > 150_000
    raw.close()


@pytest.mark.parametrize("last", [b"\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"])
def test_a_connection_that_stays_without_a_request_is_closed(impatient: Running, last: bytes) -> None:
    raw = Raw(impatient.port)
    raw.send(HEALTH)
    raw.read_until(b"}")
    raw.send(last)
    raw.read_all()
    raw.close()


def test_a_connection_is_closed_when_it_stays_idle_after_a_body_that_nobody_wanted(impatient: Running) -> None:
    raw = Raw(impatient.port)
    raw.send(b"POST /v1/nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
    assert b" 404 " in raw.read_until(b"}}").split(b"\r\n")[0]
    raw.send(b"cde")
    raw.send(HEALTH)
    assert raw.read_all().count(b"HTTP/1.1 200") == 1
    raw.close()


OFFERS = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUPGRADE: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


def offering(request: bytes, offer: str) -> bytes:
    return request.replace(b"host: x\r\n", b"host: x\r\n" + OFFERS[offer])


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("cut", [0, 60, "body", "all"])
def test_an_offer_of_another_protocol_is_ignored(impatient: Running, offer: str, cut: int | str) -> None:
    """As Java's HttpClient sends it with every request to http://; what follows on the connection is served too."""
    data = offering(post(chat(max_tokens=3, rid="one")), offer)
    raw = Raw(impatient.port)
    at = data.index(b"\r\n\r\n") + 4 if cut == "body" else len(data) if cut == "all" else int(cut)
    rest = data[at:] + offering(HEALTH, offer) + offering(post(chat(max_tokens=2, rid="two", stream=True)), offer)
    raw.send(data[:at])
    time.sleep(0.02)
    raw.send(rest)
    answer = raw.read_until(b"[DONE]")
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b"chatcmpl-one") < answer.index(b'"ok":true') < answer.index(b"chatcmpl-two")
    raw.close()


def test_a_chunked_body_behind_such_an_offer_is_read(impatient: Running) -> None:
    body = json.dumps(chat(max_tokens=2)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
    )
    raw = Raw(impatient.port)
    raw.send(offering(head, "h2c"))
    assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
    raw.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + HEALTH)
    assert raw.read_until(b'"ok":true').count(b"HTTP/1.1 200") == 2
    raw.close()


def test_a_thousand_offers_in_one_packet(impatient: Running) -> None:
    raw = Raw(impatient.port)
    raw.send(b"".join(offering(HEALTH, "h2c") for _ in range(1000)))
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.read_all().count(b'"ok":true') > 0
    raw.close()
    assert call(impatient.url + "/health")[0] == 200


@pytest.mark.parametrize("target", [b"x:80", b"/v1/models"])
def test_a_tunnel_is_refused(impatient: Running, target: bytes) -> None:
    raw = Raw(impatient.port)
    raw.send(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target + HEALTH)
    answer = raw.read_all()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    raw.close()


@pytest.mark.parametrize("version", ["1.0", "0.9", "2.0"])
@pytest.mark.parametrize("kept", ["", "connection: keep-alive\r\n"])
def test_an_old_client_reads_a_stream_until_the_connection_ends(impatient: Running, version: str, kept: str) -> None:
    """RFC 9112 6.1: no transfer coding for those who do not speak HTTP/1.1."""
    impatient.leader.step_s = 0.01
    raw = Raw(impatient.port)
    body = post(chat(max_tokens=20, stream=True)).replace(b"HTTP/1.1\r\n", f"HTTP/{version}\r\n{kept}".encode())
    raw.send(body + HEALTH)
    head, _, stream = raw.read_all().partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0]
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert stream.startswith(b"data: {")
    assert stream.endswith(b"data: [DONE]\n\n")
    assert stream.count(TOKEN) == 20
    raw.close()


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_an_old_client_gets_an_answer_of_known_length(impatient: Running, method: bytes) -> None:
    raw = Raw(impatient.port)
    raw.send(HEALTH.replace(b"1.1", b"1.0").replace(b"GET", method))
    head, _, body = raw.read_all().partition(b"\r\n\r\n")
    assert b"content-length" in head
    assert b"transfer-encoding" not in head
    assert (b'"ok":true' in body) == (method == b"GET")
    raw.close()


@pytest.mark.parametrize("size", [60_000, 70_000, 100_000, 250_000])
@pytest.mark.parametrize("where", ["header", "headers", "url", "upgrade"])
@pytest.mark.parametrize("cut", [0, 50_000])
def test_a_head_that_comes_whole_is_bounded_as_well(impatient: Running, where: str, size: int, cut: int) -> None:
    """In one read, before anything of it was incomplete."""
    parts = {
        "header": b"x: " + b"y" * size + b"\r\n",
        "headers": b"x: y\r\n" * (size // 6 + 1),
        "upgrade": b"connection: upgrade\r\nupgrade: h2c\r\nx: " + b"y" * size + b"\r\n",
    }
    path = b"/health" + (b"?" + b"a" * size if where == "url" else b"")
    head = b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path, parts.get(where, b""))
    raw = Raw(impatient.port)
    raw.send(head[:cut])
    time.sleep(0.05 if cut else 0)
    raw.send(head[cut:] + HEALTH)
    answer = raw.read_until(b"}")
    if size > 65536:
        assert b" 431 " in answer.split(b"\r\n")[0]
        assert b"headers_too_large" in answer
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1" not in raw.read_all()
    else:
        assert b" 200 " in answer.split(b"\r\n")[0]
    raw.close()


def test_many_small_heads_in_one_piece_are_each_small(impatient: Running) -> None:
    raw = Raw(impatient.port)
    raw.send(HEALTH.replace(b"host: x", b"host: x\r\nx: " + b"y" * 30_000) * 5)
    answer = b""
    while answer.count(b'"ok":true') < 5 and (piece := raw.socket.recv(65536)):
        answer += piece
    assert answer.count(b"HTTP/1.1 200") == 5
    raw.close()


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "piece",
    [b"0\r\n" + b"A:b\r\n" * 10_000, b"0\r\na: " + b"b" * 50_000, b"1;" + b"x" * 50_000, b"0" * 50_000],
    ids=["trailers", "one trailer", "extension", "size"],
)
def test_what_stands_around_a_chunked_body_is_bounded(impatient: Running, piece: bytes) -> None:
    raw = Raw(impatient.port)
    raw.send(CHUNKED + piece)
    sent, answer = len(piece), b""
    more = piece.partition(b"0\r\n")[2] or piece[-50_000:]
    more = b"A:b\r\n" * 10_000 if b"A:b" in piece else more[-1:] * 50_000
    try:
        while sent < 10_000_000:
            raw.send(more)
            sent += len(more)
        answer = raw.read_all()
    except (ConnectionResetError, BrokenPipeError):
        pass
    assert sent < 10_000_000
    assert not answer or b" 431 " in answer.split(b"\r\n")[0]
    raw.close()


def test_a_few_trailers_are_taken_and_count_for_nothing(impatient: Running) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    raw = Raw(impatient.port)
    raw.send(CHUNKED + b"%x;a=b\r\n%b\r\n0\r\nx-request-id: \xff\r\ntrailer: x\r\n\r\n" % (len(body), body) + HEALTH)
    assert raw.read_until(b'"ok":true').count(b"HTTP/1.1 200") == 2
    raw.close()
