"""Chat answers as JSON: read the few fields that are watched, rewrite only those, keep every other byte.

Reading decodes into small structs (fast, unknown fields skipped). Rewriting decodes the object into raw members, so
what is not replaced goes out as it came: numbers keep their digits, unknown fields stay.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

Delta = dict[str, Any]
"""What goes into a `delta` or `message`: some of `content`, `reasoning_content`, `tool_calls`."""

REASONING_FIELDS = ("reasoning_content", "reasoning")
TEXT_FIELDS = (*REASONING_FIELDS, "content")


class Function(msgspec.Struct):
    name: Any = None
    arguments: Any = None


class Call(msgspec.Struct):
    index: Any = None
    function: Function | None = None


class Text(msgspec.Struct):
    """A `delta` or a `message`."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[Call] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Text | None = None
    message: Text | None = None
    finish_reason: Any = None


class Answer(msgspec.Struct):
    """A `chat.completion` or a `chat.completion.chunk`."""

    choices: list[Choice] | None = None
    model: Any = None


_decode = msgspec.json.Decoder(Answer).decode
# undecoded values come without white space around them
_members: Callable[[Any], dict[str, Any]] = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_NULL = b"null"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_answer(data: bytes) -> Answer | None:
    """The watched fields; None where `data` is no such object.

    What msgspec refuses but many clients accept (invalid UTF-8, lone surrogates, members of another type) is read the
    lenient way, as a client would: markup must not slip through beside it.
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        top = _load_leniently(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(top, dict):
        return None
    choices = top.get("choices")
    read = [_choice(choice, place) for place, choice in enumerate(choices)] if isinstance(choices, list) else None
    return Answer(read, top.get("model"))


def _load_leniently(data: bytes) -> Any:
    """What a forgiving client reads: UTF-16 and a byte order mark as such, bytes that are no UTF-8 as U+FFFD, lone
    surrogates as they are, NaN as null."""
    text = data.decode(json.detect_encoding(data), "replace")
    return json.loads(text, parse_constant=lambda _: None, strict=False)


def _choice(choice: Any, place: int) -> Choice:
    """A choice, less what is of another type than it should be."""
    if not isinstance(choice, dict):
        return Choice(place)
    index = index_of(choice.get("index", 0), place)
    return Choice(index, _text(choice.get("delta")), _text(choice.get("message")), choice.get("finish_reason"))


def _text(text: Any) -> Text | None:
    if not isinstance(text, dict):
        return None
    calls = text.get("tool_calls")
    read = [_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else None
    return Text(text.get("content"), text.get("reasoning_content"), text.get("reasoning"), read)


def _call(call: dict[str, Any]) -> Call:
    function = call.get("function")
    read = Function(function.get("name"), function.get("arguments")) if isinstance(function, dict) else None
    return Call(call.get("index"), read)


def reasoning_of(text: Text) -> tuple[str, tuple[str, ...]]:
    """The reasoning that a delta or message brings, and the names under which it stands there.

    Servers that are changing the name send it under both; should the two differ, the first counts.
    """
    first, second = text.reasoning_content, text.reasoning
    if not first and not second:
        return "", ()
    found = [(text, name) for text, name in zip((first, second), REASONING_FIELDS, strict=True) if _is_text(text)]
    return (found[0][0], tuple(name for _, name in found)) if found else ("", ())


def _is_text(text: Any) -> bool:
    return isinstance(text, str) and text != ""


def index_of(index: Any, place: int) -> int:
    """The index of the choice at `place`: its own if that is a whole number, else its place."""
    if isinstance(index, float) and index.is_integer():
        return int(index)
    return index if isinstance(index, int) and not isinstance(index, bool) else place


def dump(value: Any) -> bytes:
    """JSON, UTF-8. Members that are undecoded go out as they came."""
    return msgspec.json.encode(value)


def rewritten(data: bytes, write: Callable[[dict[str, Any]], bytes]) -> bytes:
    """What `write` makes of the members (undecoded: `msgspec.Raw`) of the JSON object `data`.

    If somewhere in it is what only `read_answer`'s lenient way reads, it is put into proper JSON first.
    """
    try:
        return write(_members(data))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        proper = without_surrogates(json.dumps(_load_leniently(data), ensure_ascii=False))
        return write(_members(proper.encode()))


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate (half an emoji, cut by an upstream) as U+FFFD, as decoders give it back.

    Of the same length, so an event of which nothing was taken still goes out with its halves as they came.
    """
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def choices_of(top: dict[str, Any]) -> list[tuple[int, dict[str, Any] | None, Any]]:
    """The `choices` of an object's members: index, undecoded members (None: no object), and all of it as it came."""
    choices: list[tuple[int, dict[str, Any] | None, Any]] = []
    for place, raw in enumerate(items_of(top["choices"])):
        if bytes(raw)[:1] != b"{":
            choices.append((place, None, raw))
            continue
        members = _members(raw)
        index = msgspec.json.decode(members["index"]) if "index" in members else 0
        choices.append((index_of(index, place), members, raw))
    return choices


def members_of(value: Any) -> dict[str, Any]:
    """The members, undecoded, of an object that is itself undecoded; none if it is no object, or missing."""
    return _members(value) if value is not None and bytes(value)[:1] == b"{" else {}


def items_of(value: Any) -> list[Any]:
    """The items, undecoded, of a list that is itself undecoded; none if it is no list, or missing."""
    return list(_items(value)) if value is not None and bytes(value)[:1] == b"[" else []


def is_stop(finish: Any) -> bool:
    """Whether an undecoded finish reason is "stop"."""
    return isinstance(finish, msgspec.Raw) and bytes(finish) == b'"stop"'


def is_null(value: Any) -> bool:
    """Whether a member is JSON null (or was left out)."""
    return value is None or (isinstance(value, msgspec.Raw) and bytes(value) == _NULL)
