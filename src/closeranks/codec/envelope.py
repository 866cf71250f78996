"""The JSON envelope of Hermes-style calls: `{"name": ..., "arguments": {...}}`, read as it arrives."""

import json
import re
from typing import Any

from closeranks.codec.jsonstream import JsonStream

HEAD_LIMIT = 1024  # of the text before the arguments' bracket, to stream them
WHOLE_LIMIT = 64 * 1024  # of an envelope in another order, which is held as a whole

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SURROGATE = re.compile("[\ud800-\udfff]")


class Envelope:
    """One body. `name` is set as soon as it is known, before any arguments leave."""

    __slots__ = ("_stream", "_tail", "_text", "name", "rejected")

    def __init__(self) -> None:
        self.name: str | None = None
        self.rejected = ""
        self._text = ""
        self._tail = ""
        self._stream: JsonStream | None = None

    def feed(self, text: str) -> str:
        """Take the next piece; return arguments that can be sent. `rejected` is what can no longer be part of them."""
        self.rejected = ""
        if self._stream is None:
            if len(self._text) > WHOLE_LIMIT:
                self.rejected = text
                return ""
            self._text += text
            found = _HEAD.match(self._text, 0, HEAD_LIMIT) if len(self._text) <= 2 * HEAD_LIMIT + len(text) else None
            if not found:
                return ""
            self.name = _clean(json.loads(found.group(1), strict=False))
            self._stream = JsonStream()
            text, self._text = self._text[found.end() :], ""
        out = self._stream.feed(text)
        room = HEAD_LIMIT - len(self._tail) if self._stream.complete else 0
        self._tail += self._stream.rejected[:room]
        self.rejected = self._stream.rejected[room:]
        return out

    @property
    def unread(self) -> str:
        """Text that was taken and has neither left nor been rejected."""
        return self._text + (self._stream.unread if self._stream else "") + self._tail

    def finish(self) -> str | None:
        """What completes the arguments, less their last bracket; None if the envelope is malformed."""
        if self._stream is not None:
            out = self._stream.finish(hold_last=True)
            tail = self._tail.strip()
            if self._stream.complete and not self._stream.raw and (tail in ("", "}") or tail[0] == ","):
                return out
            return None
        if len(self._text) > WHOLE_LIMIT:
            return None
        try:
            value = json.loads(self._text, strict=False, parse_constant=_refuse)
            arguments = _arguments(value)
            if isinstance(arguments, str):
                arguments = json.loads(arguments, strict=False, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
            return None
        self.name = _clean(value["name"])
        return _clean(json.dumps(arguments, ensure_ascii=False))[:-1]


def _arguments(value: Any) -> Any:
    """The arguments of an envelope; none at all only if nothing in it could be meant for them."""
    if not isinstance(value, dict):
        return None
    for key in ("arguments", "parameters"):
        if key in value:
            return value[key]
    return None if value.keys() - {"name", "id", "type"} else {}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _clean(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)
