"""One choice of an answer: its text through a decoder, and whether what came out is just what went in.

A choice is *clean* while all that its decoder released is, character for character, a prefix of what it was given:
then the upstream's own bytes can be forwarded. The first discard or call, or text that changes its field, makes it
dirty: from there on its events are written anew, until its decoder is closed and the next one starts clean.
"""

from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

from closeranks.codec import (
    Content,
    Decoder,
    Discarded,
    Event,
    Reasoning,
    State,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from closeranks.gateway.guard.chunk import Call, Delta, without_surrogates

OpenDecoder = Callable[[bool], Decoder]
"""Makes the decoder for a run of text: True for reasoning, False for content."""

Leak = Callable[[str, str, str], None]
"""Called for each leak with the field that it was in, its shape, and the raw text around it."""

_PROSE = (State.CONTENT, State.REASONING)
_SAMPLE = 400
_MAX_CALLS = 1024  # of one choice; beyond, indices are left alone (an upstream cannot make this grow)


class ChoiceWatch:
    """The state of one choice.

    `given` and `told` count characters of text taken and (while clean) released; `unsent` is what was released and
    has not been sent yet; `repaired` counts the calls that were made out of text.
    """

    __slots__ = (
        "_decoder",
        "_first_call",
        "_held",
        "_index_of",
        "_leak",
        "_next_call",
        "_open",
        "_own",
        "_reason",
        "_recent",
        "_thinking",
        "clean",
        "given",
        "repaired",
        "sent",
        "told",
        "unsent",
    )

    def __init__(self, open_decoder: OpenDecoder, leak: Leak) -> None:
        self._open = open_decoder
        self._leak = leak
        self._decoder: Decoder | None = None
        self._thinking = False
        self._held = ""  # while clean: text given and not released, all of it of one field
        self._recent = ""  # the raw text of the last few events, for samples
        self._reason = ""  # of the discard that is going on
        self._first_call = 0  # the index of the current decoder's call 0
        self._next_call = 0  # the next index that no call has
        self._own: set[int] = set()  # indices of calls made here
        self._index_of: dict[int, int] = {}  # the upstream's index of a call -> ours
        self.clean = True
        self.given = self.told = self.sent = 0
        self.unsent: list[Event] = []
        self.repaired = 0

    def feed(self, thinking: bool, text: str) -> None:
        """Take text of the reasoning (thinking) or the content field."""
        if self._decoder is None or thinking != self._thinking:
            self.close()
            self._decoder = self._open(thinking)
            self._thinking = thinking
            self._first_call = self._next_call
        text = without_surrogates(text)
        events = self._decoder.feed(text)
        self.given += len(text)
        if self.clean and not self._held and len(events) == 1:  # by far the most frequent: plain text, out at once
            event = events[0]
            if type(event) is (Reasoning if thinking else Content) and event.text == text:
                self.told = self.given
                self.unsent.append(event)
                self._recent = text
                return
        self._recent = (self._recent + text)[-_SAMPLE:]
        if self.clean:
            self._held += text
        self._account(events)

    def close(self, finish_reason: str = "stop") -> None:
        """End the run of text: what the decoder still holds back is decided now."""
        if self._decoder is None:
            return
        decoder, self._decoder = self._decoder, None
        self._account(decoder.close(finish_reason))
        if self._held:
            self.clean = False
            self._held = ""
        self._recent = ""

    def _account(self, events: list[Event]) -> None:
        own = Reasoning if self._thinking else Content
        for event in events:
            if self._first_call and isinstance(event, (ToolCallStart, ToolCallArguments, ToolCallEnd)):
                event = replace(event, index=self._first_call + event.index)
            self.unsent.append(event)
            if type(event) is own:
                if self.clean:
                    if self._held.startswith(event.text):
                        self._held = self._held[len(event.text) :]
                        self.told += len(event.text)
                    else:
                        self.clean = False
                continue
            self.clean = False
            self._found(event)
        if not self.clean:
            self._held = ""

    def _found(self, event: Event) -> None:
        """Report a leak once, however many pieces it arrives in."""
        if isinstance(event, Discarded):
            if event.reason != self._reason:
                self._leak(self.field, event.reason, self._recent)
            self._reason = event.reason
            return
        self._reason = ""
        if isinstance(event, ToolCallStart):
            self._own.add(event.index)
            self._next_call = max(self._next_call, event.index + 1)
        elif isinstance(event, ToolCallEnd):
            self.repaired += event.complete
            self._leak(self.field, "call" if event.complete else event.reason, self._recent)

    @property
    def field(self) -> str:
        """The field that is being read."""
        return "reasoning_content" if self._thinking else "content"

    def forwarded(self, upto: int) -> None:
        """The upstream's own events were forwarded up to the character count `upto`: drop that much of `unsent`."""
        rest = upto - self.sent
        self.sent = upto
        if upto == self.told:
            self.unsent.clear()
            return
        while rest:
            event = self.unsent[0]
            assert isinstance(event, (Content, Reasoning))
            if len(event.text) <= rest:
                rest -= len(event.text)
                del self.unsent[0]
            else:
                self.unsent[0] = type(event)(event.text[rest:])
                rest = 0

    def rewritten(self) -> None:
        """What was unsent has been written. The choice is clean again if its decoder keeps nothing back."""
        self.unsent = []
        decoder = self._decoder
        self.clean = decoder is None or (decoder.held == 0 and decoder.state in _PROSE)
        self.told = self.sent = self.given
        self._held = ""

    def deltas(self) -> list[Delta]:
        """What is unsent as deltas in order, neighbours of one field joined."""
        deltas: list[Delta] = []
        for event in self.unsent:
            if isinstance(event, (Content, Reasoning)):
                field = "content" if isinstance(event, Content) else "reasoning_content"
                if deltas and field in deltas[-1]:
                    deltas[-1][field] += event.text
                else:
                    deltas.append({field: event.text})
            elif isinstance(event, ToolCallStart):
                function = {"name": event.name, "arguments": ""}
                call = {
                    "index": event.index,
                    "id": f"call_{uuid4().hex[:24]}",
                    "type": "function",
                    "function": function,
                }
                deltas.append({"tool_calls": [call]})
            elif isinstance(event, ToolCallArguments):
                last = deltas[-1].get("tool_calls") if deltas else None
                if last and last[0]["index"] == event.index:
                    last[0]["function"]["arguments"] += event.delta
                else:
                    deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.delta}}]})
        return deltas

    def only_committed(self) -> None:
        """Drop from `unsent` the calls that were begun and not committed (nothing of them was sent yet)."""
        committed = {event.index for event in self.unsent if isinstance(event, ToolCallEnd) and event.complete}
        calls = (ToolCallStart, ToolCallArguments)
        self.unsent = [e for e in self.unsent if not isinstance(e, calls) or e.index in committed]

    def native_calls(self, calls: list[Call]) -> dict[int, int]:
        """Take the upstream's own calls: the indices that must change, because the guard's calls hold them."""
        changed = {}
        for index in (call.index for call in calls if isinstance(call.index, int)):
            ours = self._index_of.get(index)
            if ours is None:
                if len(self._index_of) >= _MAX_CALLS:
                    continue
                taken = index in self._own or index in self._index_of.values()
                ours = self._index_of[index] = self._next_call if taken else index
                self._next_call = max(self._next_call, ours + 1)
            if ours != index:
                changed[index] = ours
        return changed
