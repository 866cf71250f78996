"""Write an event anew: the text and calls of some choices replaced, every other member as it came.

One event may become several (reasoning, content and each call have a delta of their own, in order) or none, if all
that it held was markup. Its finish reason and usage stay on the last one. `logprobs` of rewritten text become null:
they would repeat the markup token by token.
"""

from typing import Any

import msgspec

from closeranks.gateway.guard.chunk import (
    TEXT_FIELDS,
    Delta,
    choices_of,
    dump,
    is_null,
    is_stop,
    items_of,
    members_of,
    rewritten,
)
from closeranks.gateway.guard.sse import data_of, new_event, with_data


def rewrite_event(
    event: bytes,
    deltas: dict[int, list[Delta]],
    indices: dict[int, dict[int, int]],
    repaired: set[int],
    reasoning: tuple[str, ...],
) -> bytes:
    """`event` with the text of the choices in `deltas` replaced by these deltas.

    `indices`: per choice, indices of the upstream's own calls that change. `repaired`: choices that made a call, whose
    finish reason "stop" becomes "tool_calls". `reasoning`: the names under which the upstream sends reasoning.
    """
    data = data_of(event)
    assert data is not None, "only events with choices are rewritten"
    return rewritten(data, lambda top: _events(event, top, dict(deltas), indices, repaired, reasoning))


def _events(
    event: bytes,
    top: dict[str, Any],
    deltas: dict[int, list[Delta]],
    indices: dict[int, dict[int, int]],
    repaired: set[int],
    reasoning: tuple[str, ...],
) -> bytes:
    pieces: list[Any] = []
    left = set(deltas)
    for index, choice, raw in choices_of(top):
        if choice is None or index not in deltas:
            pieces.append(raw)
            continue
        texts = deltas[index] if index in left else []  # of two choices with one index the first has the text of both
        left.discard(index)
        pieces += _rewrite_choice(choice, texts, indices.get(index, {}), index in repaired, reasoning)
    usage = top.get("usage")
    if not pieces:
        return b"" if is_null(usage) else with_data(event, dump({**top, "choices": []}))
    out = []
    for number, piece in enumerate(pieces):
        written = {**top, "choices": [piece]}
        if number < len(pieces) - 1 and not is_null(usage):
            written["usage"] = None
        out.append(with_data(event, dump(written)))
    return b"".join(out)


def _rewrite_choice(
    choice: dict[str, Any], deltas: list[Delta], indices: dict[int, int], repaired: bool, reasoning: tuple[str, ...]
) -> list[dict[str, Any]]:
    rest = members_of(choice.get("delta"))
    for field in TEXT_FIELDS:
        rest.pop(field, None)
    calls = rest.pop("tool_calls", None)
    last: Delta = {} if is_null(calls) else {"tool_calls": renumber(calls, indices)}
    first = {key: value for key, value in rest.items() if not is_null(value)}
    finish = choice.get("finish_reason")
    ends = not is_null(finish)
    if repaired and is_stop(finish):
        finish = "tool_calls"
    bodies = [_named(delta, reasoning) for delta in deltas]
    if last:
        bodies.append(last)
    if not bodies and (first or ends):
        bodies.append({})
    written = []
    for number, body in enumerate(bodies):
        piece = {**choice, "delta": {**rest, **body} if number == 0 else body}
        if "finish_reason" in choice:
            piece["finish_reason"] = finish if number == len(bodies) - 1 else None
        if "logprobs" in piece:
            piece["logprobs"] = None
        written.append(piece)
    return written


def _named(delta: Delta, reasoning: tuple[str, ...]) -> Delta:
    """`delta` with the reasoning under the names that the upstream uses."""
    if "reasoning_content" in delta:
        return dict.fromkeys(reasoning, delta["reasoning_content"])
    return delta


def renumber(calls: Any, indices: dict[int, int]) -> Any:
    """The upstream's own `tool_calls`, some with another index."""
    if not indices:
        return calls
    renumbered = []
    for raw in items_of(calls):
        call = members_of(raw)
        index = msgspec.json.decode(call["index"]) if "index" in call else None
        ours = indices.get(index) if isinstance(index, int) else None
        renumbered.append(raw if ours is None else {**call, "index": ours})
    return renumbered


def event_like(event: bytes, index: int, deltas: list[Delta], reasoning: tuple[str, ...]) -> bytes:
    """Events that the upstream did not send, for text that was held back when it ended: modelled on `event`."""
    data = data_of(event)

    def write(top: dict[str, Any]) -> bytes:
        top.pop("usage", None)
        named = (_named(delta, reasoning) for delta in deltas)
        choices = ({"index": index, "delta": delta, "finish_reason": None} for delta in named)
        return b"".join(new_event(dump({**top, "choices": [choice]})) for choice in choices)

    return write({}) if data is None else rewritten(data, write)
