"""JSON schemas at random, values for them and near misses, and an oracle of what is valid, for tests of the guide.

Two readings of validity. The *wide* one is JSON Schema with the documented default that objects are closed. The
*narrow* one is what the guide promises to admit: tuples without `items` have no more elements than they name, and
strings held to a pattern or a length hold nothing that JSON escapes. What is valid in the narrow reading must be
admitted, what is not in the wide one must not.
"""

import json
import math
import re
from typing import Any

from hypothesis import strategies as st

Strategy = st.SearchStrategy[Any]

NAMES = ["", "a", "b", "name", "x y", "é", "😀", "$ref", "type", "a-b", "0", "*", 'q"', "b\\s", "n\nl", "</｜DSML｜"]
PATTERNS = [
    "[a-c]+", "^[A-Z]{2}-[0-9]{1,3}$", "a|bc", "(ab)*c?", r"\d{4}", "[^x]y", r"\w+@\w+", "^$", r"a\.b", ".{2}",
    "[\"']", '"', '(?:"|b)', r"\n", r"[\n]", 'x*"', "[ -~]{1,3}", r"\s", '["b]', r"(\\)?c", r"\\d",
]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-30, 30) | st.sampled_from([0.5, -1.25]) | st.text('abé"\\\n{}', max_size=4)
)
SIMPLE = ["null", "boolean", "string", "integer", "number"]
_ESCAPED = re.compile(r'["\\\x00-\x1f]')


def bounds(low: str, high: str, most: int) -> Strategy:
    """None, one or both of two bounds, in order."""
    both = st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda two: {low: min(two), high: max(two)})
    keys = st.sets(st.sampled_from([low, high]))
    return st.tuples(both, keys).map(lambda drawn: {key: drawn[0][key] for key in sorted(drawn[1])})


def _numbers(kind: str) -> Strategy:
    bound = st.integers(-40, 40)
    if kind == "number":
        bound |= st.sampled_from([-2.5, 0.25, 7.5, 0.001, 1e10, 123456.789])
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=dict.fromkeys(keys, bound))


_VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.sampled_from(NAMES), SCALARS, max_size=2)
_LEAVES = st.one_of(
    st.just({}),
    st.just(True),
    st.sampled_from([*SIMPLE, "array", "object"]).map(lambda kind: {"type": kind}),
    st.lists(st.sampled_from(SIMPLE), min_size=1, max_size=3, unique=True).map(lambda kinds: {"type": kinds}),
    bounds("minLength", "maxLength", 6).map(lambda found: {"type": "string", **found}),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    _numbers("integer"),
    _numbers("number"),
    st.lists(_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    st.sampled_from(["d0", "d1"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
)


@st.composite
def _objects(draw: Any, inner: Strategy) -> Any:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if draw(st.booleans()):
        schema["required"] = draw(st.lists(st.sampled_from([*properties, "extra"]), unique=True, max_size=4))
    if draw(st.integers(0, 3)) == 0:
        schema["additionalProperties"] = draw(st.booleans() | inner)
    if draw(st.integers(0, 5)) == 0:
        del schema["type"]
    return schema


@st.composite
def _arrays(draw: Any, inner: Strategy) -> Any:
    schema = {"type": "array", **draw(bounds("minItems", "maxItems", 3))}
    items = draw(st.integers(0, 4))
    if items:
        schema["items"] = draw(inner if items < 4 else st.booleans())
    if draw(st.integers(0, 2)) == 0:
        schema["prefixItems"] = draw(st.lists(inner, max_size=3))
    return schema


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
        st.lists(inner, min_size=1, max_size=2).map(lambda branches: {"oneOf": branches}),
        inner.map(lambda part: {"allOf": [part]}),
        inner.map(lambda part: {**part, "description": "d", "title": "t"} if isinstance(part, dict) else part),
    ),
    max_leaves=8,
)


@st.composite
def documents(draw: Any) -> Any:
    """A whole schema, with two definitions that may name each other and themselves."""
    schema = draw(SCHEMAS)
    return {**(schema if isinstance(schema, dict) else {}), "$defs": {"d0": draw(SCHEMAS), "d1": draw(SCHEMAS)}}


# ---- what is valid


def is_a(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))


def valid(schema: Any, value: Any, defs: dict[str, Any], narrow: bool, depth: int = 0) -> bool:
    """Whether a value is valid, in the narrow or in the wide reading."""
    if isinstance(schema, bool):
        return schema
    if depth > 40:
        return False  # nothing but a circle of references

    def also(part: Any, inner: Any) -> bool:
        return valid(part, inner, defs, narrow, depth + 1)

    if "$ref" in schema:
        return also(defs[schema["$ref"].rpartition("/")[2]], value)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds] if kinds else []
    typed = not kinds or any(is_a(value, kind) for kind in kinds)
    if "enum" in schema or "const" in schema:
        given = [schema["const"]] if "const" in schema else schema["enum"]
        return typed and any(json.dumps(value) == json.dumps(known) for known in given)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return any(also(branch, value) for branch in schema[key])
    if "allOf" in schema:
        return also(schema["allOf"][0], value)
    if not kinds and {"properties", "required", "additionalProperties"} & set(schema):
        typed = isinstance(value, dict)
    if not typed:
        return False
    if isinstance(value, str):
        return _valid_text(schema, value, narrow)
    if is_a(value, "number"):
        inside = schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        return inside and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
    if isinstance(value, list):
        first = schema.get("prefixItems") or []
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if narrow and "items" not in schema and first and max(least, schema.get("maxItems", 0)) <= len(first):
            most = min(most, len(first))
        if narrow:
            least = max(least, len(first[: schema.get("maxItems")]))
        parts = [first[i] if i < len(first) else schema.get("items", True) for i in range(len(value))]
        return least <= len(value) <= most and all(map(also, parts, value))
    if isinstance(value, dict):
        known, required = schema.get("properties"), schema.get("required") or []
        more = schema.get("additionalProperties", known is None and not required)
        others = {**dict.fromkeys(required, True), **(known or {})}
        return all(name in value for name in required) and all(also(others.get(n, more), v) for n, v in value.items())
    return True


def _valid_text(schema: dict[str, Any], value: str, narrow: bool) -> bool:
    if narrow and {"minLength", "maxLength", "pattern"} & set(schema) and _ESCAPED.search(value):
        return False
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        return False
    pattern = schema.get("pattern", "(?s).*")
    if not narrow:  # ECMA-262, which JSON Schema refers to, counts it among white space; Python does not
        pattern = pattern.replace(r"\s", r"[\s\ufeff]")
    return bool(re.fullmatch(pattern, value, re.ASCII if narrow else 0))


# ---- values


@st.composite
def values(draw: Any, schema: Any, defs: dict[str, Any], depth: int = 0) -> Any:
    """A value that is most often valid."""
    if isinstance(schema, bool) or depth > 6:
        return draw(SCALARS)

    def part(inner: Any) -> Any:
        return draw(values(inner, defs, depth + 1))

    if "$ref" in schema:
        return part(defs[schema["$ref"].rpartition("/")[2]])
    if "enum" in schema or "const" in schema:
        return draw(st.sampled_from([schema["const"]] if "const" in schema else schema["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return part(draw(st.sampled_from(schema[key])))
    kind = schema.get("type") or ("object" if "properties" in schema else None)
    kind = draw(st.sampled_from(kind)) if isinstance(kind, list) else kind
    if kind == "string" and "pattern" in schema:
        return draw(st.from_regex(schema["pattern"], fullmatch=True))
    if kind == "string":
        least = schema.get("minLength", 0)
        return draw(st.text('ab é"\\\n<', min_size=least, max_size=min(schema.get("maxLength", 99), least + 5)))
    if kind in ("integer", "number"):
        return draw(st.integers(-42, 42)) + (draw(st.sampled_from([0, 0, 0.5, 0.25])) if kind == "number" else 0)
    if kind == "array":
        first = schema.get("prefixItems") or []
        least = max(schema.get("minItems", 0), len(first[: schema.get("maxItems")]))
        count = draw(st.integers(least, max(least, min(schema.get("maxItems", 99), least + 2))))
        return [part(first[i] if i < len(first) else schema.get("items", True)) for i in range(count)]
    if kind == "object":
        return _an_object(draw, schema, part)
    return draw(st.sampled_from([None, True]) if kind else SCALARS)


def _an_object(draw: Any, schema: dict[str, Any], part: Any) -> dict[str, Any]:
    known, required = schema.get("properties") or {}, schema.get("required") or []
    made = {n: part(s) for n, s in known.items() if s is not False and (n in required or draw(st.booleans()))}
    made |= {name: draw(SCALARS) for name in required if name not in known}
    more = schema.get("additionalProperties", "properties" not in schema and not required)
    if more is not False and draw(st.booleans()):
        made["other"] = part(more)
    return made


@st.composite
def near(draw: Any, value: Any) -> Any:
    """A value that differs a little."""
    way = draw(st.integers(0, 5))
    if isinstance(value, dict) and value and way < 4:
        name = draw(st.sampled_from(sorted(value)))
        if way == 0:
            return {key: inner for key, inner in value.items() if key != name}
        return {**value, "unknown": 1} if way == 1 else {**value, name: draw(near(value[name]))}
    if isinstance(value, list) and value and way < 4:
        at = draw(st.integers(0, len(value) - 1))
        return [value[:-1], [*value, value[-1]], *[[*value[:at], draw(near(value[at])), *value[at + 1 :]]] * 2][way]
    if is_a(value, "number") and way < 4:
        return value + draw(st.sampled_from([-1, 1, 100, -100, 0.5]))
    if isinstance(value, str) and way < 4:
        return draw(st.sampled_from([value + "a", value[:-1], value + '"', "", value.upper(), value[::-1]]))
    return draw(SCALARS)
