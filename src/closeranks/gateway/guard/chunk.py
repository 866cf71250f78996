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

TEXT_FIELDS = ("reasoning_content", "reasoning", "content")


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
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list_of_members = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_NULL = b"null"
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_answer(data: bytes) -> Answer | None:
    """The watched fields; None where `data` is no such object.

    What msgspec refuses but many clients accept (invalid UTF-8, lone surrogates) is read the lenient way, as a
    client would: markup must not slip through inside it.
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return msgspec.convert(_load_leniently(data), Answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _load_leniently(data: bytes) -> Any:
    """What a forgiving client reads: bytes that are no UTF-8 as U+FFFD, lone surrogates as they are, NaN as null."""
    return json.loads(data.decode("utf-8", "replace"), parse_constant=lambda _: None, strict=False)


def dump(value: Any) -> bytes:
    """JSON, UTF-8. Members that are undecoded go out as they came."""
    return msgspec.json.encode(value)


def rewritten(data: bytes, write: Callable[[dict[str, Any]], bytes]) -> bytes:
    """What `write` makes of the members (undecoded: `msgspec.Raw`) of the JSON object `data`.

    If somewhere in it is what only `read_answer`'s lenient way reads, it is put into proper JSON first.
    """
    try:
        return write(dict(_members(data)))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        proper = without_surrogates(json.dumps(_load_leniently(data), ensure_ascii=False))
        return write(dict(_members(proper.encode())))


def without_surrogates(text: str) -> str:
    """`text` with each lone surrogate (half an emoji, cut by an upstream) as U+FFFD, as decoders give it back.

    Of the same length, so an event of which nothing was taken still goes out with its halves as they came.
    """
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def choices_of(top: dict[str, Any]) -> list[dict[str, Any]]:
    """The `choices` of an object's members, each with undecoded members."""
    return [dict(choice) for choice in _list_of_members(top["choices"])]


def members_of(value: Any) -> dict[str, Any]:
    """The members, undecoded, of an object that is itself undecoded; none if it is null or missing."""
    return {} if is_null(value) else dict(_members(value))


def is_stop(finish: Any) -> bool:
    """Whether an undecoded finish reason is "stop"."""
    return isinstance(finish, msgspec.Raw) and bytes(finish).strip() == b'"stop"'


def is_null(value: Any) -> bool:
    """Whether a member is JSON null (or was left out)."""
    return value is None or (isinstance(value, msgspec.Raw) and bytes(value).strip() == _NULL)
