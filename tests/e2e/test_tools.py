"""Tools and JSON with the default model, which was trained for neither: the grammar alone makes its answers valid."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.service import Served, serve

pytestmark = pytest.mark.slow

TEXT = {"type": "string", "maxLength": 12}
LINE = {
    "type": "object",
    "properties": {"sku": TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["sku", "count"],
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"city": TEXT},
    "enum": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "level": {"enum": [1, 2, 3]}},
    "integer": {"count": {"type": "integer", "minimum": 1, "maximum": 500}},
    "number": {"share": {"type": "number", "minimum": 0, "maximum": 1}},
    "boolean": {"on": {"type": "boolean"}, "off": {"type": ["boolean", "null"]}},
    "array": {"tags": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}},
    "nested": {"address": {"type": "object", "properties": {"zip": TEXT, "at": LINE}, "required": ["zip", "at"]}},
    "objects": {"lines": {"type": "array", "items": LINE, "minItems": 1, "maxItems": 2}},
    "pattern": {
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "day": {"type": "string", "format": "date"},
    },
    "union": {"value": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]}},
}


def schema_of(name: str) -> dict[str, Any]:
    properties = SCHEMAS[name]
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"take_{name}", "parameters": schema_of(name), "strict": True}}


@pytest.fixture(scope="module")
def service() -> Iterator[Served]:
    with serve("") as served:
        yield served


@pytest.fixture
def client(service: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0, timeout=500)


def valid(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid, for the keywords used here."""
    import re

    if "anyOf" in schema:
        return any(valid(branch, value) for branch in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
                             "object": dict, "null": type(None)}  # fmt: skip
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[k]) and (isinstance(value, bool) <= (k == "boolean")) for k in types):
        return False
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 99) and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, int | float):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if isinstance(value, list):
        size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 99)
        return size and all(valid(schema["items"], item) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        inside = set(schema["required"]) <= set(value) <= set(known)
        return inside and all(valid(known[name], part) for name, part in value.items())
    return True


def gathered(stream: Any) -> tuple[list[tuple[str, str]], str, str | None]:
    """Calls, content and finish reason of a stream, put together as clients do."""
    calls: list[tuple[str, str]] = []
    content, finish = "", None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.index == len(calls):
                    calls.append((piece.function.name, ""))
                else:
                    calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.function.arguments)
            finish = choice.finish_reason or finish
    return calls, content, finish


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_required_tool_is_called_with_valid_arguments(client: openai.OpenAI, name: str) -> None:
    asked: Any = {
        "model": "default",
        "messages": [{"role": "user", "content": f"Use the tool {name}."}],
        "tools": [tool(name)],
        "tool_choice": "required",
        "seed": 7,
    }
    stream = len(name) % 2 == 1
    if stream:
        calls, content, finish = gathered(client.chat.completions.create(**asked, stream=True))
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        content, finish = choice.message.content or "", choice.finish_reason
    assert finish == "tool_calls"
    assert not content
    assert [called for called, _ in calls] == [f"take_{name}"]
    assert valid(schema_of(name), json.loads(calls[0][1])), calls


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_in_json_is_valid(client: openai.OpenAI, name: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": schema_of(name), "strict": True}}
    messages: Any = [{"role": "user", "content": f"Invent an example of {name}. Answer in JSON."}]
    asked: Any = {"model": "default", "messages": messages, "response_format": form, "seed": 7}
    if len(name) % 2:
        _, content, finish = gathered(client.chat.completions.create(**asked, stream=True))
    else:
        choice = client.chat.completions.create(**asked).choices[0]
        content, finish = choice.message.content or "", choice.finish_reason
    assert finish == "stop"
    assert valid(schema_of(name), json.loads(content)), content


def test_a_tool_loop(client: openai.OpenAI) -> None:
    tools: Any = [tool("text"), tool("integer")]
    messages: Any = [{"role": "user", "content": "How many people live in Paris?"}]
    named: Any = {"type": "function", "function": {"name": "take_integer"}}
    first = client.chat.completions.create(
        model="default", messages=messages, tools=tools, tool_choice=named, temperature=0
    )
    (made,) = first.choices[0].message.tool_calls or ()
    assert made.function.name == "take_integer"
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "2 million"}]
    last = client.chat.completions.create(model="default", messages=messages, tools=tools, max_tokens=30)
    assert last.choices[0].message.content
    assert last.choices[0].finish_reason in ("stop", "length")


def test_what_cannot_be_enforced_is_refused_and_nothing_is_left(client: openai.OpenAI, service: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
        client.chat.completions.create(model="default", messages=messages, response_format=form)
    service.assert_no_residue()
    service.assert_undisturbed()


def test_the_example_of_the_documentation(service: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", service.url)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/tools.md", "exec"), names)  # noqa: S102
    assert names["arguments"]["unit"] in ("celsius", "fahrenheit")
    assert capsys.readouterr().out.strip()
