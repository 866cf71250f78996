"""Where in a grammar the fault lies: the path of the smallest part of a schema that cannot be compiled by itself."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_TRIES = 400
"""Parts that are tried; a schema has at most a few thousand, most of which are not on the way."""
_PREFIX = re.compile(r"^\[[^\]]*\] \S+: ")
_FUNCTION = re.compile(r'(?:invoke name="|"name": ")([^"<>]+)"')
_PARAMETER = re.compile(r'parameter name="([^"<>]+)\Z')
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_PARTS = ("items", "additionalProperties")


def blame(kind: str, text: str, said: str) -> str:
    """What is wrong with a grammar, for who sent the schema. `said`: the compiler's words about the whole."""
    try:
        if kind == "json_schema":
            found = _inside(json.loads(text), {}, _Tries())
        elif kind == "structural_tag":
            found = _format(json.loads(text).get("format"), "", _Tries())
        else:
            found = None
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
        found = None  # no such JSON: the compiler's words are all there is
    path, why = found or ("", said)
    return f"{path + ': ' if path else ''}cannot be enforced: {_short(why)}"


class _Tries:
    """Compiles parts, a bounded number of them."""

    def __init__(self) -> None:
        self._left = MAX_TRIES

    def schema(self, schema: Any) -> str:
        """What the compiler says about a schema; empty: nothing."""
        import xgrammar

        self._left -= 1
        if self._left < 0:
            return ""
        try:
            xgrammar.Grammar.from_json_schema(json.dumps(schema))
        except (RuntimeError, ValueError, TypeError) as error:
            return str(error)
        return ""


def _format(format: Any, before: str, tries: _Tries) -> tuple[str, str] | None:
    """The first schema at fault in a structural tag, with the tool and the parameter it belongs to."""
    for leaf, said in _leaves(format, before):
        found = _inside(leaf, {}, tries)
        if found is not None:
            functions, parameter = _FUNCTION.findall(said), _PARAMETER.search(said.partition('" string=')[0])
            place = [f"tool {functions[-1]!r}"] if functions else []
            place += [parameter.group(1)] if parameter else []
            return ".".join([*place, found[0]] if found[0] else place), found[1]
    return None


def _leaves(format: Any, before: str) -> Iterator[tuple[Any, str]]:
    """Schemas in a format, each with the fixed text that leads to it."""
    if not isinstance(format, Mapping):
        return
    if format.get("type") == "json_schema":
        yield format.get("json_schema"), before
    for element in format.get("elements") or ():
        yield from _leaves(element, before)
        if format["type"] == "sequence" and isinstance(element, Mapping) and element.get("type") == "const_string":
            value = str(element.get("value"))
            before = value if "invoke name" in value or '"name": ' in value else before + value
    for rule in format.get("rules") or ():
        yield from _leaves(rule[1], before)
    yield from _leaves(format.get("content"), before)


def _inside(schema: Any, defs: Mapping[str, Any], tries: _Tries) -> tuple[str, str] | None:
    """(path, compiler's words) of the innermost part of a schema that fails by itself; None: the schema is sound."""
    if isinstance(schema, Mapping):
        defs = schema.get("$defs", defs)
    why = tries.schema({**schema, "$defs": defs} if isinstance(schema, Mapping) and defs else schema)
    if not why:
        return None
    for name, part in _children(schema):
        deeper = _inside(part, {} if name.startswith("$defs.") else defs, tries)
        if deeper is not None:
            return (f"{name}.{deeper[0]}" if deeper[0] else name), deeper[1]
    return "", why


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _MAPS:
        for name, part in (schema.get(key) or {}).items():
            yield (f"$defs.{name}" if key in ("$defs", "definitions") else name), part
    for key in _LISTS:
        for i, part in enumerate(schema.get(key) or ()):
            yield f"{key}[{i}]", part
    for key in _PARTS:
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]


def _short(said: str) -> str:
    """A compiler's words without its own time and place."""
    lines = said.strip().splitlines() or [""]
    return _PREFIX.sub("", lines[0])[:200]
