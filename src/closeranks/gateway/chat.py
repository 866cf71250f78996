"""`/v1/chat/completions`: a conversation to a prompt, and how its answers look."""

import secrets
from typing import Any

import msgspec

from closeranks.codec import Content, Event, Reasoning, ToolCallArguments, ToolCallStart, assemble
from closeranks.codec.encoder import EncodeError, Prompt
from closeranks.gateway.choice import Choice, Entry
from closeranks.gateway.errors import Invalid
from closeranks.gateway.model import Model
from closeranks.gateway.openai import ChatRequest, Message, Tool, text_of
from closeranks.gateway.reply import json

_TAKEN = {"messages": ": it is a field of the request", "tools": ": it is a field of the request", "self": ""}
"""Variables of a chat template that are not for a request to set, and why."""


def render(
    model: Model,
    given: list[Message],
    tools: list[Tool] | None = None,
    variables: dict[str, Any] | None = None,
    effort: str | None = None,
) -> Prompt:
    """The prompt of a conversation. Raises Invalid: no template, or it refuses."""
    if model.encoder is None:
        raise Invalid("the model has no chat template: use /v1/completions, or serve it with --chat-template")
    messages = [_for_template(message) for message in given]
    if not model.shows_tools:
        messages = _with_tools(messages, tools or [])
    declared = [msgspec.to_builtins(tool, str_keys=True) for tool in tools or ()]
    variables = dict(variables or {})
    for name in _TAKEN:
        if name in variables:
            said = f"the variable {name!r} of the chat template cannot be set" + _TAKEN[name]
            raise Invalid(said, param=f"chat_template_kwargs.{name}")
    given_effort = variables.pop("reasoning_effort", None)
    if given_effort is not None and not isinstance(given_effort, str):
        raise Invalid("reasoning_effort must be a text", param="chat_template_kwargs.reasoning_effort")
    effort = effort if effort is not None else given_effort
    opens = variables.pop("thinking", effort not in (None, "none"))
    thinking = bool(variables.get("enable_thinking", opens))
    try:
        return model.encoder.encode(messages, declared, thinking=thinking, reasoning_effort=effort, **variables)
    except EncodeError as error:
        raise Invalid(str(error), param="messages", code="chat_template") from error


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates know it: without empty fields, and with the roles that they know."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    shown["content"] = text_of(message)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if message.tool_calls:
        shown["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    return shown


def _with_tools(messages: list[dict[str, Any]], tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools and calls as text of the conversation, for templates that leave them out."""
    shown = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        lines = [f"{call['function']['name']}({call['function']['arguments']})" for call in calls]
        shown.append({**message, "content": "\n".join(filter(None, (message["content"], *lines)))})
    if tools:
        declared = "\n".join(json(tool.function).decode() for tool in tools)
        said = f"You can call these functions:\n{declared}"
        if shown and shown[0]["role"] == "system":
            shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{said}"}
        else:
            shown.insert(0, {"role": "system", "content": said})
    return shown


class ChatFormat:
    """Answers of `/v1/chat/completions`. `top`: how many alternatives; None: no log-probabilities."""

    def __init__(
        self, rid: str, model: Model, name: str, created: int, top: int | None, with_usage: bool, streams: bool
    ) -> None:
        self._vocabulary = model.vocabulary
        self._id = f"chatcmpl-{rid}"
        self._name = name
        self._created = created
        self._top = top
        self._streams = streams
        head = json({"id": self._id, "object": "chat.completion.chunk", "created": created, "model": name})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._texts: dict[int, list[str]] = {}
        self._entries: dict[int, list[Entry]] = {}
        self._events: dict[int, list[Event]] = {}

    def start(self, choice: Choice) -> bytes:
        return self._event(choice.index, b'{"role":"assistant","content":""}')

    def text(self, choice: Choice, text: str, entries: list[Entry]) -> bytes:
        if not self._streams:
            self._texts.setdefault(choice.index, []).append(text)
            self._entries.setdefault(choice.index, []).extend(entries)
            return b""
        logprobs = b"null" if self._top is None else json(self._logprobs(entries))
        return self._event(choice.index, b'{"content":' + json(text) + b"}", logprobs)

    def events(self, choice: Choice, events: list[Event], entries: list[Entry]) -> bytes:
        """What a decoder made of the tokens. Log-probabilities go with the first event."""
        if not self._streams:
            self._events.setdefault(choice.index, []).extend(events)
            self._entries.setdefault(choice.index, []).extend(entries)
            return b""
        logprobs = b"null" if self._top is None else json(self._logprobs(entries))
        shown = []
        for delta in map(_delta, events):
            if delta:
                shown.append(self._event(choice.index, json(delta), logprobs))
                logprobs = b"null"
        if entries and not shown and self._top is not None:
            shown.append(self._event(choice.index, b'{"content":""}', logprobs))
        return b"".join(shown)

    def finish(self, choice: Choice) -> bytes:
        reason = json(choice.finish_reason)
        more = b',"stop_reason":' + json(choice.matched)
        if choice.token_ids is not None:
            more += b',"token_ids":' + json(choice.token_ids)
        return self._event(choice.index, b"{}", b"null", reason, more)

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'],"usage":' + json(usage) + b"}\n\n"

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": None if self._top is None else self._logprobs(self._entries.get(choice.index, [])),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.matched,
                **choice.shown_ids(),
            }
            for choice in choices
        ]
        body = {"id": self._id, "object": "chat.completion", "created": self._created, "model": self._name}
        return json({**body, "choices": shown, "usage": usage})

    def _message(self, choice: Choice) -> dict[str, Any]:
        events = self._events.get(choice.index)
        if events is None:
            return {"role": "assistant", "content": "".join(self._texts.get(choice.index, ()))}
        turn = assemble(events)
        content = turn.content or (None if turn.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.tool_calls
            ]
        return message

    def _event(
        self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null", more: bytes = b""
    ) -> bytes:
        body = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, reason, more)
        return self._head + body + self._tail

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(token, logprobs.chosen),
                    "top_logprobs": [self._token(other, value) for other, value in logprobs.top[: self._top]],
                }
                for _, token, logprobs in entries
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._vocabulary.bytes_of(token)
        return {"token": piece.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def _delta(event: Event) -> dict[str, Any]:
    """An event as a chunk's `delta`; empty for those that clients are not told."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, name):
            call = {"index": index, "id": _call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolCallArguments(index, piece):
            return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
    return {}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def top_logprobs(request: ChatRequest) -> int | None:
    """How many alternatives a request asks for; None: no log-probabilities at all."""
    return (request.top_logprobs or 0) if request.logprobs else None
