"""From `response_format`, `tools` and `tool_choice` to the grammar that the sampling rank holds an answer to."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from closeranks.codec.dialects import dialect_of
from closeranks.gateway.errors import Invalid, shown
from closeranks.gateway.openai import ChatRequest, Common, NamedTool, ResponseFormat, Tool
from closeranks.gateway.schemas import Cleaner, SchemaError, TooBig
from closeranks.gateway.tags import MAX_CALLS, Format, Function, Spelling, check_name, json_value, one_of, sequence

MAX_GRAMMAR = 512 * 1024
"""Characters of a grammar."""
FALLBACK = "v4"
"""How calls are written where they are forced and no parser was named."""


@dataclass(frozen=True, slots=True)
class Guide:
    """`grammar`: as in `protocol.Sampling`. `must`: what an answer that ended by itself has; without, it failed."""

    grammar: str
    must: Literal["", "call", "text"]


def guide(
    asked: Common,
    tools: list[Tool],
    dialect: str,
    parses: bool,
    added: Mapping[str, int] | None = None,
    thinking: bool = False,
) -> Guide | None:
    """The grammar of a request; None: it may say anything.

    Args:
        tools: those that the model is shown.
        dialect: of the decoder; empty: none.
        parses: a tool-call parser was named: the model writes this dialect of itself.
        added: the tokenizer's added tokens, text to id.
        thinking: the prompt opened a reasoning part.

    Raises:
        Invalid: a schema cannot be enforced, or is too large.
    """
    spelling = Spelling(dialect_of(dialect or FALLBACK), added or {}, parses)
    choice = asked.tool_choice if isinstance(asked, ChatRequest) else None
    forced = bool(tools) and (choice == "required" or isinstance(choice, NamedTool))
    parallel = not isinstance(asked, ChatRequest) or asked.parallel_tool_calls is not False
    cleaner = Cleaner()
    value = None if forced else _value(asked.response_format, cleaner)
    must: Literal["", "call", "text"]
    if forced:
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name][:1]
        functions = _functions(tools, cleaner)
        most = 1 if isinstance(choice, NamedTool) or not parallel else MAX_CALLS
        made, must = _spelled(spelling.forced, functions, most), "call"
    elif tools and parses:
        try:
            functions = _functions(tools, cleaner)
        except Invalid as error:
            if error.code == "schema_too_large" and value is None and not any(t.function.strict for t in tools):
                return None  # nobody asked for it
            raise
        most = MAX_CALLS if parallel else 1
        if value is not None:
            made, must = one_of([value, _spelled(spelling.forced, functions, most)]), "text"
        else:
            if asked.ignore_eos:
                return None
            made, must = _spelled(spelling.auto, functions, most), ""
    elif value is not None:
        made, must = value, "text"
    else:
        return None
    if asked.ignore_eos:
        raise Invalid("ignore_eos with a forced form: the answer would have no end", param="ignore_eos")
    if thinking and must:
        made = spelling.after_thought(sequence({"type": "regex", "pattern": "\n{0,2}"}, made) if value else made)
    text = json.dumps({"type": "structural_tag", "format": made}, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_GRAMMAR:
        said = f"the schemas make a grammar of {len(text)} characters; at most {MAX_GRAMMAR} are allowed"
        raise Invalid(said, param="tools" if tools else "response_format", code="schema_too_large")
    return Guide(f"structural_tag:{text}", must)


def _value(asked: ResponseFormat | None, cleaner: Cleaner) -> Format | None:
    """The form of an answer that is JSON."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_value({"type": "object"})
    if asked.type != "json_schema":
        said = f"response_format {shown(asked.type)} is not supported; text, json_object and json_schema are"
        raise Invalid(said, param="response_format", code="unsupported")
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise Invalid("response_format json_schema without a schema", param="response_format.json_schema.schema")
    param = "response_format.json_schema.schema"
    try:
        return json_value(cleaner.clean(asked.json_schema.schema, strict=True))
    except SchemaError as error:
        raise Invalid(str(error), param=param, code=_code(error)) from error


def _functions(tools: list[Tool], cleaner: Cleaner) -> list[Function]:
    """The tools with clean schemas. Those of strict tools are enforced or refused, others enforced where possible."""
    found = []
    for i, tool in enumerate(tools):
        given = tool.function.parameters
        try:
            check_name(tool.function.name)
            schema = cleaner.clean({"properties": {}} if given is None else given, tool.function.strict is True)
            if "$ref" in schema:
                schema = {**schema["$defs"][schema["$ref"].rpartition("/")[2]], "$defs": schema["$defs"]}
            if schema.get("type") != "object":
                if tool.function.strict:
                    raise SchemaError("the parameters of a strict tool must be of type object")
                schema = {"type": "object"}
        except SchemaError as error:
            raise Invalid(str(error), param=f"tools[{i}].function.parameters", code=_code(error)) from error
        found.append(Function(tool.function.name, schema))
    return found


def _spelled(spell: Callable[[list[Function], int], Format], functions: list[Function], most: int) -> Format:
    try:
        return spell(functions, most)
    except SchemaError as error:
        raise Invalid(str(error), param="tools", code=_code(error)) from error


def _code(error: SchemaError) -> str:
    return "schema_too_large" if isinstance(error, TooBig) else "unsupported"
