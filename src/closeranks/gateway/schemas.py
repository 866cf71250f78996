"""JSON schemas of clients, cut down to what the grammar engine enforces, and bounded.

The engine ignores keywords that it does not know, so a schema would be promised and not kept. `Cleaner` therefore
either refuses what is not enforced (`strict`), naming the place, or leaves it out, node by node, and the rest holds.
What bounds size, depth and repetition bounds the time that an engine compiles, for which the request waits.
"""

import math
import re
from collections.abc import Iterator, Mapping, Set
from re import _constants as re_constants  # type: ignore[attr-defined]
from re import _parser as re_parser  # type: ignore[attr-defined]
from typing import Any

from closeranks.gateway.errors import shown

Schema = dict[str, Any]

MAX_DEPTH = 32
MAX_NODES = 2000
MAX_ENUM = 1000
MAX_TEXT = 100_000
"""Characters of all names, values and patterns together."""
MAX_REPEAT = 10_000
MAX_PATTERN = 512
MAX_PATTERN_REPEAT = 128
MAX_NUMBER = 2.0**53

SHORT_TEXT = 256
SHORT_LIST = 8
SHORT_NUMBER = 10**15

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
FORMATS = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference"}
    | {"uri-template", "uuid", "json-pointer", "relative-json-pointer"}
)
"""Enforced ones. Any other `format` is an annotation, as JSON Schema has it."""
_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains"}
    | {"maxContains", "multipleOf", "unevaluatedItems", "unevaluatedProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "$dynamicRef", "$recursiveRef", "additionalItems", "uniqueItems"}
)
_BELONGS = {
    "properties": "object", "required": "object", "additionalProperties": "object", "items": "array",
    "prefixItems": "array", "minItems": "array", "maxItems": "array", "minLength": "string", "maxLength": "string",
    "pattern": "string", "minimum": "number", "maximum": "number", "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
}  # fmt: skip
"""Keywords that tell the type where it is not given."""
_ESCAPED = frozenset((*range(32), ord('"'), ord("\\")))
_CONTROL = re.compile(r"[\x00-\x1f]")
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_NO_REGEX = re.compile(
    r"\(\?(?!:)|\\[bBpPkAZzGQE1-9]|(?<!^)(?<!\\)(?<!\[)\^|(?<!\\)\$(?!$)|\[\[:|(?<!\\)\{(?!\d)|\[\^?\]"
)


class SchemaError(ValueError):
    """The schema is none, or not all of it can be enforced. The text says where and why."""


class TooBig(SchemaError):
    """The schema is beyond a bound."""


def _fail(at: str, why: str) -> SchemaError:
    return SchemaError(f"{at or 'schema'}: {why}")


class Cleaner:
    """Cleans the schemas of one request; the bounds are of all of them together. `strict`: refuse, never leave out."""

    def __init__(self) -> None:
        self._nodes = 0
        self._text = 0

    def clean(self, schema: Any, strict: bool, at: str = "") -> Schema:
        """A schema with its definitions under `$defs`, in which every keyword is enforced.

        Raises:
            SchemaError: if `strict`.
            TooBig: in either case.
        """
        return _Clean(self, schema, strict).root(at)

    def count(self, text: int = 0) -> None:
        self._nodes += 1
        self._text += text
        if self._nodes > MAX_NODES:
            raise TooBig(f"the schemas have more than {MAX_NODES} parts")
        if self._text > MAX_TEXT:
            raise TooBig(f"the schemas have more than {MAX_TEXT} characters")


class _Clean:
    """One schema. References are followed on demand; those to whole definitions only."""

    def __init__(self, cleaner: Cleaner, schema: Any, strict: bool) -> None:
        self._cleaner, self._schema, self._strict = cleaner, schema, strict
        self._given: dict[str, Any] = {}
        self._defs: dict[str, Schema] = {}

    def root(self, at: str) -> Schema:
        if isinstance(self._schema, Mapping):
            for key in ("$defs", "definitions"):
                found = self._schema.get(key)
                if isinstance(found, Mapping):
                    self._given |= {f"#/{key}/{name}": value for name, value in found.items()}
        cleaned = self.node(self._schema, at, 0)
        ending: set[str] = set()
        while more := [n for n, d in self._defs.items() if n not in ending and _ends(d, ending)]:
            ending.update(more)
        for name in self._defs:
            if name not in ending:
                if self._strict:
                    raise _fail(at, "a definition whose values hold themselves without end")
                self._defs[name] = {}
        return {**cleaned, "$defs": self._defs} if self._defs else cleaned

    def node(self, schema: Any, at: str, depth: int) -> Schema:
        """A part of the schema; where it is wrong and not strict: anything."""
        if depth > MAX_DEPTH:
            raise TooBig(f"{at[:80]}: the schema is nested deeper than {MAX_DEPTH}")
        self._cleaner.count()
        if schema is True:
            return {}
        try:
            if not isinstance(schema, Mapping):
                raise _fail(at, f"expected an object, found {type(schema).__name__}")
            for key in schema:
                if key in _UNSUPPORTED and schema[key] not in (None, key.startswith("unevaluated")):
                    raise _fail(at, f"`{key}` cannot be enforced")
        except TooBig:
            raise
        except SchemaError:
            if self._strict:
                raise
            if not isinstance(schema, Mapping):
                return {}
        try:
            return self._keywords(schema, at, depth)
        except TooBig:
            raise
        except SchemaError:
            if self._strict:
                raise
            return {}

    def _keywords(self, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        if "$ref" in schema:
            return self._reference(schema["$ref"], at, depth)
        if "enum" in schema or "const" in schema:
            return {"enum": self._values(schema, at)}
        for key in ("anyOf", "oneOf"):
            if schema.get(key) is not None:
                return {"anyOf": self._branches(schema, key, at, depth)}
        if schema.get("allOf") is not None:
            given = schema["allOf"]
            if not isinstance(given, list) or len(given) != 1:
                raise _fail(at, "`allOf` with other than one entry cannot be enforced")
            return self.node(given[0], f"{at}.allOf[0]", depth + 1)
        types = self._types(schema, at)
        if not types:
            return {}
        if len(types) > 1:
            return {"anyOf": [self._typed(kind, schema, at, depth) for kind in types]}
        return self._typed(types[0], schema, at, depth)

    def _reference(self, ref: Any, at: str, depth: int) -> Schema:
        if ref not in self._given:
            raise _fail(at, f"`$ref` to {shown(ref, 100)}: only definitions of the same schema can be named")
        name = f"d{list(self._given).index(ref)}"
        if name not in self._defs:
            self._defs[name] = {}  # it may name itself
            self._defs[name] = self.node(self._given[ref], ref[2:].replace("/", "."), depth + 1)
        return {"$ref": f"#/$defs/{name}"}

    def _values(self, schema: Mapping[str, Any], at: str) -> list[Any]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            raise _fail(at, "`enum` must be a list that is not empty")
        if len(values) > MAX_ENUM:
            raise TooBig(f"{at}: `enum` has {len(values)} values; at most {MAX_ENUM} are allowed")
        types = self._types({"type": schema.get("type")}, at)
        kept = [value for value in values if not types or any(_is(value, kind) for kind in types)]
        if not kept:
            raise _fail(at, "no value of `enum` has the type")
        for value in kept:
            self._cleaner.count(len(repr(value)))
        return kept

    def _branches(self, schema: Mapping[str, Any], key: str, at: str, depth: int) -> list[Schema]:
        given = schema[key]
        if not isinstance(given, list) or not given:
            raise _fail(at, f"`{key}` must be a list that is not empty")
        if self._strict and (beside := sorted(k for k in schema if k in _BELONGS or k == "allOf")):
            raise _fail(at, f"`{beside[0]}` beside `{key}` cannot be enforced")
        return [self.node(branch, f"{at}.{key}[{i}]", depth + 1) for i, branch in enumerate(given)]

    def _types(self, schema: Mapping[str, Any], at: str) -> list[str]:
        """What the node may be; empty: anything."""
        given = schema.get("type")
        if given is None:
            return sorted({_BELONGS[key] for key in schema if key in _BELONGS})
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(kind, str) and kind in TYPES for kind in types):
            raise _fail(at, f"`type` {shown(given, 100)} is none of {', '.join(sorted(TYPES))}")
        return list(dict.fromkeys(types))

    def _typed(self, kind: str, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        if kind == "object":
            return self._object(schema, at, depth)
        if kind == "array":
            return self._array(schema, at, depth)
        if kind == "string":
            return self._string(schema, at)
        if kind in ("integer", "number"):
            return self._number(kind, schema, at)
        return {"type": kind}

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        properties = schema.get("properties")
        required = schema.get("required") or []
        if properties is not None and not isinstance(properties, Mapping):
            raise _fail(at, "`properties` must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _fail(at, "`required` must be a list of names")
        cleaned: Schema = {"type": "object"}
        if properties is not None or required:
            kept = {}
            parts = dict(properties or {})
            for name in required:
                parts.setdefault(name, True)
            for name, part in parts.items():
                self._cleaner.count(len(name))
                if part is not False:
                    kept[name] = self.node(part, f"{at}.{name}" if at else name, depth + 1)
            cleaned["properties"] = kept
            cleaned["required"] = [name for name in dict.fromkeys(required) if name in kept]
        more = schema.get("additionalProperties")
        if more is not None and more is not False:
            cleaned["additionalProperties"] = self.node(more, f"{at}.additionalProperties", depth + 1) or True
        elif more is False:
            cleaned.setdefault("properties", {})
            cleaned["additionalProperties"] = False
        return cleaned

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> Schema:
        cleaned: Schema = {"type": "array", **self._bounds(schema, "minItems", "maxItems", at)}
        first = schema.get("prefixItems")
        if first is not None and not isinstance(first, list):
            raise _fail(at, "`prefixItems` must be a list")
        first = (first or [])[: cleaned.get("maxItems")]
        if first:
            cleaned["prefixItems"] = [self.node(p, f"{at}.prefixItems[{i}]", depth + 1) for i, p in enumerate(first)]
            cleaned["minItems"] = max(cleaned.get("minItems", 0), len(first))
        items = schema.get("items")
        if items is False:
            if cleaned.get("minItems", 0) > len(first):
                raise _fail(at, "`minItems` is more than `items` leaves room for")
            cleaned["items" if first else "maxItems"] = False if first else 0
        elif items is not None:
            cleaned["items"] = self.node(items, f"{at}.items", depth + 1)
        elif not first or max(cleaned["minItems"], cleaned.get("maxItems", 0)) > len(first):
            cleaned["items"] = {}  # else a tuple, to which the engine adds nothing
        return cleaned

    def _string(self, schema: Mapping[str, Any], at: str) -> Schema:
        cleaned: Schema = {"type": "string", **self._bounds(schema, "minLength", "maxLength", at)}
        pattern, form = schema.get("pattern"), schema.get("format")
        if pattern is not None:
            try:
                _check_pattern(pattern, at)
            except SchemaError:
                if self._strict:
                    raise
                return cleaned
            if self._strict and len(cleaned) > 1:
                raise _fail(at, "`pattern` and a length together cannot be enforced: put the length into the pattern")
            self._cleaner.count(len(pattern))
            return {"type": "string", "pattern": pattern}
        if form in FORMATS:
            if self._strict and len(cleaned) > 1:
                raise _fail(at, "`format` and a length together cannot be enforced")
            return {"type": "string", "format": form}
        return cleaned

    def _number(self, kind: str, schema: Mapping[str, Any], at: str) -> Schema:
        cleaned: Schema = {"type": kind}
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
                raise _fail(at, f"`{key}` must be a number")
            if abs(value) > MAX_NUMBER:
                if self._strict:
                    raise _fail(at, f"`{key}` is beyond 2^53")
                continue
            cleaned[key] = value
        low = max(cleaned.get("minimum", -math.inf), cleaned.get("exclusiveMinimum", -math.inf))
        high = min(cleaned.get("maximum", math.inf), cleaned.get("exclusiveMaximum", math.inf))
        if kind == "integer":
            low, high = math.ceil(low) if low > -math.inf else low, math.floor(high) if high < math.inf else high
            if "exclusiveMinimum" in cleaned:
                low += low == cleaned["exclusiveMinimum"]
            if "exclusiveMaximum" in cleaned:
                high -= high == cleaned["exclusiveMaximum"]
            cleaned = {"type": kind}
            if low > -math.inf:
                cleaned["minimum"] = int(low)
            if high < math.inf:
                cleaned["maximum"] = int(high)
        open_end = low in (cleaned.get("exclusiveMinimum"), cleaned.get("exclusiveMaximum")) and low == high
        if low > high or open_end:
            raise _fail(at, "no number is within the bounds")
        return cleaned

    def _bounds(self, schema: Mapping[str, Any], low: str, high: str, at: str) -> Schema:
        found: Schema = {}
        for key in (low, high):
            value = schema.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise _fail(at, f"`{key}` must be an integer that is not negative")
            if value > MAX_REPEAT:
                if self._strict:
                    raise _fail(at, f"`{key}` is {shown(value)}; at most {MAX_REPEAT} can be enforced")
                continue
            found[key] = value
        if found.get(low, 0) > found.get(high, math.inf):
            raise _fail(at, f"`{low}` is above `{high}`")
        return found


def _ends(schema: Schema, ending: Set[str]) -> bool:
    """Whether a cleaned schema has a value that is finite, if those of the definitions in `ending` have."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in ending
    if "anyOf" in schema:
        return any(_ends(branch, ending) for branch in schema["anyOf"])
    if schema.get("type") == "object":
        return all(_ends(schema["properties"][name], ending) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])
        beyond = [schema["items"]] if schema.get("minItems", 0) > len(first) else []
        return all(_ends(part, ending) for part in [*first, *beyond])
    return True


def bounded(schema: Any) -> Any:
    """A cleaned schema whose strings, arrays and integers have an end, for models that do not find one."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "enum" in schema:
        return schema
    made: Schema = {
        key: _bounded_parts(part) if key in ("properties", "$defs") else bounded(part) for key, part in schema.items()
    }
    kind = schema.get("type")
    if kind == "string" and "pattern" not in schema and "format" not in schema:
        made.setdefault("maxLength", max(SHORT_TEXT, schema.get("minLength", 0)))
    elif kind == "array":
        if schema.get("items") is not False:
            made.setdefault("maxItems", max(SHORT_LIST, schema.get("minItems", 0)))
    elif kind == "integer":
        low, high = schema.get("minimum"), schema.get("maximum")
        made["minimum"] = min(-SHORT_NUMBER, SHORT_NUMBER if high is None else high) if low is None else low
        made["maximum"] = max(SHORT_NUMBER, made["minimum"]) if high is None else high
    return made


def _bounded_parts(parts: Schema) -> Schema:
    return {name: bounded(part) for name, part in parts.items()}


def _check_pattern(pattern: Any, at: str) -> None:
    """Patterns are matched whole. Raises SchemaError for what the engine cannot do, or would silently leave out."""
    if not isinstance(pattern, str):
        raise _fail(at, "`pattern` must be a string")
    if len(pattern) > MAX_PATTERN:
        raise _fail(at, f"`pattern` has more than {MAX_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _fail(at, f"`pattern` is no regular expression: {error}") from error
    if _CONTROL.search(pattern):
        raise _fail(at, "`pattern` holds control characters: write them as escapes")
    parsed = re_parser.parse(pattern)
    if re_constants.POSSESSIVE_REPEAT in set(_operations(parsed)):
        raise _fail(at, "`pattern` cannot be enforced: it repeats without giving back (`*+`, `++`, `?+`, `{…}+`)")
    if not _plain(parsed):
        raise _fail(at, "`pattern` cannot be enforced: all it matches hold quotes, backslashes or control characters")
    if _NO_REGEX.search(pattern):
        said = "looks ahead or behind, names groups, refers back, or has anchors inside"
        raise _fail(at, f"`pattern` cannot be enforced: it {said}")
    product = 1
    for low, high in _REPEAT.findall(pattern):
        product *= max(1, int(high or low))
    if product > MAX_PATTERN_REPEAT:
        raise _fail(at, f"`pattern` repeats more than {MAX_PATTERN_REPEAT} times")


def _operations(parts: Any) -> Iterator[Any]:
    """Every operation of a parsed pattern. (What stands in groups that `_NO_REGEX` refuses is not looked at.)"""
    for operation, argument in parts:
        yield operation
        if operation is re_constants.BRANCH:
            for branch in argument[1]:
                yield from _operations(branch)
        elif operation in (re_constants.SUBPATTERN, re_constants.MAX_REPEAT, re_constants.MIN_REPEAT):
            yield from _operations(argument[-1])


def _plain(parts: Any) -> bool:
    """Whether a parsed pattern matches any text without what JSON escapes: the engine writes text as it stands, and for
    a pattern without such a text it would write what is no JSON."""
    return all(_plain_part(operation, argument) for operation, argument in parts)


def _plain_part(operation: Any, argument: Any) -> bool:
    if operation is re_constants.LITERAL:
        return argument not in _ESCAPED
    if operation is re_constants.IN:
        return any(
            kind is re_constants.NEGATE
            or kind is re_constants.CATEGORY
            or (kind is re_constants.LITERAL and value not in _ESCAPED)
            or (kind is re_constants.RANGE and any(c not in _ESCAPED for c in range(value[0], value[1] + 1)))
            for kind, value in argument
        )
    if operation is re_constants.BRANCH:
        return any(_plain(branch) for branch in argument[1])
    if operation is re_constants.SUBPATTERN:
        return _plain(argument[3])
    if operation in (re_constants.MAX_REPEAT, re_constants.MIN_REPEAT):
        return argument[0] == 0 or _plain(argument[2])
    return True


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a type."""
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return not isinstance(value, bool) and isinstance(value, (int, float)) and (kind == "number" or whole)
    return isinstance(value, {"string": str, "array": list, "object": dict}[kind])
