"""Streams that go on while engines die behind them, over real sockets; and aborts that reach both sides."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from closeranks.protocol import Ended, Output, Submit, Tokens

from . import tiny
from .client import Raw, call, chat
from .conftest import Running, gateway, status_of, wait_for

MADE = tiny.tokenizer()
TEXT = "the quick brown fox jumps over the lazy dog " * 3
TOKENS = MADE.encode(TEXT).ids


@pytest.fixture(scope="module")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gp")
    with gateway(
        folder, ("prefill", "decode"), comment_interval_s=0.3, engine_silence_s=2.0, api_key="", wait_bound_s=1.5
    ) as running:
        yield running


@pytest.fixture
def pair(_pair: Running) -> Running:
    for leader in _pair.leaders:
        leader.reset()
    _pair.leader.script = lambda submit: TOKENS
    _pair.leader.step_s = 0.003
    wait_for(lambda: status_of(_pair.url + "/ready") == 200)
    return _pair


class Reader:
    """A streaming client in a thread."""

    def __init__(self, running: Running, **more: Any) -> None:
        self.text = ""
        self.usage: Any = None
        self.finish: str | None = None
        self.error: Exception | None = None
        client = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0, timeout=30)
        arguments = {"max_tokens": len(TOKENS), "stream_options": {"include_usage": True}, **more}

        def run() -> None:
            try:
                stream = client.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": "hi"}], stream=True, **arguments
                )
                for chunk in stream:
                    if chunk.choices:
                        self.text += chunk.choices[0].delta.content or ""
                        self.finish = chunk.choices[0].finish_reason or self.finish
                    self.usage = chunk.usage or self.usage
            except openai.APIError as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def wait(self) -> "Reader":
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self

    def sound(self) -> None:
        """The whole stream, each token once, usage counted once."""
        self.wait()
        assert self.error is None
        assert self.text == TEXT
        assert self.finish == "length"
        assert self.usage.completion_tokens == len(TOKENS)


def test_both_leaders_get_the_submit_with_the_other_as_peer(pair: Running) -> None:
    Reader(pair).sound()
    prefill, decode = pair.leaders
    assert prefill.submits[0].peer == decode.endpoint
    assert decode.submits[0].peer == prefill.endpoint
    assert prefill.submits[0].room == decode.submits[0].room


def test_decode_restarts_twice_under_eight_streams(pair: Running) -> None:
    readers = [Reader(pair) for _ in range(8)]
    for _ in range(2):
        wait_for(lambda: all(len(r.text) > 10 for r in readers))
        pair.leader.restart()
    for reader in readers:
        reader.sound()
    assert max(submit.room.generation for submit in pair.leader.submits) == 3


def test_retryable_ends_and_charges(pair: Running) -> None:
    def script(submit: Submit) -> list[int]:
        """Eight tokens of each generation until it runs alone: none ends before all three are under way."""
        return TOKENS if submit.alone else TOKENS[: len(submit.tokens) - submit.prompt_length + 8]

    pair.leader.script = script
    readers = [Reader(pair) for _ in range(3)]
    for _ in range(2):
        wait_for(lambda: len(pair.leader.rooms) == 3 and all(room.sent > 5 for room in pair.leader.rooms.values()))
        pair.leader.end_all("fault", retryable=True, charged=True)
    for reader in readers:
        reader.sound()
    assert [submit.alone for submit in pair.leader.submits].count(True) == 3


@pytest.mark.slow
def test_the_third_charge_ends_with_an_error_that_names_the_request(pair: Running) -> None:
    reader = Reader(pair, extra_body={"rid": "poisonous"})
    for generation in (1, 2, 3):
        wait_for(lambda g=generation: any(r.generation == g and v.sent > 3 for r, v in pair.leader.rooms.items()))
        pair.leader.end_all("fault", retryable=True, charged=True, detail="NotFinite: x\nTraceback: /a")
    reader.wait()
    assert reader.error is not None
    assert "poisonous" in str(reader.error)
    assert "NotFinite: x" in str(reader.error)
    assert "Traceback" not in str(reader.error), "stacks are for the log"
    assert TEXT.startswith(reader.text)


def test_doubled_and_reordered_outputs(pair: Running) -> None:
    held: list[Output] = []

    def mangle(output: Output) -> list[Output]:
        stale = [replace_generation(t) for t in output.tokens]
        held.append(output)
        if len(held) < 3 and not output.ended:
            return [Output(stale, [])]
        sent = [*reversed(held), *held]
        held.clear()
        return sent

    pair.leader.mangle = mangle
    Reader(pair).sound()
    assert len(pair.leader.submits) == 1


def replace_generation(tokens: Tokens) -> Tokens:
    """The same tokens as of an attempt that is long over."""
    return Tokens(replace_room(tokens), tokens.index, [1] * len(tokens.tokens))


def replace_room(tokens: Tokens) -> Any:
    room = tokens.room
    return type(room)(room.id, room.generation - 1)


@pytest.mark.slow
def test_lost_outputs_are_computed_again(pair: Running) -> None:
    seen = 0

    def mangle(output: Output) -> list[Output]:
        nonlocal seen
        seen += 1
        return [] if seen == 20 else [output]

    pair.leader.mangle = mangle
    Reader(pair).sound()
    assert [submit.room.generation for submit in pair.leader.submits] == [1, 2]


def test_silence_shows_comments_and_then_goes_on(pair: Running) -> None:
    raw = Raw(pair.port)
    raw.post("/v1/chat/completions", chat(stream=True, max_tokens=len(TOKENS)))
    raw.read_until(b'"content":"q"')
    pair.leader.silent = True
    raw.read_until(b": waiting")
    wait_for(lambda: status_of(pair.url + "/ready") == 503)
    _, _, content = call(pair.url + "/health")
    assert "engine decode" in content["reasons"][0]
    assert "silent" in content["reasons"][0]
    pair.leader.silent = False
    rest = raw.read_until(b"[DONE]")
    assert b'"finish_reason":"length"' in rest
    raw.close()
    # whether the old attempt speaks again first, or its successor is sent, is a race that either may win
    assert [submit.room.generation for submit in pair.leader.submits] in ([1], [1, 2])


@pytest.mark.slow
def test_prefill_restart_leaves_running_rows_alone(pair: Running) -> None:
    pair.leader.step_s = 0.01
    reader = Reader(pair)
    wait_for(lambda: len(reader.text) > 10)
    pair.leaders[0].restart()
    reader.sound()
    assert len(pair.leader.submits) == 1


def test_client_that_leaves_aborts_both_sides(pair: Running) -> None:
    pair.leader.step_s = 0.05
    for stream in (True, False):
        for leader in pair.leaders:
            leader.aborts.clear()
            leader.submits.clear()
        raw = Raw(pair.port)
        raw.post("/v1/chat/completions", chat(stream=stream, max_tokens=len(TOKENS)))
        wait_for(lambda: pair.leader.submits and pair.leaders[0].submits)
        raw.close()
        room = pair.leader.submits[0].room
        wait_for(lambda room=room: all(leader.aborts == [room] for leader in pair.leaders))
    wait_for(lambda: call(pair.url + "/server_info")[2]["open_requests"] == 0)


def test_busy_engine_is_429_even_for_a_stream(pair: Running) -> None:
    pair.leader.refuse = lambda submit: Ended(submit.room, "busy", "40 waiting", True, retry_after_s=3.0)
    for stream in (True, False):
        status, headers, content = call(pair.url + "/v1/chat/completions", chat(stream=stream))
        assert status == 429
        assert headers["retry-after"] == "3"
        assert "40 waiting" in content["error"]["message"]


@pytest.mark.slow
def test_engine_errors_have_their_status(pair: Running) -> None:
    for reason, expected in (("invalid", 400), ("deadline", 504), ("peer", 503), ("fault", 500)):
        pair.leader.refuse = lambda submit, why=reason: Ended(submit.room, why, "because", False)
        status, _, content = call(pair.url + "/v1/chat/completions", chat())
        assert status == expected, content
        assert "because" in content["error"]["message"]


def test_an_error_in_the_middle_is_an_event(pair: Running) -> None:
    reader = Reader(pair)
    wait_for(lambda: len(reader.text) > 10)
    pair.leader.end_all("fault", retryable=False, detail="step 12 broke")
    reader.wait()
    assert isinstance(reader.error, openai.APIError)
    assert "step 12 broke" in str(reader.error)


def test_health_is_progress_not_an_answering_port(pair: Running) -> None:
    pair.leader.paused = True
    pair.leader.slowest_rank = 1
    raw = Raw(pair.port)
    raw.post("/v1/chat/completions", chat(stream=True, rid="stuck"))
    wait_for(lambda: "stuck" in json.dumps(call(pair.url + "/health")[2].get("reasons")))
    assert status_of(pair.url + "/ready") == 200
    status, _, content = call(pair.url + "/health")
    assert status == 503
    said = json.dumps(content["reasons"])
    assert "stuck" in said
    assert "engine decode" in said
    assert "rank 1" in said
    pair.leader.paused = False
    wait_for(lambda: status_of(pair.url + "/health") == 200)
    raw.close()


@pytest.mark.slow
def test_mismatched_fingerprints_are_named(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", ("prefill", "decode"), ready=False) as running:
        running.leaders[0].fingerprint = replace_fingerprint(running.leaders[0].fingerprint)
        wait_for(lambda: "do not match" in json.dumps(call(running.url + "/ready")[2]))
        reasons = json.dumps(call(running.url + "/ready")[2])
        assert "bfloat16" in reasons
        assert "float32" in reasons


def replace_fingerprint(found: Any) -> Any:
    return type(found)(found.protocol, found.weights, "bfloat16", found.page, found.tokenizer, found.checksum)
