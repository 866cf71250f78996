"""The answer to one HTTP request: its choices, what is ready to be sent, and its end.

Formats (`chat`, `completions`) turn text into bytes; `Reply` gathers them, either as server-sent events as they come
or as one JSON body at the end, and wakes the task that writes to the client.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from closeranks.gateway.choice import Choice, Entry
from closeranks.gateway.errors import ApiError, from_end
from closeranks.gateway.resume import End

DONE = b"data: [DONE]\n\n"
json = msgspec.json.Encoder().encode


class Format(Protocol):
    """How one kind of answer looks."""

    def start(self, choice: Choice) -> bytes:
        """The event before a choice's first text."""

    def text(self, choice: Choice, text: str, entries: list[Entry]) -> bytes:
        """The event with a piece of text; empty where the answer is not streamed."""

    def finish(self, choice: Choice) -> bytes:
        """The events that end a choice."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event with the usage."""

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """The body of an answer in one piece."""


@dataclass(slots=True)
class Timing:
    """Clock readings of a reply, for metrics and the log."""

    began: float
    first: float = 0.0
    """When its first token came, shown or not (markup of a tool call is not)."""
    last: float = 0.0


@dataclass(slots=True, eq=False)
class Reply:
    """Listens to its choices; written out by one task (`stream.respond`)."""

    rid: str
    format: Format
    streams: bool
    with_usage: bool
    with_ids: bool
    prompt_tokens: int
    timing: Timing
    clock: Callable[[], float]
    choices: list[Choice] = field(default_factory=list)
    error: ApiError | None = None
    done: bool = False
    gone: bool = False
    """The client left."""
    written: float = 0.0
    """When something was last written to the client."""
    ready: list[bytes] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _open: int = 0
    _started: set[int] = field(default_factory=set)

    def add(self, choice: Choice) -> None:
        self.choices.append(choice)
        self._open += 1

    def on_tokens(self, choice: Choice) -> None:
        now = self.clock()
        self.timing.first = self.timing.first or now
        self.timing.last = now

    def on_text(self, choice: Choice, text: str, entries: list[Entry]) -> None:
        self.on_bytes(choice, self.format.text(choice, text, entries))

    def on_bytes(self, choice: Choice, data: bytes) -> None:
        if self.streams and data and not self.done:  # an answer that another choice's error ended, has ended
            if choice.index not in self._started:
                self._start(choice)
            self.ready.append(data)
            self.wake.set()

    def on_finish(self, choice: Choice, end: End) -> None:
        self._open -= 1
        if self.done:
            return
        if end.reason not in ("stop", "length"):
            self.fail(from_end(end, self.rid))
            return
        if self.streams:
            if choice.index not in self._started:
                self._start(choice)
            self.ready.append(self.format.finish(choice))
        if self._open == 0:
            if not self.streams:
                self.ready.append(self.format.whole(self.choices, self.usage()))
            else:
                if self.with_usage:
                    self.ready.append(self.format.usage(self.usage()))
                self.ready.append(DONE)
            self.done = True
        self.wake.set()

    def fail(self, error: ApiError) -> None:
        """End the answer with an error: as a status, or, where the stream has begun, as its last event."""
        if self.done:
            return
        self.error = error
        self.done = True
        if self.streams:
            self.ready.append(b"data: " + error.body() + b"\n\n" + DONE)
        self.wake.set()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.wake.set()

    def comment(self, text: bytes) -> None:
        """A line that clients skip, to show that the stream lives."""
        if self.done:
            return
        self.ready.append(b": " + text + b"\n\n")
        self.wake.set()

    def take(self) -> bytes:
        """What is to be written now."""
        data = b"".join(self.ready)
        self.ready.clear()
        return data

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage: each prompt once, each emitted token once, over all attempts."""
        output = self.output_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": max((c.cached_tokens for c in self.choices), default=0)},
        }

    def _start(self, choice: Choice) -> None:
        self._started.add(choice.index)
        event = self.format.start(choice)
        if event:
            self.ready.append(event)
