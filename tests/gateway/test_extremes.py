"""What is too large, too deep, or named like what it is handed to: a refusal that names the field, never a failure."""

import asyncio
import inspect
import json
import time
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import prometheus_client
import pytest
import structlog
from starlette.requests import Request

from closeranks.codec.template import TemplateEncoder
from closeranks.gateway import app, openai
from closeranks.gateway import chat as chats
from closeranks.gateway.errors import Invalid

from .client import call, chat
from .conftest import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def numbers(kind: type[openai.Common]) -> list[str]:
    """Fields of a request that hold a number."""
    annotations = get_type_hints(kind)
    return [name for name, hint in annotations.items() if {int, float} & set(get_args(hint))]


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("digits", [20, 310, 4300, 5000])
@pytest.mark.parametrize(("path", "kind"), [(CHAT, openai.ChatRequest), (COMPLETIONS, openai.CompletionRequest)])
def test_numbers_of_any_length(service: Running, path: str, kind: type[openai.Common], digits: int, sign: str) -> None:
    own = '"messages":[{"role":"user","content":"hi"}],"logprobs":true' if path == CHAT else '"prompt":"hi"'
    names = [name for name in numbers(kind) if name != "logprobs" or path != CHAT]
    assert {"seed", "n", "max_tokens", "top_k", "temperature"} < set(names)
    for name in names:
        status, _, content = call(service.url + path, f'{{{own},"{name}":{sign}1{"0" * digits}}}'.encode())
        assert status == 400, (name, content)
        assert content["error"]["param"] == name or digits > 4300
        assert len(content["error"]["message"]) < 300
    assert not service.leader.submits


@pytest.mark.parametrize("digits", [20, 310, 4300, 5000])
def test_numbers_of_any_length_inside_of_what_is_given(service: Running, digits: int) -> None:
    """In lists of tokens, in schemas, in variables: refused or left out, never a failure."""
    huge = "1" + "0" * digits
    schema = '{"type":"object","properties":{"a":{"type":"integer","%s":%s}}}'
    for path, body in (
        (COMPLETIONS, f'{{"prompt":[{huge}]}}'),
        (COMPLETIONS, f'{{"prompt":"a","stop_token_ids":[{huge}]}}'),
        ("/detokenize", f'{{"tokens":[-{huge}]}}'),
        *(
            (
                COMPLETIONS,
                f'{{"prompt":"a","response_format":{{"type":"json_schema","json_schema":{{"schema":{made}}}}}}}',
            )
            for made in (schema % ("minimum", huge), schema % ("maxLength", huge), schema % ("type", huge))
        ),
    ):
        status, _, content = call(service.url + path, body.encode())
        assert status in (200, 400), (path, content)
        assert status == 200 or len(content["error"]["message"]) < 500


def nested(depth: int, open: str = "[", close: str = "]", inner: str = "1") -> str:
    return open * depth + inner + close * depth


PARAMETERS = "tools[0].function.parameters"
SCHEMA = "response_format.json_schema.schema"
TOOLS = '"tools":[{"type":"function","function":{"name":"f","parameters":{"a":%s}}}]'
ENUM = '"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"enum":[%s]}}}}}]'
PAST = '"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"%s"}}]}]'
FORM = '"response_format":{"type":"json_schema","json_schema":{"schema":{"const":%s}}}'


@pytest.mark.parametrize("depth", [openai.MAX_NESTING - 8, openai.MAX_NESTING + 8, 200, 300, 400, 480, 700, 950])
@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        (CHAT, '"chat_template_kwargs":{"a":%s}', "chat_template_kwargs"),
        (CHAT, TOOLS, PARAMETERS),
        (CHAT, TOOLS + ',"tool_choice":"required"', PARAMETERS),
        (CHAT, ENUM + ',"tool_choice":"required"', PARAMETERS),
        (CHAT, PAST, "messages[0].tool_calls[0].function.arguments"),
        (CHAT, FORM, SCHEMA),
        (COMPLETIONS, '"prompt":"a",' + FORM, SCHEMA),
        ("/tokenize", TOOLS, PARAMETERS),
        ("/tokenize", PAST, "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_nesting(service: Running, path: str, field: str, param: str, depth: int) -> None:
    own = "" if "messages" in field or "prompt" in field else '"messages":[{"role":"user","content":"hi"}],'
    limit = "" if path == "/tokenize" else ',"max_tokens":2'
    status, _, content = call(service.url + path, f"{{{own}{field % nested(depth)}{limit}}}".encode())
    if depth > openai.MAX_NESTING:
        assert status == 400, content
        assert content["error"]["param"] == param or content["error"]["code"] == "invalid_json"
        assert "nested too deeply" in content["error"]["message"]
    else:
        assert status in (200, 400), content
        assert status == 200 or "nested" not in content["error"]["message"]


def test_objects_nest_as_lists_do(service: Running) -> None:
    inner = nested(openai.MAX_NESTING, '{"a":', "}")
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],"max_tokens":2,"chat_template_kwargs":{{"a":{inner}}}}}'
    status, _, content = call(service.url + CHAT, body.encode())
    assert (status, content["error"]["param"]) == (400, "chat_template_kwargs")


def test_brackets_that_are_no_nesting_are_taken(service: Running) -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in ("[[" * 100, json.dumps({"a": "[" * 200}))]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}]
    status, _, content = call(service.url + "/tokenize", {"messages": messages})
    assert status == 200, content


@pytest.mark.parametrize("value", [1, None, [1], {"a": 1}, "x"])
def test_variables_of_the_template_have_any_name(service: Running, value: Any) -> None:
    """Those that are taken are refused by name; no other is mistaken for a parameter of whoever renders."""
    names = inspect.signature(TemplateEncoder.encode).parameters.keys() | {"declared", "model", "given", "variables"}
    names |= {"effort", "loop", "range", "namespace", "context", "__class__", "", "a b", "bos_token", "raise_exception"}
    for name in sorted(names):
        status, _, content = call(service.url + CHAT, chat(max_tokens=1, chat_template_kwargs={name: value}))
        assert status in (200, 400), (name, content)
        if name in ("self", "messages", "tools"):
            assert content["error"]["param"] == f"chat_template_kwargs.{name}"


def test_effort_among_the_variables_counts() -> None:
    template = TemplateEncoder("{{ reasoning_effort }}/{{ thinking }}/{{ enable_thinking }}")
    model: Any = SimpleNamespace(encoder=template, shows_tools=True)

    def prompt(effort: str | None = None, **variables: Any) -> str:
        return chats.render(model, [openai.Message("user", "hi")], None, variables, effort).text

    assert prompt(reasoning_effort="high") == prompt("high") == "high/True/True"
    assert prompt("low", reasoning_effort="high") == "low/True/True"
    assert prompt(reasoning_effort=None) == "/False/False"
    assert prompt("high", thinking=False) == "high/False/False"
    assert prompt("high", enable_thinking=False) == "high/False/False"
    with pytest.raises(Invalid) as refused:
        prompt(reasoning_effort=5)
    assert refused.value.param == "chat_template_kwargs.reasoning_effort"


def test_a_failure_of_the_gateway_is_one_line_of_its_log_and_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a request makes it stumble over: the client is told, and the log holds nothing of the request."""

    async def handler(*_: object) -> Any:
        def deep(value: object) -> Any:
            raise RecursionError("my-secret-prompt") if value == 900 else sorted([value + 1], key=deep)

        return deep(0)

    lines: list[dict[str, Any]] = []
    logger = structlog.wrap_logger(None, processors=[lambda *given: lines.append(given[2]) or ""])
    monkeypatch.setattr(app, "log", logger)
    http = prometheus_client.Counter("http", "", ["endpoint", "status"], registry=None)
    gateway: Any = SimpleNamespace(clock=time.monotonic, metrics=SimpleNamespace(http=http))
    request = Request({"type": "http", "headers": [(b"x-request-id", b"the-id")], "state": {"read": True}})
    response = asyncio.run(app._handle(gateway, handler, CHAT, "", request))
    assert (response.status_code, response.headers["x-request-id"]) == (500, "the-id")
    assert json.loads(response.body)["error"]["code"] == "internal_error"
    (line,) = lines
    assert line["rid"] == "the-id"
    assert "secret" not in str(line)
    assert len(str(line)) < 3000
    assert "\n" not in str(line)
