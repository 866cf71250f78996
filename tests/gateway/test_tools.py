"""Tool calls and reasoning, from sampled tokens to OpenAI's deltas."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from closeranks.gateway.chat import render
from closeranks.gateway.model import load
from closeranks.gateway.openai import Message, Tool

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


TEMPLATE_WITHOUT_TOOLS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"


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


BLOCK = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="time">\n'
    '<｜DSML｜parameter name="city" string="false">"Köln"</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_forced_choice_without_a_parser_makes_calls(service: Running, stream: bool, choice: Any) -> None:
    found = ask(service, BLOCK, stream, tools=TOOLS, tool_choice=choice)
    assert found == {"content": "", "reasoning": "", "calls": [("time", '{"city": "Köln"}')], "finish": "tool_calls"}
    sampling = service.leader.submits[-1].sampling
    assert sampling.grammar.startswith("structural_tag:{")
    assert sampling.stop_ids == (END,)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_its_form_is_an_error_for_its_request_alone(service: Running, stream: bool) -> None:
    for more in ({"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.APIError, match="form"):
            ask(service, "", stream, **more)
    assert ask(service, "fine", stream)["content"] == "fine"


def test_without_a_parser_tools_alone_change_nothing(service: Running) -> None:
    found = ask(service, "text", False, tools=TOOLS)
    assert found["content"] == "text"
    assert not service.leader.submits[-1].sampling.grammar


def test_an_answer_in_json_is_held_to_its_schema(service: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert ask(service, '{"a": 3}', True, response_format=form)["content"] == '{"a": 3}'
    assert '"properties":{"a":{"type":"integer"}}' in service.leader.submits[-1].sampling.grammar
    call(service.url + "/v1/completions", {"prompt": "x", "response_format": form, "max_tokens": 9})
    assert service.leader.submits[-1].sampling.grammar


def required(function: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", "no end"),
        (required({"name": 'a">b'}), "tools[0]", "name"),
        (
            required({"name": "f", "parameters": {"type": "array"}, "strict": True}),
            "tools[0].function.parameters",
            "object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "string"}}}}},
            "response_format.json_schema.schema", "`not` cannot be enforced",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(service: Running, more: Any, param: str, text: str) -> None:
    status, _, content = call(service.url + "/v1/chat/completions", chat(**more))
    assert status == 400, content
    assert content["error"]["param"].startswith(param)
    assert text in content["error"]["message"]
    assert not service.leader.submits


def test_a_template_without_tools_still_shows_them(tmp_path: Path) -> None:
    (tiny.write(tmp_path) / "chat_template.jinja").write_text(TEMPLATE_WITHOUT_TOOLS)
    model = load(tmp_path)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "time", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    messages = msgspec.convert(history, list[Message])
    shown = render(model, messages, msgspec.convert(TOOLS, list[Tool])).text
    assert shown.index('"name":"weather"') < shown.index("hi") < shown.index("time({})") < shown.index("noon")
