"""A chat answer in one piece (`"stream": false`), watched: the same decoders, fed whole."""

from typing import Any

from closeranks.gateway.guard.arguments import ArgumentScan
from closeranks.gateway.guard.choice import ChoiceWatch, OpenDecoder
from closeranks.gateway.guard.chunk import (
    TEXT_FIELDS,
    Choice,
    Delta,
    choices_of,
    dump,
    is_null,
    is_stop,
    items_of,
    members_of,
    read_answer,
    reasoning_of,
    rewritten,
)
from closeranks.gateway.guard.counters import Counters


def watch_body(
    body: bytes, open_decoder: OpenDecoder, counters: Counters, *, model: str = "", report_only: bool = False
) -> bytes:
    """`body` with leaked calls repaired and other markup stripped; the very same bytes if there was none."""
    answer = read_answer(body)
    if answer is None:
        counters.unwatched["body_not_json"] += 1
        return body
    if isinstance(answer.model, str):
        model = answer.model
    changed: dict[int, tuple[ChoiceWatch, list[Delta]]] = {}
    for place, choice in enumerate(answer.choices or ()):
        watch = _watch_choice(choice, open_decoder, counters, model, report_only)
        if not watch.clean:
            changed[place] = (watch, watch.deltas())
    if not changed or report_only:
        return body

    def write(top: dict[str, Any]) -> bytes:
        choices = [raw for _, _, raw in choices_of(top)]
        for place, (watch, deltas) in changed.items():
            choices[place] = _rewrite(members_of(choices[place]), deltas, watch.repaired > 0)
        return dump({**top, "choices": choices})

    return rewritten(body, write)


def _watch_choice(
    choice: Choice, open_decoder: OpenDecoder, counters: Counters, model: str, report_only: bool
) -> ChoiceWatch:
    def leak(field: str, shape: str, sample: str) -> None:
        action = "reported" if report_only else "repaired" if shape == "call" else "stripped"
        counters.leak(model, field, shape, action, sample)

    watch = ChoiceWatch(open_decoder, leak)
    message = choice.message
    if message is None:
        return watch
    if reasoning := reasoning_of(message)[0]:
        watch.feed(True, reasoning)
    if message.content:
        if isinstance(message.content, str):
            watch.feed(False, message.content)
        else:
            counters.unwatched["content_not_text"] += 1
    watch.close(str(choice.finish_reason))
    watch.only_committed()
    for shape, sample in ArgumentScan().feed(message.tool_calls or []):
        counters.leak(model, "arguments", shape, "counted", sample)
    return watch


def _rewrite(choice: dict[str, Any], deltas: list[Delta], repaired: bool) -> dict[str, Any]:
    message = members_of(choice["message"])
    text: dict[str, str] = {"reasoning_content": "", "content": ""}
    calls: list[Any] = []
    for delta in deltas:
        for field in text:
            text[field] += delta.get(field, "")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({key: value for key, value in piece.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    for field in TEXT_FIELDS:
        new = text["content" if field == "content" else "reasoning_content"]
        if field in message and not is_null(message[field]):
            message[field] = None if field == "content" and calls and not new else new
        elif new and (field == "content" or (field == "reasoning_content" and "reasoning" not in message)):
            message[field] = new
    if calls:
        message["tool_calls"] = [*calls, *items_of(message.get("tool_calls"))]
    choice = {**choice, "message": message}
    if repaired and is_stop(choice.get("finish_reason")):
        choice["finish_reason"] = "tool_calls"
    if "logprobs" in choice:
        choice["logprobs"] = None
    return choice
