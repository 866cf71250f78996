"""Every wrong request gets its own clear error in OpenAI's shape, and never reaches an engine."""

import asyncio
import gc
import json
import socket
import threading
import time
from typing import Any

import pytest

from closeranks.gateway import app, errors, openai

from .client import Raw, call, chat
from .conftest import Running, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


TOOL = {"type": "function", "function": {"name": "f"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param", "text"),
    [
        (CHAT, b"{", 400, "invalid_json", None, "JSON"),
        (CHAT, b"", 400, "invalid_json", None, "JSON"),
        (CHAT, b"\xff\xfe", 400, "invalid_json", None, "JSON"),
        (CHAT, b"[" * 100_000, 400, None, None, "object"),
        (CHAT, b'{"messages":' + b"[" * 90_000, 400, None, "messages[0]", "object"),
        (CHAT, b'{"metadata":{"a":' + b"[" * 90_000, 400, "invalid_json", None, "nested"),
        (CHAT, b'{"messages": [], "temperature": NaN}', 400, "invalid_json", None, "JSON"),
        (CHAT, b"[]", 400, None, None, "object"),
        (CHAT, {}, 400, None, "messages", "messages"),
        (CHAT, chat(messages="hi"), 400, None, "messages", "array"),
        (CHAT, chat(messages=[]), 400, None, "messages", "empty"),
        (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, None, "messages[0].role", "robot"),
        (CHAT, chat(messages=[{"content": "x"}]), 400, None, "messages[0].role", "role"),
        (CHAT, chat(messages=[{"role": "user"}]), 400, None, "messages[0].content", "content"),
        (CHAT, chat(messages=user([{"type": "image_url", "image_url": {}}])), 400, "unsupported", None, "image_url"),
        (CHAT, chat(messages=user(7)), 400, None, "messages[0].content", "int"),
        (CHAT, chat(model="gpt-9"), 404, "model_not_found", "model", "gpt-9"),
        (CHAT, chat(temperature="hot"), 400, None, "temperature", "str"),
        (CHAT, chat(temperature=-0.1), 400, "out_of_range", "temperature", "-0.1"),
        (CHAT, chat(temperature=2.5), 400, "out_of_range", "temperature", "2.5"),
        (CHAT, chat(max_tokens=0), 400, "out_of_range", "max_tokens", "from 1 to 2147483648"),
        (CHAT, chat(top_p=0), 400, "out_of_range", "top_p", "above 0"),
        (CHAT, chat(top_p=1.1), 400, "out_of_range", "top_p", "1.1"),
        (CHAT, chat(top_k=-2), 400, "out_of_range", "top_k", "-2"),
        (CHAT, chat(min_p=-1), 400, "out_of_range", "min_p", "min_p"),
        (CHAT, chat(presence_penalty=3), 400, "out_of_range", "presence_penalty", "3"),
        (CHAT, chat(frequency_penalty=-3), 400, "out_of_range", "frequency_penalty", "-3"),
        (CHAT, chat(repetition_penalty=0), 400, "out_of_range", "repetition_penalty", "above"),
        (CHAT, chat(max_tokens=0), 400, "out_of_range", "max_tokens", "0"),
        (CHAT, chat(max_completion_tokens=-5), 400, "out_of_range", "max_completion_tokens", "-5"),
        (CHAT, chat(max_tokens=1.5), 400, None, "max_tokens", "float"),
        (CHAT, chat(n=0), 400, "out_of_range", "n", "0"),
        (CHAT, chat(n=1000), 400, "out_of_range", "n", "1000"),
        (CHAT, chat(seed=2**70), 400, "out_of_range", "seed", "seed"),
        (CHAT, chat(top_logprobs=21, logprobs=True), 400, "out_of_range", "top_logprobs", "21"),
        (CHAT, chat(top_logprobs=2), 400, None, "top_logprobs", "logprobs"),
        (CHAT, chat(stop=[""]), 400, None, "stop", "stop"),
        (CHAT, chat(stop=["x"] * 17), 400, None, "stop", "17"),
        (CHAT, chat(stream="yes"), 400, None, "stream", "bool"),
        (CHAT, chat(stream_options={"include_usage": True}), 400, None, "stream_options", "stream"),
        (CHAT, chat(temprature=1), 400, None, "temprature", "unknown field"),
        (CHAT, chat(logit_bias={"1": 5}), 400, "unsupported", "logit_bias", "logit_bias"),
        (CHAT, chat(functions=[{"name": "f"}]), 400, "unsupported", "functions", "functions"),
        (CHAT, chat(modalities=["audio"]), 400, "unsupported", "modalities", "text"),
        (CHAT, chat(response_format={"type": "grammar"}), 400, "unsupported", "response_format", "grammar"),
        (
            CHAT,
            chat(response_format={"type": "json_schema"}),
            400,
            None,
            "response_format.json_schema.schema",
            "schema",
        ),
        (CHAT, chat(tools=[{"type": "magic"}]), 400, None, "tools[0].type", "magic"),
        (CHAT, chat(tool_choice="required"), 400, None, "tool_choice", "tools"),
        (CHAT, chat(stop_token_ids=[10**6]), 400, "out_of_range", "stop_token_ids", "vocabulary"),
        (CHAT, chat(messages=user("a " * 400)), 400, "context_length_exceeded", None, "512"),
        (CHAT, chat(messages=user("x" * 150_000)), 400, "context_length_exceeded", "messages", "512"),
        (CHAT, chat(max_tokens=510), 400, "context_length_exceeded", "max_tokens", "512"),
        (CHAT, chat(rid="no spaces"), 400, None, "rid", "characters"),
        (COMPLETIONS, {"prompt": "a <|unlearned|> b"}, 400, "out_of_range", "prompt", "<|unlearned|>"),
        (COMPLETIONS, {"model": "default"}, 400, None, "prompt", "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, None, "prompt", "tokens"),
        (COMPLETIONS, {"prompt": []}, 400, None, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, None, "prompt[0]", "token ids"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "out_of_range", "prompt", "-1"),
        (COMPLETIONS, {"prompt": [10**6]}, 400, "out_of_range", "prompt", "vocabulary"),
        (COMPLETIONS, {"prompt": [True]}, 400, None, "prompt[0]", "token ids"),
        (COMPLETIONS, {"prompt": [[1], []]}, 400, None, "prompt[1]", "token ids"),
        (COMPLETIONS, {"prompt": [1] * 600}, 400, "context_length_exceeded", None, "600"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, 400, None, "prompt", "129"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, 400, "unsupported", "echo", "echo"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "unsupported", "best_of", "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "unsupported", "suffix", "suffix"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 50}, 400, "out_of_range", "logprobs", "50"),
        (CHAT, chat(messages=user("") * 513), 400, "context_length_exceeded", "messages", "513 messages"),
        (CHAT, chat(messages=user("x" * 60_000)), 400, "context_length_exceeded", "messages", "60000 characters"),
        (CHAT, chat(tools=[TOOL] * 513), 400, "context_length_exceeded", "tools", "513 tools"),
        ("/tokenize", {}, 400, None, "prompt", "prompt"),
        ("/tokenize", {"prompt": 5}, 400, None, "prompt", "int"),
        ("/detokenize", {"tokens": [10**9]}, 400, "out_of_range", "tokens", "vocabulary"),
        ("/abort_request", {"rid": 5}, 400, None, "rid", "int"),
        (CHAT, chat(model="m" * 300), 400, None, "model", "256"),
        (CHAT, chat(**{"x" * 100_000: 1}), 400, None, None, "unknown field"),
        (CHAT, chat(response_format={"type": "x" * 100_000}), 400, "unsupported", "response_format", "xxx…"),
        (CHAT, chat(messages=user([{"type": "x" * 100_000}])), 400, "unsupported", "messages[0].content[0]", "xxx…"),
        ("/v1/nothing", {}, 404, "unknown_url", None, "/v1/nothing"),
        ("/health", {}, 405, "method_not_allowed", None, "POST"),
    ],
)
def test_error(
    service: Running, path: str, body: Any, status: int, code: str | None, param: str | None, text: str
) -> None:
    got, headers, content = call(service.url + path, body)
    assert got == status, content
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    error = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert len(error["message"]) < 1000
    if code:
        assert error["code"] == code
    if param:
        assert error["param"] == param
    assert not service.leader.submits


def test_lone_surrogates_do_no_harm(service: Running) -> None:
    service.leader.script = lambda submit: [1, 2, 3]
    status, _, content = call(
        service.url + CHAT, b'{"messages":[{"role":"user","content":"a\\ud800b"}],"max_tokens":2}'
    )
    assert status in (200, 400), content


@pytest.mark.parametrize(
    "header",
    [
        "content-encoding: gzip",
        "content-encoding: identity\r\ncontent-encoding: BR",
        "transfer-encoding: gzip, chunked",
    ],
)
def test_a_body_that_is_coded_is_refused(service: Running, header: str) -> None:
    raw = Raw(service.port)
    body = b'{"prompt": "a", "max_tokens": 1}'
    chunked = "chunked" in header
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{header}\r\n"
    head += "\r\n" if chunked else f"content-length: {len(body)}\r\n\r\n"
    raw.send(head.encode() + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body))
    answer = raw.read_until(b"}}")
    raw.close()
    assert answer.startswith(b"HTTP/1.1 415")
    assert b"unsupported" in answer
    plain = {"content-encoding": "identity"}
    assert call(service.url + COMPLETIONS, body, plain)[0] == 200


def test_a_large_body_is_refused_before_it_is_read(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n" + b"x" * 1000)
    answer = raw.read_until(b"}}")
    raw.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in answer


def test_a_large_body_without_a_length_is_refused_when_it_grows_too_large(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    sent = 0
    try:
        while sent < 100_000_000:
            raw.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536
            raw.socket.settimeout(0.001)
            try:
                answer = raw.socket.recv(65536)
                break
            except TimeoutError:
                raw.socket.settimeout(15)
    finally:
        raw.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert sent < 20_000_000


def test_a_client_that_sends_all_of_a_large_body_still_sees_the_refusal(service: Running) -> None:
    status, _, content = call(service.url + CHAT, b"x" * 5_000_000)
    assert status == 413
    assert content["error"]["code"] == "request_too_large"


def test_bodies_that_come_in_hold_a_bounded_number_of_bytes(service: Running) -> None:
    raws = [Raw(service.port) for _ in range(30)]
    for raw in raws:
        raw.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b" " * 199_000)
    answers = [raw.read_until(b"}}").split(b"\r\n")[0] for raw in raws]
    assert {answer.split()[1] for answer in answers} == {b"408", b"429"}
    for raw in raws:
        raw.close()
    assert call(service.url + COMPLETIONS, {"prompt": " " * 190_000})[0] == 400, "what was held is given back"


def test_what_takes_long_happens_beside_the_event_loop() -> None:
    async def where(size: int) -> int:
        return await app._beside(size, threading.get_ident)

    assert asyncio.run(where(100)) == threading.get_ident()
    assert asyncio.run(where(1_000_000)) != threading.get_ident()


def test_the_collector_looks_at_a_large_body_once() -> None:
    collected: list[str] = []
    note = lambda phase, info: collected.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        openai.parse(b'{"prompt":[' + b"[]," * 100_000 + b"[]]}", openai.CompletionRequest)
        assert collected.count("start") <= 2
        with pytest.raises(errors.Invalid):
            openai.parse(b'{"prompt":[' + b"[]," * 100_000, openai.CompletionRequest)
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_slow_headers_are_cut_off(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: ")
    began = time.monotonic()
    for _ in range(5):
        time.sleep(0.1)
        raw.send(b"x")  # dripping does not help
    answer = raw.read_all()
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert time.monotonic() - began < 10
    raw.close()


def test_a_connection_that_never_speaks_is_closed(service: Running) -> None:
    raw = Raw(service.port)
    assert raw.read_all() == b""
    raw.close()


def test_slow_headers_of_a_second_request_are_cut_off(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    raw.read_until(b"}")
    raw.send(b"GET /hea")
    assert b" 408 " in raw.read_all().split(b"\r\n")[0]
    raw.close()


def test_slow_body_is_cut_off(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"a"')
    assert raw.read_until(b"}}").startswith(b"HTTP/1.1 408")
    raw.close()


def test_endless_headers_are_cut_off(service: Running) -> None:
    raw = Raw(service.port)
    raw.send(b"GET /health HTTP/1.1\r\n")
    answer = b""
    try:
        for i in range(2000):
            raw.send(b"x-%d: " % i + b"y" * 1000 + b"\r\n")
        answer = raw.read_all()
    except (ConnectionResetError, BrokenPipeError):
        pass
    assert not answer or b" 431 " in answer.split(b"\r\n")[0]
    raw.close()


@pytest.mark.parametrize("data", [b"\x16\x03\x01 what is this", b"GET http://[::1 HTTP/1.1\r\nhost: x"])
def test_no_http_at_all(service: Running, data: bytes) -> None:
    raw = Raw(service.port)
    raw.send(data + b"\r\n\r\n")
    answer = raw.read_all()
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_http"
    raw.close()


def test_two_requests_with_one_id(service: Running) -> None:
    service.leader.paused = True
    raw = Raw(service.port)
    raw.post(CHAT, chat(rid="twin"))
    wait_for(lambda: service.leader.submits)
    for body, headers in ((chat(rid="twin"), {}), (chat(), {"x-request-id": "twin"})):
        status, _, content = call(service.url + CHAT, body, headers)
        assert status == 409
        assert content["error"]["code"] == "duplicate_request_id"
    assert call(service.url + "/abort_request", {"rid": "twin"})[2]["aborted"]
    assert raw.read_until(b"}}").startswith(b"HTTP/1.1 499")
    raw.close()
    service.leader.paused = False
    wait_for(lambda: call(service.url + CHAT, chat(rid="twin", max_tokens=1))[0] == 200)


def test_too_many_open_requests(service: Running) -> None:
    service.leader.paused = True
    raw = Raw(service.port)
    raw.post(CHAT, chat(n=40))
    wait_for(lambda: len(service.leader.submits) == 40)
    status, headers, content = call(service.url + CHAT, chat())
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert content["error"]["code"] == "overloaded"
    raw.close()
    wait_for(lambda: len(service.leader.aborts) == 40)


@pytest.mark.parametrize(("path", "more"), [(CHAT, {"n": 41}), ("/v1/completions", {"prompt": ["a", "b"], "n": 21})])
def test_more_choices_than_may_ever_be_open_are_no_matter_of_waiting(
    service: Running, path: str, more: dict[str, Any]
) -> None:
    status, headers, content = call(service.url + path, (chat() if path == CHAT else {}) | more)
    assert status == 400
    assert "retry-after" not in headers
    assert (content["error"]["param"], content["error"]["code"]) == ("n", "out_of_range")
    assert "no more than 40 requests are open" in content["error"]["message"]


def test_the_gateway_goes_on_after_all_that(service: Running) -> None:
    assert call(service.url + CHAT, chat(max_tokens=2))[0] == 200
    with socket.create_connection(("127.0.0.1", service.port)):
        pass
    assert call(service.url + "/health")[0] == 200


def test_the_log_tells_which_field_was_refused_and_not_what_it_held(service: Running) -> None:
    rid = "refused-field"
    body = chat(messages=[{"role": "user", "content": "xyzzy-prompt"}], stop=["xyzzy-stop"] * 17)
    assert call(service.url + CHAT, body, headers={"X-Request-Id": rid})[0] == 400
    wait_for(lambda: rid in service.log.read_text())
    (line,) = [json.loads(text) for text in service.log.read_text().splitlines() if rid in text]
    assert (line["event"], line["status"], line["field"]) == ("refused", 400, "stop")
    assert "xyzzy" not in service.log.read_text()
