"""Prose: content, reasoning, and text after a call. What is text, what is markup, and that no deletion makes markup.

Deleting a marker joins the text around it, and the join can be a marker itself (`</th</think>ink>`). So text that may
begin one is held while it stands before a marker, and read again together with what follows (`_splice`). What is held
is bounded; where the bound, or an earlier release, lets a beginning go, `_say_guarded` drops the character that would
complete it.
"""

from closeranks.codec.core import PLAIN_KINDS, PROSE, Core
from closeranks.codec.events import Content, Reasoning
from closeranks.codec.lexicon import HEAD_LIMIT, Kind, Marker
from closeranks.codec.machine import CHAIN_LIMIT, NEWLINES, State

_TAGS_ON_OWN_LINE = {
    Kind.WRAP_CLOSE,
    Kind.INVOKE_CLOSE,
    Kind.PARAM_CLOSE,
    Kind.PARAM_CLOSE_BAD,
    Kind.OTHER_CLOSE,
    Kind.INVOKE_BAD,
    Kind.PARAM_BAD,
}
_LOOSE = {"bars", "plain"}


class Prose(Core):
    """The states CONTENT, REASONING and AFTER."""

    def _step_prose(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        found = self._head.search(buffer, at)
        if found is None:
            return self._end_of_prose(final)
        start = found.start()
        if self._joint:
            self._at = at = self._join(at, start)
        hold = self._hold_from(at, start)
        if hold > at:
            self._say(buffer[at:hold])
            self._at = hold
        self._chain_cut = hold <= start - CHAIN_LIMIT
        if not final and self._lexicon.may_grow(buffer, found):
            return False
        group = found.lastgroup or ""
        self._before = self._joint + buffer[hold:start]
        if (self._quotes or group in _LOOSE) and self._is_quoted(group, found.end()):
            # a look-alike's run of bars may end in the first bar of a real marker, which is judged by itself
            end = start + 1 if group in _LOOSE else found.end()
            self._say(self._unjoin() + buffer[hold:end])
            self._at = end
            return True
        if group in PLAIN_KINDS:
            marker: Marker | None = Marker(PLAIN_KINDS[group], start, found.end())
        elif group == "real":
            marker = self._lexicon.read_tag(buffer, found, final)
        else:
            opens: bool | None = buffer[start + 1] == "/" and group in self._loose
            if not opens and buffer[start + 1] != "/":
                opens = self._lexicon.opens_invoke(buffer, start, group, final)
            if opens is None:
                return False
            if not opens:
                self._say(self._unjoin() + buffer[hold : start + 1])
                self._at = start + 1
                return True
            marker = self._lexicon.read_tag(buffer, found, final)
            if marker is not None and buffer[start + 1] != "/":
                self._family = group
                self._loose.add(group)
        if marker is None:
            return False
        self._at = marker.end
        self._joint = ""
        self._act(marker)
        return True

    def _end_of_prose(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        begun = len(buffer) if final else self._begun_from(self._begun, at)
        if self._joint:
            self._at = at = self._join(at, begun)
            if self._joint and not final:
                return False
            self._say(self._unjoin())
        if not final:
            hold = self._hold_from(at, begun)
            if hold > at:
                self._say(buffer[at:hold])
                self._at = hold
            return False
        strict = self._begun_from(self._lexicon.strict_begun, at)
        tail = buffer[strict:]
        keep = strict if self._is_cut(tail) else len(buffer)
        said = buffer[at:keep]
        if keep < len(buffer):  # the newlines before a cut marker were its framing
            said = said.removesuffix("\n").removesuffix("\n")
        self._say(said)
        self._discard(buffer[keep:], "cut")
        self._at = len(buffer)
        return False

    def _is_cut(self, tail: str) -> bool:
        """Whether what the output ends with, the beginning of some marker, is a marker that was cut: enough of one to
        tell, or less if the output was cut."""
        told = len(tail) >= 5 or "｜D" in tail or (self._was_cut and "｜" in tail)
        return told or self._lexicon.show(tail) != tail

    def _hold_from(self, at: int, start: int) -> int:
        """From where text before `start` is held: what may join with text after a deleted marker, and newlines that may
        turn out to be framing, together with what may join across them."""
        limit = start - CHAIN_LIMIT
        hold = self._chain_from(max(at, limit), start)
        if hold > limit:
            newest = max(at, hold - NEWLINES)
            while hold > newest and self._buffer[hold - 1] == "\n":
                hold -= 1
            if hold < start and self._buffer[hold] == "\n":
                hold = self._chain_from(max(at, limit), hold)
        if at < hold and at < limit and not self._lexicon.identity:
            # what leaves now may end with a beginning that began before the limit
            found = self._spelling.strict_begun.search(self._buffer, max(at, hold - HEAD_LIMIT), hold)
            self._overflow = found is not None and found.start() < hold
        return hold

    def _chain_from(self, low: int, start: int) -> int:
        """Where beginnings of markers, one after the other, lead up to `start`."""
        begun = self._spelling.strict_begun
        while start > low:
            found = begun.search(self._buffer, max(low, start - HEAD_LIMIT), start)
            if found is None or found.start() == start:
                break
            start = found.start()
        return start

    def _is_quoted(self, group: str, end: int) -> bool:
        quoting = self._quoting[self._channel]
        if group == "think_close" and self._state is State.REASONING:
            # unbalanced backticks are common in reasoning, and not to see its end costs the whole answer
            return quoting.in_inline(self._before) and self._buffer[end : end + 1] == "`"
        return quoting.quoted(self._before)

    @property
    def _channel(self) -> State:
        return State.REASONING if self._state is State.REASONING else State.CONTENT

    def _say(self, text: str, leave: bool = False) -> None:
        """Prose in the current state. `leave`: whatever it ends with, the channel's text ends here for now."""
        if not text:
            return
        text = self._lexicon.show(text)
        channel = self._channel
        if self._state is State.AFTER:
            self._quoting[channel].update(text)
            self._discard(text, "after_call")
            return
        if self._guard[channel] or self._overflow or leave:
            self._overflow = False
            self._say_guarded(channel, text)
        else:
            self._put(channel, text)

    def _put(self, channel: State, text: str) -> None:
        if text:
            if self._lexicon.identity:
                self._tail = (self._tail + text)[-HEAD_LIMIT:]
            self._quoting[channel].update(text)
            self._out.append(Reasoning(text) if channel is State.REASONING else Content(text))

    def _say_guarded(self, channel: State, text: str) -> None:
        """`text` without the characters that would complete a marker begun by text already sent.

        A marker that lies in `text` whole was judged before (it is quoted).
        """
        head, guard = self._spelling.strict_head, self._guard[channel]
        sent, old = 0, len(guard)
        for i, char in enumerate(text):
            if not old:
                guard = self._beginning(guard + text[max(i, len(text) - HEAD_LIMIT) :])
                break
            made = head.search(guard + char)
            if made and made.start() < old:
                self._put(channel, text[sent:i])
                self._discard(char, "spliced_markup")
                sent = i + 1
                continue
            length = len(guard) + 1
            guard = self._beginning(guard + char)
            old = max(0, old - (length - len(guard)))
        self._guard[channel] = guard
        self._put(channel, text[sent:])

    def _beginning(self, text: str) -> str:
        """What of a marker `text` ends with, behind any that is whole."""
        while made := self._spelling.strict_head.search(text):
            text = text[made.end() :]
        found = self._spelling.strict_begun.search(text)
        return text[found.start() :] if found else ""

    def _do_stray(self, marker: Marker) -> None:
        tag = self._tag(marker)
        if self._state not in PROSE:
            if self._calls.reason and self._state is not State.BLOCK:
                self._calls.discard(tag)
            else:
                self._discard(tag, "control_token" if marker.kind is Kind.CONTROL else "stray_markup")
            self._junk = False
            return
        self._discard(tag, "control_token" if marker.kind is Kind.CONTROL else "stray_markup")
        before = self._before
        if marker.kind in _TAGS_ON_OWN_LINE and not before.strip("\n"):
            before = ""
        self._splice(before)

    def _splice(self, before: str) -> None:
        """Put held prose in front of what is left, and read on in prose.

        By token ids the characters of a marker are no marker when they come in a row, but must not become one by
        joining.
        """
        if self._lexicon.identity and before.strip("\n"):
            self._joint = before.lstrip("\n")
            self._say(before[: len(before) - len(self._joint)])
            if self._chain_cut:
                found = self._spelling.strict_begun.search(self._tail)
                self._guard[self._channel] = self._tail[found.start() :] if found else ""
        elif before:
            self._buffer = before + self._buffer[self._at :]
            self._at = 0

    def _join(self, at: int, stop: int) -> int:
        """Read `buffer[at:stop]` after the joint until no marker can come of it; returns where that was."""
        head, begun = self._spelling.strict_head, self._spelling.strict_begun
        while self._joint and at < stop:
            text = self._joint + self._buffer[at]
            at += 1
            made = head.search(text)
            if made:
                self._discard(text[made.start() :], "spliced_markup")
                self._joint = text[: made.start()]
                continue
            hold = len(text)
            while hold > 0 and (found := begun.search(text, 0, hold)) and found.start() < hold:
                hold = found.start()
            hold = max(hold, len(text) - CHAIN_LIMIT)
            self._joint = text[hold:]
            if hold:
                self._say(text[:hold], leave=bool(self._joint))
        return at

    def _unjoin(self) -> str:
        joint, self._joint = self._joint, ""
        return joint

    def _do_open_reasoning(self, marker: Marker) -> None:
        if not self._quoting[State.CONTENT].at_line_start(self._before):
            self._do_stray(marker)
            return
        self._say(self._before, leave=True)
        self._state = State.REASONING

    def _do_close_reasoning(self, marker: Marker) -> None:
        self._say(self._before, leave=True)
        self._state = State.CONTENT
