"""What a chat request asked for, as far as the guard must know it: tools, tool choice, stream, model."""

import zlib
from typing import Any

import msgspec


class Asked(msgspec.Struct, frozen=True):
    """`tools`: OpenAI tool objects as sent, in order; empty where none may be called."""

    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    model: str = ""


class _Request(msgspec.Struct):
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    model: Any = None


class Unreadable(ValueError):
    """The request's body is no JSON object, or is compressed in a way that is not understood."""


_decode = msgspec.json.Decoder(_Request).decode


def read_request(body: bytes, content_encoding: str = "") -> Asked:
    """Read a chat request's body. Raises `Unreadable`; what it says of itself is never trusted further than that."""
    try:
        request = _decode(decompress(body, content_encoding))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    offered = [*(request.tools or ()), *({"function": function} for function in request.functions or ())]
    tools = [tool for tool in offered if _has_name(tool)]
    choice = request.tool_choice if isinstance(request.tool_choice, (str, dict)) else "auto"
    if choice == "none":
        tools = []
    return Asked(tuple(tools), choice, request.model if isinstance(request.model, str) else "")


def _has_name(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def decompress(body: bytes, content_encoding: str, limit: int = 1 << 28) -> bytes:
    """`body` without its gzip or deflate coding. Raises ValueError for any other coding, damage, or over `limit`."""
    coding = content_encoding.strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"content-encoding {coding!r} is not understood")
    windows = (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS)  # 32: either header; the second for deflate without one
    for wbits in windows:
        inflater = zlib.decompressobj(wbits)
        try:
            plain = inflater.decompress(body, limit)
        except zlib.error as error:
            if wbits == windows[-1]:
                raise ValueError(f"content-encoding {coding!r}: {error}") from error
            continue
        if inflater.unconsumed_tail:
            raise ValueError(f"content-encoding {coding!r}: more than {limit} bytes")
        return plain
    raise AssertionError("unreachable: the last window returns or raises")
