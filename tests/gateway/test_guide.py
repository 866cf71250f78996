"""Grammars of requests, compiled by the engine's own library: what they admit is what the codec reads as calls."""

import json
from typing import Any

import pytest

from closeranks.codec import Decoder, assemble
from closeranks.gateway import openai
from closeranks.gateway.errors import Invalid
from closeranks.gateway.guide import Guide, guide
from closeranks.gateway.schemas import MAX_DEPTH, Cleaner, SchemaError, TooBig

xgrammar = pytest.importorskip("xgrammar")

MARKERS = ["｜DSML｜", "<tool_call>", "</tool_call>", "</think>"]
WORDS = ["</s>", *MARKERS, "\n", *map(chr, range(32, 127)), "｜", "DSML"]
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(WORDS, stop_token_ids=[0]), max_threads=1)
DIALECTS = ("v32", "v4", "v41", "hermes")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["c", "f"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 3},
        "note": {"type": ["string", "null"], "maxLength": 5},
    },
    "required": ["city", "days"],
    "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
GOOD: list[dict[str, Any]] = [
    {"city": "Rom", "days": 3},
    {"city": "x < y & z", "days": 14, "unit": "f", "near": [{"lat": -1.5}], "note": "ab"},
    {"city": "", "days": 1, "note": None},
]
BAD: list[dict[str, Any]] = [
    {"city": "Rom"},
    {"city": "Rom", "days": 15},
    {"city": "Rom", "days": 3, "unit": "k"},
    {"city": "Rom", "days": 3, "near": [{}]},
    {"city": "Rom", "days": 3, "note": "too long"},
    {"city": 3, "days": 3},
]


def asked(**more: Any) -> openai.ChatRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **more}
    return openai.parse(json.dumps(body).encode(), openai.ChatRequest)


def guided(dialect: str, request: openai.ChatRequest, parses: bool = True, **more: Any) -> Guide:
    made = guide(request, request.tools or [], dialect, parses, **more)
    assert made is not None
    return made


def admits(made: Guide, text: str, whole: bool = True) -> bool:
    """Whether the grammar admits a text, fed with markers as tokens where they are such; `whole`: and then the end."""
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(made.grammar.partition(":")[2]))
    return bool(matcher.accept_string(text)) and (not whole or bool(matcher.accept_token(0)))


def spelled(dialect: str, calls: list[dict[str, Any]], raw: bool = True) -> str:
    """Calls of `weather`, as the dialect's templates write them."""
    if dialect == "hermes":
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': call})}\n</tool_call>" for call in calls
        )
    gap, wrapper = {"v32": ("", "function_calls"), "v4": ("", "tool_calls"), "v41": (" ", "calls")}[dialect]
    lines = [f"<｜DSML｜{gap}{wrapper}>"]
    for call in calls:
        lines.append(f'<｜DSML｜{gap}invoke name="weather">')
        for name, value in call.items():
            text = isinstance(value, str) and (raw or name == "unit")
            shown = value if text else json.dumps(value)
            attribute = "true" if text else "false"
            lines.append(f'<｜DSML｜{gap}parameter name="{name}" string="{attribute}">{shown}</｜DSML｜{gap}parameter>')
        lines.append(f"</｜DSML｜{gap}invoke>")
    return "\n".join(["\n", *lines, f"</｜DSML｜{gap}{wrapper}>"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("trained", [True, False])
def test_forced_calls_are_whole_and_valid(dialect: str, trained: bool) -> None:
    made = guided(dialect, asked(tool_choice="required"), trained)
    assert made.must == "call"
    for call in GOOD:
        text = spelled(dialect, [call], raw=trained)
        assert admits(made, text), text
        decoder = Decoder(dialect, tools=["weather"])
        turn = assemble([*decoder.feed(text), *decoder.close()])
        assert [json.loads(found.arguments) for found in turn.tool_calls] == [call]
        assert not turn.content
        assert not turn.discarded
    for call in BAD:
        assert not admits(made, spelled(dialect, [call], raw=trained)), call
    for text in ("", "I will call it.", spelled(dialect, [GOOD[0]], trained)[:-3]):
        assert not admits(made, text)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_several_calls_and_one(dialect: str) -> None:
    two = spelled(dialect, GOOD[:2])
    assert admits(guided(dialect, asked(tool_choice="required")), two)
    assert not admits(guided(dialect, asked(tool_choice="required", parallel_tool_calls=False)), two)
    named = {"type": "function", "function": {"name": "time"}}
    made = guided(dialect, asked(tool_choice=named))
    assert not admits(made, two)
    assert not admits(made, spelled(dialect, GOOD[:1]))
    assert admits(made, spelled(dialect, GOOD[:1]).replace("weather", "time"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_auto_takes_hold_at_the_opener(dialect: str) -> None:
    made = guided(dialect, asked())
    assert made.must == ""
    assert admits(made, "Just text, a < b, <b>.")
    assert admits(made, "Let me see." + spelled(dialect, GOOD[:1]))
    begun = spelled(dialect, GOOD[:1])
    assert not admits(made, begun[:-1])
    assert not admits(made, begun.replace("weather", "nothing"), whole=False)
    assert not admits(made, begun.replace("days", "daze"), whole=False)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_markers_that_are_tokens_come_as_tokens(dialect: str) -> None:
    made = guided(dialect, asked(tool_choice="required"), added={marker: WORDS.index(marker) for marker in MARKERS})
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(made.grammar.partition(":")[2]))
    marker = "<tool_call>" if dialect == "hermes" else "｜DSML｜"
    before = "" if dialect == "hermes" else "\n\n<"
    assert not before or matcher.accept_string(before)
    assert not matcher.fork().accept_string(marker)
    assert matcher.accept_token(WORDS.index(marker))
    auto = guided(dialect, asked(), added={marker: WORDS.index(marker) for marker in MARKERS})
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(auto.grammar.partition(":")[2]))
    for character in f"the marker {marker} spelled is a quotation <".replace("DSML", "D S M L"):
        assert matcher.accept_token(WORDS.index(character))
    assert matcher.fork().accept_token(0)
    assert matcher.accept_token(WORDS.index(marker))
    assert not matcher.accept_token(0)


def test_reasoning_comes_first() -> None:
    made = guided("v4", asked(tool_choice="required"), thinking=True)
    assert admits(made, "hm hm</think>" + spelled("v4", GOOD[:1]))
    assert not admits(made, "hm hm")
    form = {"type": "json_object"}
    assert admits(guided("v4", asked(tools=None, response_format=form), thinking=True), 'hm</think>\n\n{"a": 1}')


def test_json_or_a_call() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    made = guided("v4", asked(response_format=form))
    assert admits(made, json.dumps(GOOD[1]))
    assert admits(made, spelled("v4", GOOD[:1]))
    assert not admits(made, "text")
    assert not admits(made, json.dumps(BAD[0]))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {}}, "`not`"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "a: `uniqueItems`"),
        ({"type": "strings"}, "strings"),
        ({"$ref": "http://x/y"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "without end"),
        ({"type": "string", "pattern": "(?=a)b"}, "looks ahead"),
        ({"type": "string", "pattern": "a*+a"}, "without giving back"),
        ({"type": "string", "pattern": "x|(b{2}+c)*"}, "without giving back"),
        ({"type": "string", "pattern": "a{5000}"}, "128"),
        ({"type": "string", "pattern": "("}, "regular"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "bounds"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0}, "bounds"),
        ({"type": "string", "pattern": "a{,3}"}, "cannot be enforced"),
        ({"type": "array", "items": False, "minItems": 1}, "room"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "above"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"anyOf": [{}], "type": "object", "properties": {}}, "beside"),
        ({"enum": []}, "empty"),
        ({"type": "string", "enum": [1]}, "no value"),
        ({"type": "object", "properties": []}, "object"),
        ({"type": "object", "required": "a"}, "list"),
        ("x", "expected an object"),
    ],
)
def test_refused_or_left_out(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Cleaner().clean(schema, strict=True)
    assert text in str(caught.value)
    Cleaner().clean(schema, strict=False)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "minItems": 2}, "[1, {}]", "[1]"),
        ({"type": "array", "items": False}, "[]", "[1]"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {}], "maxItems": 1}, "[1]", '["a"]'),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}}, "[1, null]", "[1, 2]"),
        ({"type": "object"}, '{"a": [{}]}', "[]"),
        ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2.5}, "2", "3"),
        ({"const": {"a": 1}}, '{"a":1}', '{"a":2}'),
        ({"type": ["integer", "null"], "enum": [1, "x", None]}, "null", '"x"'),
    ],
)
def test_what_is_enforced(schema: dict[str, Any], good: str, bad: str) -> None:
    made = guided("v4", asked(tools=None, response_format={"type": "json_schema", "json_schema": {"schema": schema}}))
    assert admits(made, good)
    assert not admits(made, bad)


def test_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}
    for schema in (deep, wide, {"enum": ["x" * 200_000]}, {"enum": list(range(5000))}):
        with pytest.raises(TooBig):
            Cleaner().clean(schema, strict=False)
    tools = [{"type": "function", "function": {"name": "f", "parameters": wide}}]
    with pytest.raises(Invalid) as caught:
        guided("v4", asked(tools=tools, tool_choice="required"))
    assert caught.value.code == "schema_too_large"
    request = asked(tools=tools)
    assert guide(request, request.tools or [], "v4", True) is None
