"""Through `closeranks guard` with the `openai` client: reasoning on and off, and calls that the model itself opens."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.service import Served, serve

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
COUNT = {"type": "integer", "minimum": 1, "maximum": 99}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "take_integer",
            "parameters": {"type": "object", "properties": {"count": COUNT}, "required": ["count"]},
        },
    }
]
# Calls as a model should not write them: without the grammar it would go on like this.
BAD_CALL = '<tool_call>\n{"name": "take_integer", "arguments": {"count": about %s}}\n</tool_call>'
EXAMPLES: Any = [
    message
    for asked, number in (("How many legs has a cat?", "four"), ("How many days has a week?", "seven"))
    for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": BAD_CALL % number})
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "chat_template.jinja"
    template.write_text(TEMPLATE)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "hermes")
    with serve("", "--disaggregation-mode", "null", *parsers, "--chat-template", str(template)) as served:
        yield served


@pytest.fixture(scope="module")
def guarded(service: Served) -> Iterator[str]:
    """URL of a guard before the service."""
    argv = [sys.executable, "-m", "closeranks.cli.main", "guard", service.url, "--port", "0", "--json"]
    with subprocess.Popen([*argv, "--tool-call-parser", "hermes"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["listening"])
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.fixture
def client(guarded: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{guarded}/v1", api_key="unused", max_retries=0, timeout=500)


def gathered(stream: Any) -> dict[str, Any]:
    """Reasoning, content, calls and finish reason of a stream, put together as clients do."""
    turn: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
    for chunk in stream:
        for choice in chunk.choices:
            turn["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            turn["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.index == len(turn["calls"]):
                    turn["calls"].append([piece.function.name, ""])
                turn["calls"][piece.index][1] += piece.function.arguments or ""
            turn["finish"] = choice.finish_reason or turn["finish"]
    return turn


def ask(client: openai.OpenAI, stream: bool, **more: Any) -> dict[str, Any]:
    asked: Any = {"model": "default", "temperature": 0, "max_tokens": 40, **more}
    if stream:
        return gathered(client.chat.completions.create(**asked, stream=True))
    choice = client.chat.completions.create(**asked).choices[0]
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return {
        "reasoning": reasoning,
        "content": choice.message.content or "",
        "calls": calls,
        "finish": choice.finish_reason,
    }


QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("stream", [True, False])
def test_without_thinking_all_is_content(client: openai.OpenAI, stream: bool) -> None:
    turn = ask(client, stream, messages=QUESTION)
    assert "Paris" in turn["content"]
    assert not turn["reasoning"]


@pytest.mark.parametrize("stream", [True, False])
def test_with_thinking_what_comes_first_is_reasoning(client: openai.OpenAI, stream: bool) -> None:
    turn = ask(client, stream, messages=QUESTION, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert turn["reasoning"].strip()
    assert "<think>" not in turn["reasoning"] + turn["content"]
    assert "</think>" not in turn["reasoning"] + turn["content"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_the_model_opens_is_held_to_its_schema(client: openai.OpenAI, stream: bool) -> None:
    messages = [*EXAMPLES, {"role": "user", "content": "How many fingers has a hand?"}]
    turn = ask(client, stream, messages=messages, tools=TOOLS, max_tokens=80)
    assert turn["finish"] == "tool_calls", turn
    for name, arguments in turn["calls"]:
        assert name == "take_integer"
        assert 1 <= json.loads(arguments)["count"] <= 99
    assert "tool_call" not in turn["content"]


def test_without_tools_the_same_is_no_call_and_no_markup(client: openai.OpenAI, service: Served) -> None:
    messages = [*EXAMPLES, {"role": "user", "content": "How many fingers has a hand?"}]
    turn = ask(client, True, messages=messages)
    assert not turn["calls"]
    assert "tool_call" not in turn["content"]
    service.assert_no_residue()
    service.assert_undisturbed()
