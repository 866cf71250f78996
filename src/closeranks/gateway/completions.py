"""`/v1/completions`: prompts in, and how its answers look."""

from typing import Any

from closeranks.gateway.choice import Choice, Entry
from closeranks.gateway.detokenize import Vocabulary
from closeranks.gateway.errors import Invalid
from closeranks.gateway.model import Model
from closeranks.gateway.openai import MAX_CHOICES, CompletionRequest
from closeranks.gateway.reply import json


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request: a text, token ids, or a list of either. Raises Invalid."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise Invalid("prompt is empty", param="prompt")
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > MAX_CHOICES:
        raise Invalid(f"{len(given)} prompts; at most {MAX_CHOICES} are allowed", param="prompt")
    found: list[str | list[int]] = []
    for i, item in enumerate(given):
        if isinstance(item, str) or (isinstance(item, list) and item and all(type(t) is int for t in item)):
            found.append(item)
        else:
            raise Invalid("a prompt is a text or a list of token ids", param=f"prompt[{i}]")
    return found


class CompletionFormat:
    """Answers of `/v1/completions`. `logprobs`: None, or how many alternatives were asked for."""

    def __init__(
        self, rid: str, model: Model, name: str, created: int, logprobs: int | None, with_usage: bool, streams: bool
    ) -> None:
        self._vocabulary = model.vocabulary
        self._id = f"cmpl-{rid}"
        self._name = name
        self._created = created
        self._logprobs = logprobs
        self._streams = streams
        head = json({"id": self._id, "object": "text_completion", "created": created, "model": name})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._texts: dict[int, list[str]] = {}
        self._entries: dict[int, list[Entry]] = {}

    def start(self, choice: Choice) -> bytes:
        return b""

    def text(self, choice: Choice, text: str, entries: list[Entry]) -> bytes:
        if not self._streams:
            self._texts.setdefault(choice.index, []).append(text)
            self._entries.setdefault(choice.index, []).extend(entries)
            return b""
        logprobs = b"null" if self._logprobs is None else json(self._legacy(entries))
        body = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (choice.index, json(text), logprobs)
        return self._head + body + self._tail

    def finish(self, choice: Choice) -> bytes:
        end = {"index": choice.index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}
        return self._head + json({**end, "stop_reason": choice.matched, **choice.shown_ids()}) + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'],"usage":' + json(usage) + b"}\n\n"

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        shown = [
            {
                "index": choice.index,
                "text": "".join(self._texts.get(choice.index, ())),
                "logprobs": None if self._logprobs is None else self._legacy(self._entries.get(choice.index, [])),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.matched,
                **choice.shown_ids(),
            }
            for choice in choices
        ]
        body = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._name}
        return json({**body, "choices": shown, "usage": usage})

    def _legacy(self, entries: list[Entry]) -> dict[str, Any]:
        """Log-probabilities as completions had them before chat: parallel lists."""
        spell = self._vocabulary
        return {
            "tokens": [spelling(spell, token) for _, token, _ in entries],
            "token_logprobs": [max(logprobs.chosen, -9999.0) for _, _, logprobs in entries],
            "top_logprobs": [
                {spelling(spell, other): max(value, -9999.0) for other, value in logprobs.top[: self._logprobs]}
                for _, _, logprobs in entries
            ],
            "text_offset": [offset for offset, _, _ in entries],
        }


def spelling(vocabulary: Vocabulary, token: int) -> str:
    """A token as a dictionary key: its text, or its bytes where they are no text."""
    piece = vocabulary.bytes_of(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in piece)
