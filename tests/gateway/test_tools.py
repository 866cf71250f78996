"""Tool calls and reasoning, from sampled tokens to OpenAI's deltas."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from . import tiny
from .client import call, chat
from .conftest import Running, gateway, wait_for

MADE = tiny.tokenizer()
END = MADE.token_to_id("<|im_end|>")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "time", "arguments": {"city": "Rom"}}\n</tool_call>'


@pytest.fixture(scope="module")
def _tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("gt"), tool_call_parser="hermes", reasoning_parser="hermes") as running:
        yield running


@pytest.fixture
def tools(_tools: Running) -> Running:
    _tools.leader.reset()
    return _tools


def ask(running: Running, text: str, stream: bool, **more: Any) -> dict[str, Any]:
    """The whole answer, or a stream gathered as a client does."""
    tokens = [*MADE.encode(text).ids, END]
    running.leader.script = lambda submit: tokens
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0, timeout=20)
    messages: Any = [{"role": "user", "content": "hi"}]
    if not stream:
        answer = client.chat.completions.create(model="default", messages=messages, **more)
        message = answer.choices[0].message
        calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        assert all(c.id.startswith("call_") for c in message.tool_calls or ())
        return {
            "content": message.content or "",
            "reasoning": getattr(message, "reasoning_content", None) or "",
            "calls": calls,
            "finish": answer.choices[0].finish_reason,
        }
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in client.chat.completions.create(model="default", messages=messages, stream=True, **more):
        delta = chunk.choices[0].delta
        found["content"] += delta.content or ""
        found["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or ():
            if piece.index == len(found["calls"]):  # id and name come first, and once
                assert piece.id
                assert piece.type == "function"
                found["calls"].append((piece.function.name, ""))
            else:
                assert piece.id is None
                name, arguments = found["calls"][piece.index]
                found["calls"][piece.index] = (name, arguments + piece.function.arguments)
        found["finish"] = chunk.choices[0].finish_reason or found["finish"]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_calls(tools: Running, stream: bool) -> None:
    found = ask(tools, f"Let me see.\n{CALL}\n{SECOND}", stream, tools=TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == [
        ("weather", {"city": "Köln"}),
        ("time", {"city": "Rom"}),
    ]
    assert found["content"].strip() == "Let me see."
    assert found["finish"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(tools: Running, stream: bool) -> None:
    found = ask(tools, f"{CALL}\n{SECOND}", stream, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in found["calls"]] == ["weather"]
    assert found["finish"] == "tool_calls"
    wait_for(lambda: tools.leader.aborts)  # the rest is not even computed


@pytest.mark.parametrize("stream", [False, True])
def test_no_tools_no_calls_and_no_markup(tools: Running, stream: bool) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        found = ask(tools, f"Well.\n{CALL}", stream, **more)
        assert found["calls"] == []
        assert "tool_call" not in found["content"]
        assert found["content"].startswith("Well.")
        assert found["finish"] == "stop"
    text = call(tools.url + "/metrics")[2].decode()
    assert "closeranks_discarded_characters_total{reason=" in text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(tools: Running, stream: bool) -> None:
    found = ask(tools, "<think>\nhm 😀 hm\n</think>\n\nhello", stream)
    assert found["reasoning"].strip() == "hm 😀 hm"
    assert found["content"].strip() == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_is_no_call(tools: Running, stream: bool) -> None:
    length = len(MADE.encode(CALL).ids) - 25
    found = ask(tools, CALL, stream, tools=TOOLS, max_tokens=length)
    assert found["finish"] == "length"
    for _, arguments in found["calls"]:
        with pytest.raises(ValueError):
            json.loads(arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_logprobs_go_on_working(tools: Running, stream: bool) -> None:
    found = ask(tools, "one two three", stream, stop="two", tools=TOOLS)
    assert found["content"] == "one "
    assert found["finish"] == "stop"
    status, _, content = call(tools.url + "/v1/chat/completions", chat(logprobs=True))
    assert status == 200
    entries = content["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(e["bytes"]) for e in entries).decode() == "one two three"


def test_the_template_gets_tools_and_calls_of_the_past(tools: Running) -> None:
    tools.leader.script = lambda submit: [END]
    past = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [past], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    status, _, content = call(tools.url + "/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert status == 200, content
    prompt = MADE.decode(tools.leader.submits[0].tokens)
    assert '"name": "weather"' in prompt
    assert "sunny" in prompt


def test_a_forced_choice_without_a_parser_is_refused(service: Running) -> None:
    body = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}})
    status, _, content = call(service.url + "/v1/chat/completions", body)
    assert status == 400
    assert content["error"]["code"] == "unsupported"
    assert call(service.url + "/v1/chat/completions", chat(tools=TOOLS, max_tokens=1))[0] == 200
