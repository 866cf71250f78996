"""JSON documents inside evidence files: whole, back to back, in the middle of a log, wrapped, or cut off."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from closeranks.diagnose.lines import unwrap

MAX_TEXT = 64 << 20
_START = re.compile(r"(?m)^[ \t]{0,8}(?=\{\s*[\"}\n\r]|\[\s*[\n\r\[{])")
_NEXT = re.compile(r"[ \t]*(?=\{\s*[\"}]|\[\s*[\[{])")
_MAX_MISSES = 300
_LARGEST = 1 << 63


def _int(digits: str) -> int:
    """A number of JSON; one that no engine counts to is cut to what fits everywhere."""
    return int(digits) if len(digits) < 19 else max(-_LARGEST, min(_LARGEST, int(digits[:25])))


def _float(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


_READ: dict[str, Any] = {"strict": False, "parse_int": _int, "parse_float": _float, "parse_constant": lambda _: None}
_DECODER = json.JSONDecoder(**_READ)


def unwrap_all(text: str) -> str:
    """`text` with every line unwrapped, if the first lines all carry a collector's wrapper; else unchanged."""
    if "\n" not in text.strip():  # one line: a record of a logger, too, is one, and must stay whole
        inner = unwrap(text)[0]
        return inner if text.rstrip("\r\n").endswith(inner.rstrip("\r\n")) or _START.match(inner) else text
    sample = [line for line in text[:20000].split("\n")[:-1] if line.strip()][:12]
    if len(sample) < 2 or any(unwrap(line)[0] == line for line in sample):
        return text
    return "\n".join(unwrap(line)[0] for line in text.split("\n"))


@dataclass(frozen=True)
class Document:
    """One object, the 1-based line it begins on, and its place in the text."""

    value: object
    line: int
    start: int
    end: int


def documents(text: str) -> Iterator[Document]:
    """Each JSON object or array that starts a line. One that is cut off is repaired and reaches to the end."""
    pos, misses, line, counted = 0, 0, 1, 0
    while misses < _MAX_MISSES and (m := _START.search(text, pos)):
        start = m.end()
        line += text.count("\n", counted, start)
        counted = start
        try:
            found, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            misses += 1
            repaired = _repair(text[start:]) if misses <= 3 else None
            if repaired is not None:
                value, used = repaired
                yield Document(value, line, start, start + used)
            pos = start + 1
            continue
        yield Document(found, line, start, end)
        pos = end
        while (m := _NEXT.match(text, pos)) and isinstance(found, dict | list):  # written without a break in between
            try:
                found, end = _DECODER.raw_decode(text, m.end())
            except (ValueError, RecursionError):
                break
            yield Document(found, line + text.count("\n", start, m.end()), m.end(), end)
            pos = end


def _repair(text: str) -> tuple[object, int] | None:
    """The object that `text` begins with, closed where it was cut, and how much of `text` it took. None if broken."""
    stack: list[str] = []
    cuts: list[tuple[int, str]] = []  # where a value ended, and what was open then
    in_string = escaped = False
    for i, c in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
            elif c == '"':
                in_string = False
        elif c == '"':
            in_string = True
        elif c in "{[":
            stack.append("}" if c == "{" else "]")
        elif c in "}]":
            if not stack or stack.pop() != c:
                break
            if c == "}":  # only after whole objects: a list of numbers that was cut is another list
                cuts.append((i + 1, "".join(reversed(stack))))
        if len(cuts) > 64:
            del cuts[:32]
    for end, closing in reversed(cuts[-24:]):
        try:
            found: object = _DECODER.decode(text[:end] + closing)
        except (ValueError, RecursionError):
            continue
        return found, end
    return None
