"""One choice of an answer: tokens come in, text without stop strings and special tokens goes out.

Log-probabilities go with the text that their tokens make: an entry is released when the text before its token is, and
dropped if a stop string cuts that text off.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from closeranks.gateway.detokenize import Detokenizer, Vocabulary
from closeranks.gateway.resume import End
from closeranks.gateway.stops import Stops
from closeranks.protocol import TopLogprobs

Entry = tuple[int, int, TopLogprobs]
"""(where in the text the token begins, token, log-probabilities)."""


NO_GRAMMAR = End("grammar", "the engine could not hold the answer to the form that was asked for")


class Listener(Protocol):
    """Who writes the answer down."""

    def on_tokens(self, choice: "Choice") -> None:
        """Tokens have come; whether any text follows from them is not known yet."""

    def on_text(self, choice: "Choice", text: str, entries: list[Entry]) -> None:
        """Text to be shown, in order; either may be empty."""

    def on_bytes(self, choice: "Choice", data: bytes) -> None:
        """The same, already written as the client gets it (empty: it is kept for the whole answer)."""

    def on_finish(self, choice: "Choice", end: End) -> None:
        """The choice has ended; nothing follows."""


class Choice:
    """A `resume.Sink` that turns tokens into text for a `Listener`."""

    __slots__ = (
        "_cut_off",
        "_detokenizer",
        "_entries",
        "_fed",
        "_listener",
        "_stop_ids",
        "_stops",
        "cached_tokens",
        "finish_reason",
        "index",
        "matched",
        "must",
        "output_tokens",
        "released",
        "request_id",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        listener: Listener,
        vocabulary: Vocabulary,
        stops: list[str],
        stop_ids: Iterable[int],
        cut_off: Callable[[int], None],
        skip_special: bool = True,
        keep_ids: bool = False,
    ) -> None:
        """`cut_off(request_id)` is called when a stop string ends the request from this side."""
        self.index = index
        self.request_id = 0
        self._listener = listener
        self._detokenizer = Detokenizer(vocabulary, skip_special)
        self._stops = Stops(stops) if stops else None
        self._stop_ids = frozenset(stop_ids)
        self._cut_off = cut_off
        self._entries: deque[Entry] = deque()
        self._fed = 0
        self.released = 0
        """Characters shown so far."""
        self.output_tokens = 0
        self.token_ids: list[int] | None = [] if keep_ids else None
        """The sampled tokens, where the client asked for them."""
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.matched: str | int | None = None
        """The stop string or stop token that ended it."""
        self.must: Literal["", "call", "text"] = ""
        """What the answer must have when it ends by itself (see `guide.Guide`)."""

    def shown_ids(self) -> dict[str, list[int]]:
        """`token_ids`, for requests with `return_token_ids` (in a stream: with its last chunk)."""
        return {} if self.token_ids is None else {"token_ids": self.token_ids}

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None:
        if self.finish_reason is not None:
            return
        self._count(tokens)
        feed = self._detokenizer.feed
        text = ""
        for i, token in enumerate(tokens):
            if token in self._stop_ids:
                self.matched = token
                continue
            if logprobs:
                self._entries.append((self._fed + len(text), token, logprobs[i]))
            text += feed(token)
        self._fed += len(text)
        if self._stops is not None:
            text = self._stops.feed(text)
            if self._stops.matched is not None:
                self.matched = self._stops.matched
                self._release(text, last=True)
                self._cut_off(self.request_id)
                self._finish(End("stop", cached_tokens=self.cached_tokens))
                return
        if text or self._entries:
            self._release(text)

    def on_end(self, end: End) -> None:
        if self.finish_reason is not None:
            return
        self.cached_tokens = end.cached_tokens
        if end.reason in ("stop", "length"):
            text = self._detokenizer.close()
            if self._stops is not None:
                text = self._stops.feed(text)
                if self._stops.matched is not None:
                    self.matched = self._stops.matched
                    end = End("stop", cached_tokens=end.cached_tokens)
                else:
                    text += self._stops.close()
            self._release(text, last=True)
        self._finish(end)

    def _count(self, tokens: list[int]) -> None:
        self.output_tokens += len(tokens)
        self._listener.on_tokens(self)
        if self.token_ids is not None:
            self.token_ids += tokens

    def _release(self, text: str, last: bool = False) -> None:
        self.released += len(text)
        entries: list[Entry] = []
        cut = self._stops is not None and self._stops.matched is not None
        while self._entries and (self._entries[0][0] < self.released or (last and not cut)):
            entries.append(self._entries.popleft())
        if text or entries:
            self._listener.on_text(self, text, entries)

    def _failed(self, calls: int = 0) -> bool:
        """The grammar would not have let it end like this: the engine could not apply it."""
        if isinstance(self.matched, str) or not self.must:
            return False
        return calls == 0 if self.must == "call" else self.output_tokens <= 1

    def _finish(self, end: End) -> None:
        if end.reason == "stop" and self._failed():
            end = NO_GRAMMAR
        self.finish_reason = end.reason
        self._listener.on_finish(self, end)
