"""Chat completions over HTTP, with the official client."""

import json
import urllib.request
from typing import Any

import openai
import pytest

from . import tiny
from .conftest import Running, wait_for

TEXT = "hello wörld 😀 and more"


def script(text: str, end: bool = True) -> Any:
    made = tiny.tokenizer()
    tokens = made.encode(text).ids + ([made.token_to_id("<|im_end|>")] if end else [])
    return lambda submit: tokens


@pytest.fixture
def client(service: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=20)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="default", messages=[{"role": "user", "content": "hi"}], **more)


def test_whole_answer(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script(TEXT)
    answer = ask(client)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    made = tiny.tokenizer()
    prompt = made.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n").ids
    assert service.leader.submits[0].tokens == prompt
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(made.encode(TEXT).ids) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_stream_is_the_same_text_in_pieces(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script(TEXT)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == TEXT
    assert len(texts) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len(tiny.tokenizer().encode(TEXT).ids) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stop_string_cuts_exactly_and_aborts(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script("one two stopper three", end=False)
    for stream in (False, True):
        answer = ask(client, stop=["stopp", "never"], stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        assert text == "one two "
    wait_for(lambda: len(service.leader.aborts) == 2)


def test_length_and_n(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script(TEXT)
    answer = ask(client, n=3, max_tokens=4, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert {c.finish_reason for c in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 12
    seeds = {s.sampling.seed for s in service.leader.submits}
    assert len(seeds) == 3
    assert 7 in seeds


def test_logprobs(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script(TEXT)
    answer = ask(client, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == TEXT
    assert entries[0].logprob == -0.5
    assert len(entries[0].top_logprobs) == 2
    assert entries[0].top_logprobs[1].logprob == -9999.0
    streamed = []
    for chunk in ask(client, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == entries


def test_sampling_parameters_reach_the_engine(service: Running, client: openai.OpenAI) -> None:
    service.leader.script = script("x")
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [3], "ignore_eos": True}
    ask(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        max_tokens=1,
        extra_body=extra,
    )
    submit = service.leader.submits[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (11, 0.25, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert submit.stop_ids == [3]


def test_request_id_goes_in_and_out(service: Running) -> None:
    service.leader.script = script("x")
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"content-type": "application/json", "x-request-id": "my-id.1"}
    request = urllib.request.Request(service.url + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        assert response.headers["x-request-id"] == "my-id.1"
        assert json.load(response)["id"] == "chatcmpl-my-id.1"
    assert service.leader.submits[0].rid == "my-id.1"
