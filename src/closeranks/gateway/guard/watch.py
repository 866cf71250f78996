"""A chat answer as a stream, watched: bytes in, bytes out, without any input or output of its own.

Each event goes through the decoders of its choices. As long as these release what they were given, the upstream's own
events are forwarded, byte for byte and in order; an event whose end is held back (it might begin markup) waits, with
all that follow, until that is decided. Where a decoder takes markup away or makes a call of it, the events concerned
are written anew; their other members stay as they were.

In memory at any time: one unfinished event (`max_event` bytes), the events that wait (`max_waiting` bytes; beyond, they
are written anew with what is decided), and what the decoders hold.
"""

from collections import deque

from closeranks.gateway.guard.arguments import ArgumentScan
from closeranks.gateway.guard.choice import ChoiceWatch, OpenDecoder
from closeranks.gateway.guard.chunk import Choice, Delta, Text, read_answer, reasoning_of
from closeranks.gateway.guard.counters import Counters
from closeranks.gateway.guard.rewrite import event_like, rewrite_event
from closeranks.gateway.guard.sse import EventSplitter, Fragment, data_of, new_event

MAX_CHOICES = 128


class StreamWatch:
    """`feed` upstream bytes, send what it returns; at the end, `close`.

    `report_only`: everything is forwarded as it came and leaks are counted only.
    """

    def __init__(
        self,
        open_decoder: OpenDecoder,
        counters: Counters,
        *,
        model: str = "",
        report_only: bool = False,
        max_event: int = 1 << 20,
        max_waiting: int = 1 << 18,
    ) -> None:
        self._splitter = EventSplitter(max_event)
        self._open = open_decoder
        self._counters = counters
        self._model = model
        self._report_only = report_only
        self._max_waiting = max_waiting
        self._choices: dict[int, ChoiceWatch] = {}
        self._scans: dict[int, ArgumentScan] = {}
        self._waiting: deque[tuple[bytes, ChoiceWatch | None, int, int]] = deque()  # event, whose, index, mark
        self._waiting_bytes = 0
        self._out: list[bytes] = []
        self._finished: set[int] = set()
        self._reasoning: tuple[str, ...] = ("reasoning_content",)  # the names under which the upstream sends it
        self._last_event = b""  # the last that had choices: the model for one that the upstream did not send
        self.ended = False  # whether the upstream said [DONE]

    @property
    def complete(self) -> bool:
        """Whether the answer came to its end: [DONE], or a finish reason for every choice that was seen."""
        return self.ended or bool(self._choices.keys() <= self._finished and self._finished)

    @property
    def cut(self) -> bool:
        """Whether what was fed so far ends within an event of a chat."""
        data = data_of(self._splitter.rest) if self._choices else None
        return data is not None and not data.startswith(b"[DONE]") and read_answer(data) is None

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the upstream's body; the bytes to send on, perhaps none yet."""
        for event in self._splitter.feed(data):
            self._event(event)
        return self._take()

    def close(self, error: bytes | None = None) -> bytes:
        """The upstream's body has ended: the last bytes to send. `error`: JSON for an error event to end with."""
        rest = self._splitter.close()
        if rest and error is None:
            self._event(rest)
        self._end_choices()
        if error is not None:
            self._out.append(new_event(error))
        return self._take()

    def _take(self) -> bytes:
        out = self._out
        if len(out) == 1:
            self._out = []
            return out[0]
        if not out:
            return b""
        self._out = []
        return b"".join(out)

    # One event ----------------------------------------------------------------------------------------------------

    def _event(self, event: bytes) -> None:
        if isinstance(event, Fragment):
            self._counters.unwatched["event_too_large"] += 1
            self._settle()
            self._out.append(event)
            return
        data = data_of(event)
        if data is None:
            if event.lstrip(b"\r\n").startswith(b":"):  # a comment, often a sign of life: it must not wait
                self._out.append(event)
            else:
                self._pass(event)
            return
        if data.startswith(b"[DONE]"):  # all that clients look at
            self.ended = True
            self._end_choices()
            self._out.append(event)
            return
        answer = read_answer(data)
        if answer is None:
            self._counters.unwatched["event_not_json"] += 1
            self._pass(event)
            return
        if isinstance(answer.model, str):
            self._model = answer.model
        self._counters.events[self._counters.model(self._model)] += 1
        choices = answer.choices
        if not choices:
            self._pass(event)
            return
        self._last_event = event
        if len(choices) == 1:
            self._single(event, choices[0])
        else:
            self._several(event, choices)

    def _single(self, event: bytes, choice: Choice) -> None:
        """An event of one choice: the usual kind."""
        watch = self._choice(choice.index)
        if watch is None:
            self._pass(event)
            return
        indices = self._read(watch, choice)
        if self._report_only:
            watch.unsent = []
            self._out.append(event)
            return
        same_calls = not indices and not self._finish_changes(watch, choice)
        if watch.clean and same_calls:
            if watch.told == watch.given and not self._waiting:
                watch.forwarded(watch.given)
                self._out.append(event)
                return
            self._wait(event, watch, choice.index)
            return
        self._settle(watch)
        deltas = watch.deltas()
        watch.rewritten()
        if same_calls and deltas == _own_deltas(choice.delta):
            self._out.append(event)
        else:
            self._write(event, {choice.index: deltas}, {choice.index: indices})

    def _several(self, event: bytes, choices: list[Choice]) -> None:
        """An event of several choices: rare, so simply forwarded if nothing is held back at all, else written anew."""
        watches = [(choice, self._choice(choice.index)) for choice in choices]
        indices = {choice.index: self._read(watch, choice) for choice, watch in watches if watch is not None}
        known = [(choice, watch) for choice, watch in watches if watch is not None]
        plain = not self._waiting and all(
            watch.clean
            and watch.told == watch.given
            and not indices[choice.index]
            and not self._finish_changes(watch, choice)
            for choice, watch in known
        )
        if self._report_only or plain:
            for _, watch in known:
                watch.unsent = []
                watch.sent = watch.told
            self._out.append(event)
            return
        self._settle()
        deltas = {choice.index: watch.deltas() for choice, watch in known}
        for _, watch in known:
            watch.rewritten()
        self._write(event, deltas, indices)

    def _choice(self, index: int) -> ChoiceWatch | None:
        watch = self._choices.get(index)
        if watch is None:
            if len(self._choices) >= MAX_CHOICES:
                self._counters.unwatched["too_many_choices"] += 1
                return None
            action = "reported" if self._report_only else None

            def leak(field: str, shape: str, sample: str) -> None:
                done = action or ("repaired" if shape == "call" else "stripped")
                self._counters.leak(self._model, field, shape, done, sample)

            watch = self._choices[index] = ChoiceWatch(self._open, leak)
        return watch

    def _read(self, watch: ChoiceWatch, choice: Choice) -> dict[int, int]:
        """Feed what the event brings for a choice; the call indices that it must change."""
        indices: dict[int, int] = {}
        delta = choice.delta
        if delta is not None:
            reasoning, names = reasoning_of(delta)
            if names:
                self._reasoning = names
                watch.feed(True, reasoning)
            if delta.content:
                if isinstance(delta.content, str):
                    watch.feed(False, delta.content)
                else:
                    self._counters.unwatched["content_not_text"] += 1
            if delta.tool_calls:
                watch.close()
                indices = watch.native_calls(delta.tool_calls)
                self._scan(choice.index, delta)
        if choice.finish_reason is not None:
            watch.close(str(choice.finish_reason))
            self._finished.add(choice.index)
        return indices

    def _finish_changes(self, watch: ChoiceWatch, choice: Choice) -> bool:
        """Whether the finish reason must change: a call was made out of text, and the upstream does not know."""
        return choice.finish_reason == "stop" and watch.repaired > 0

    def _scan(self, index: int, delta: Text) -> None:
        scan = self._scans.get(index)
        if scan is None:
            scan = self._scans[index] = ArgumentScan()
        for shape, sample in scan.feed(delta.tool_calls or []):
            self._counters.leak(self._model, "arguments", shape, "counted", sample)

    # Holding back and writing anew --------------------------------------------------------------------------------

    def _pass(self, event: bytes) -> None:
        """Forward an event that holds no text, after those that wait."""
        if self._waiting:
            self._waiting.append((event, None, 0, 0))
            self._bound_waiting(event)
        else:
            self._out.append(event)

    def _wait(self, event: bytes, watch: ChoiceWatch, index: int) -> None:
        self._waiting.append((event, watch, index, watch.given))
        self._forward_decided()
        self._bound_waiting(event)

    def _forward_decided(self) -> None:
        """Forward the waiting events, up to the first whose text is still held back."""
        waiting = self._waiting
        while waiting:
            raw, owner, _, mark = waiting[0]
            if owner is not None:
                if owner.told < mark or not owner.clean:
                    return
                owner.forwarded(mark)
            self._waiting_bytes -= len(raw)
            self._out.append(raw)
            waiting.popleft()

    def _bound_waiting(self, event: bytes) -> None:
        self._waiting_bytes += len(event)
        if self._waiting_bytes > self._max_waiting:
            self._settle()

    def _settle(self, current: ChoiceWatch | None = None) -> None:
        """Write the waiting events anew, with what their decoders have released.

        All that a choice has released goes into the last of its events that wait, or is left for the event that is
        being read, if that is its (`current`). Among events that leave together the place makes no difference.
        """
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        last = {owner: number for number, (_, owner, _, _) in enumerate(waiting)}
        for number, (raw, owner, index, _) in enumerate(waiting):
            if owner is None:
                self._out.append(raw)
                continue
            deltas: list[Delta] = []
            if owner is not current and last[owner] == number:
                deltas = owner.deltas()
                owner.rewritten()
            self._write(raw, {index: deltas}, {})

    def _write(self, event: bytes, deltas: dict[int, list[Delta]], indices: dict[int, dict[int, int]]) -> None:
        finish = {index for index in deltas if self._choices[index].repaired}
        self._counters.rewritten += 1
        self._out.append(rewrite_event(event, deltas, indices, finish, self._reasoning))

    def _end_choices(self) -> None:
        """No more text will come: send what the decoders hold."""
        for watch in self._choices.values():
            watch.close()
        self._forward_decided()
        self._settle()
        for index, watch in self._choices.items():
            deltas = watch.deltas()
            watch.rewritten()
            if deltas and not self._report_only:
                self._counters.rewritten += 1
                self._out.append(event_like(self._last_event, index, deltas, self._reasoning))


def _own_deltas(delta: Text | None) -> list[Delta]:
    """What an event brings, in the form of `ChoiceWatch.deltas`."""
    if delta is None:
        return []
    deltas = []
    if reasoning := reasoning_of(delta)[0]:
        deltas.append({"reasoning_content": reasoning})
    if delta.content and isinstance(delta.content, str):
        deltas.append({"content": delta.content})
    return deltas
