"""What an answer may look like, as one of xgrammar's structural tags: plain JSON values, made without xgrammar.

A model that is trained on a dialect (`trained`: its parser was named) gets what it was trained on: strings as raw text,
several calls. Any other does not know how a raw value ends, so its strings are JSON, which it knows, and it makes one
call; the markup around is forced on it either way. Where the tokenizer has the dialect's markers as added tokens
(`added`), only these are markup, to the grammar as to the decoder.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from closeranks.codec.dialects import Dialect
from closeranks.gateway.schemas import Schema, SchemaError, bounded

Format = dict[str, Any]

MAX_CALLS = 16
"""Calls in one block, so that a weak model ends it."""
MAX_SPACE = 24
"""White space in a row between the parts of a JSON value, for the same reason."""
_NAME = re.compile(r"[^\x00-\x1f\"<>&\\｜]{1,256}\Z")
_NOT_TEXT: list[Schema] = [{"type": kind} for kind in ("number", "boolean", "null", "array", "object")]


@dataclass(frozen=True, slots=True)
class Function:
    """A tool on offer. `schema`: cleaned, of an object."""

    name: str
    schema: Schema


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def one_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def repeat(format: Format, most: int) -> Format:
    return format if most == 1 else {"type": "repeat", "min": 1, "max": most, "content": format}


def json_value(schema: Schema, excludes: Iterable[str] = (), space: int = MAX_SPACE) -> Format:
    """A JSON value. `excludes`: what its strings may not contain; lengths are kept instead where there are any."""
    made: Format = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": space}
    if excludes and not _has(schema, "minLength") and not _has(schema, "maxLength"):
        made["excludes"] = list(excludes)
    return made


class Spelling:
    """Calls of one dialect, for one model. `added`: its added tokens, text to id."""

    def __init__(self, dialect: Dialect, added: Mapping[str, int], trained: bool) -> None:
        self._trained = trained
        self._space = MAX_SPACE if trained else 1
        self._dialect = dialect
        own = [dialect.sentinel] if dialect.sentinel else [f"<{dialect.invoke}>", f"</{dialect.invoke}>"]
        self._tokens = {marker: added[marker] for marker in own if marker in added}
        self._thought_end = added.get(dialect.think_close)
        self._lead = "｜DSML｜" if dialect.sentinel else ""
        # in a value these end it, or the call
        self._ends = [f"</{dialect.sentinel}", f"<{dialect.sentinel}"] if dialect.sentinel else own

    def forced(self, functions: list[Function], most: int) -> Format:
        """Nothing but 1 to `most` calls."""
        if not self._trained:
            functions, most = [Function(f.name, bounded(f.schema)) for f in functions], 1
        if self._dialect.sentinel:
            return sequence(const("\n\n"), *self._marked("<" + self._lead), *self._block(functions, most))
        call = sequence(*self._marked(f"<{self._dialect.invoke}>"), self._envelope(functions))
        more = sequence(const("\n"), call)
        return call if most == 1 else sequence(call, {"type": "repeat", "min": 0, "max": most - 1, "content": more})

    def auto(self, functions: list[Function], most: int) -> Format:
        """Any text, in which a call that is begun is a call that is whole."""
        if self._dialect.sentinel:  # the turn ends with its block
            trigger, rest, loop = "<" + self._lead, sequence(*self._block(functions, most)), False
        else:
            trigger, rest, loop = f"<{self._dialect.invoke}>", self._envelope(functions), most > 1
        if self._tokens:
            return {"type": "token_dispatch", "rules": [[next(iter(self._tokens.values())), rest]], "loop": loop}
        return {"type": "dispatch", "rules": [[trigger, rest]], "loop": loop}

    def after_thought(self, format: Format) -> Format:
        """The same behind the end of a reasoning part that the prompt has opened."""
        close = self._dialect.think_close
        token = self._thought_end
        end = const(close) if token is None else {"type": "token", "token": token}
        return sequence({"type": "any_text", "excludes": [close]}, end, format)

    # ---- DSML

    def _block(self, functions: list[Function], most: int) -> list[Format]:
        """A block behind its opening sentinel."""
        d = self._dialect
        invokes = [sequence(*self._invoke(function)) for function in functions]
        close = self._marked(f"</{self._lead}{d.gap}{d.wrapper}>")
        return [const(f"{d.gap}{d.wrapper}>\n"), repeat(one_of(invokes), most), *close]

    def _invoke(self, function: Function) -> list[Format]:
        d = self._dialect
        made = self._marked(f'<{self._lead}{d.gap}{d.invoke} name="{function.name}">\n')
        properties = function.schema.get("properties")
        if properties is None:
            any_name: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
            some = self._parameter(any_name, {}, {})
            made.append({"type": "star", "content": some})
        required = function.schema.get("required", [])
        for name, schema in (properties or {}).items():
            if not _NAME.match(name):
                raise SchemaError(f"{function.name}.{name[:80]!r}: this name cannot be written as a parameter's")
            parameter = self._parameter(const(name), schema, function.schema.get("$defs", {}))
            made.append(parameter if name in required else {"type": "optional", "content": parameter})
        return [*made, *self._marked(f"</{self._lead}{d.gap}{d.invoke}>\n")]

    def _parameter(self, name: Format, schema: Schema, defs: Schema) -> Format:
        """One parameter and its newline: raw text where the value is a string, JSON elsewhere."""
        d = self._dialect
        texts: list[Format] = []
        others: list[Schema] = []
        self._sort(schema, defs, texts, others, set())
        close = self._marked(f"</{self._lead}{d.gap}{d.parameter}>\n")
        ways = []
        if texts:
            ways.append(sequence(const('" string="true">'), one_of(texts), *close))
        if others:
            value = others[0] if len(others) == 1 else {"anyOf": others}
            whole = {**value, "$defs": defs} if defs and _has(value, "$ref") else value
            ways.append(sequence(const('" string="false">'), json_value(whole, self._ends, self._space), *close))
        if not ways:
            raise SchemaError("a parameter that is nothing but itself")
        return sequence(*self._marked(f'<{self._lead}{d.gap}{d.parameter} name="'), name, one_of(ways))

    def _sort(self, schema: Schema, defs: Schema, texts: list[Format], others: list[Schema], seen: set[str]) -> None:
        """What a parameter may be: as raw text, and as JSON."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                self._sort(defs[name], defs, texts, others, seen | {name})
        elif "anyOf" in schema:
            for branch in schema["anyOf"]:
                self._sort(branch, defs, texts, others, seen)
        elif "enum" in schema:
            raw = [v for v in schema["enum"] if isinstance(v, str) and not any(end in v for end in self._ends)]
            texts += [const(value) for value in raw]
            if rest := [value for value in schema["enum"] if value not in raw or isinstance(value, bool)]:
                others.append({"enum": rest})
        elif not schema:
            if self._trained:
                texts.append(self._text({}))
            others += _NOT_TEXT if self._trained else [{}]
        elif self._trained and schema.get("type") == "string" and "pattern" not in schema and "format" not in schema:
            texts.append(self._text(schema))
        else:
            others.append(schema)

    def _text(self, schema: Schema) -> Format:
        """Raw text of a length. What it must at least hold has no `<`: that keeps the two parts apart."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        rest: Format = {"type": "any_text", "excludes": self._ends}
        if most is not None:
            rest["max_chars"] = most - least
        if not least:
            return rest
        head: Format = {"type": "grammar", "grammar": f"root ::= [^<]{{{least},{least}}}\n"}
        return head if most == least else sequence(head, rest)

    # ---- Hermes

    def _envelope(self, functions: list[Function]) -> Format:
        """A call behind its opening tag."""
        calls = []
        for function in functions:
            head = const(f'\n{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
            tail = [const("}\n"), *self._marked(f"</{self._dialect.invoke}>")]
            calls.append(sequence(head, json_value(function.schema, self._ends, self._space), *tail))
        return one_of(calls)

    def _marked(self, text: str) -> list[Format]:
        """A fixed text, in which the markers that are tokens can come as such only."""
        if not self._tokens:
            return [const(text)]
        parts = re.split("(" + "|".join(map(re.escape, self._tokens)) + ")", text)
        return [{"type": "token", "token": self._tokens[p]} if p in self._tokens else const(p) for p in parts if p]


def check_name(name: str) -> None:
    """Raises SchemaError for a tool's name that cannot be written in a tag."""
    if not _NAME.match(name):
        raise SchemaError(f"{name[:80]!r}: a tool's name has no quotes, backslashes, angle brackets or controls")


def _has(schema: Any, key: str) -> bool:
    """Whether a keyword occurs anywhere in a cleaned schema (a property of that name counts: it costs nothing)."""
    if isinstance(schema, Mapping):
        return key in schema or any(_has(part, key) for part in schema.values())
    return isinstance(schema, list) and any(_has(part, key) for part in schema)
