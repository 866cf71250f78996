"""A choice whose tokens go through the codec: reasoning and tool calls apart from content, and no markup gets out.

The decoder reads token ids, so that where the model has markers of its own only they are markup. With stop strings it
reads text, since a stop string may end inside a token.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from closeranks.codec import Decoder, Discarded, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from closeranks.gateway.choice import NO_GRAMMAR, Choice, Entry, Listener
from closeranks.gateway.detokenize import Vocabulary
from closeranks.gateway.resume import End
from closeranks.protocol import TopLogprobs


class DecodedChoice(Choice):
    """See `Choice`. `calls`: committed tool calls; `discarded`: characters by reason that came out nowhere."""

    __slots__ = ("_as_text", "_decoder", "_single", "_write", "calls", "discarded")

    def __init__(
        self,
        index: int,
        listener: Listener,
        vocabulary: Vocabulary,
        stops: list[str],
        stop_ids: Iterable[int],
        cut_off: Callable[[int], None],
        keep_ids: bool,
        decoder: Decoder,
        write: Callable[[Choice, list[Event], list[Entry]], bytes],
        single: bool,
        as_text: bool = False,
    ) -> None:
        """`write` makes bytes for the client; `single`: the turn ends with its first call (`parallel_tool_calls`).

        `as_text`: the decoder reads text, since a grammar guarantees that what looks like markup is markup.
        """
        super().__init__(index, listener, vocabulary, stops, stop_ids, cut_off, False, keep_ids)
        self._decoder = decoder
        self._write = write
        self._single = single
        self._as_text = as_text
        self.calls = 0
        self.discarded: Counter[str] = Counter()

    def on_tokens(self, tokens: list[int], logprobs: list[TopLogprobs]) -> None:
        if self.finish_reason is not None:
            return
        self._count(tokens)
        ids = []
        for i, token in enumerate(tokens):
            if token in self._stop_ids:
                self.matched = token
                continue
            if logprobs:
                self._entries.append((0, token, logprobs[i]))
            ids.append(token)
        if self._stops is None and not self._as_text:
            self._tell(self._decoder.feed(ids) if ids else [])
        else:
            text = "".join(map(self._detokenizer.feed, ids))
            self._tell(self._decoder.feed(text if self._stops is None else self._stops.feed(text)))
        stopped = self._stops is not None and self._stops.matched is not None
        if stopped and self._stops is not None:
            self.matched = self._stops.matched
        if stopped or (self._single and self.calls):
            self._cut_off(self.request_id)
            self._close(End("stop", cached_tokens=self.cached_tokens))

    def on_end(self, end: End) -> None:
        if self.finish_reason is not None:
            return
        self.cached_tokens = end.cached_tokens
        if end.reason in ("stop", "length"):
            if self._stops is not None:
                text = self._stops.feed(self._detokenizer.close())
                self._tell(self._decoder.feed(text + self._stops.close()))
            elif self._as_text:
                self._tell(self._decoder.feed(self._detokenizer.close()))
            self._close(end)
        else:
            self._finish(end)

    def _close(self, end: End) -> None:
        if not (self._single and self.calls):  # else what follows the call was never asked for
            self._tell(self._decoder.close(end.reason), last=True)
        self._finish(end)

    def _tell(self, events: list[Event], last: bool = False) -> None:
        shown: list[Event] = []
        for event in events:
            if isinstance(event, Discarded):
                self.discarded[event.reason] += len(event.text)
                continue
            if isinstance(event, ToolCallStart | ToolCallArguments | ToolCallEnd):
                if self._single and event.index > 0:
                    self.discarded["parallel_tool_calls"] += len(getattr(event, "delta", ""))
                    continue
                if isinstance(event, ToolCallEnd):
                    self.calls += event.complete
            shown.append(event)
        if shown or (last and self._entries):
            entries = list(self._entries)
            self._entries.clear()
            self._listener.on_bytes(self, self._write(self, shown, entries))

    def _finish(self, end: End) -> None:
        if end.reason == "stop" and self._failed(self.calls):
            end = NO_GRAMMAR
        self.finish_reason = "tool_calls" if self.calls and end.reason == "stop" else end.reason
        self._listener.on_finish(self, end)
