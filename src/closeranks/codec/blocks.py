"""Blocks and invokes: from the wrapper's opener to its closer, and the text between their parts."""

from closeranks.codec.core import PLAIN_KINDS, PROSE
from closeranks.codec.lexicon import Kind, Marker
from closeranks.codec.machine import JUNK_LIMIT, LEAD_LIMIT, State
from closeranks.codec.prose import Prose


class Blocks(Prose):
    """The states BLOCK and INVOKE."""

    def _enter(self, marker: Marker, wrapped: bool) -> None:
        """From prose into a block or a lone invoke."""
        self._prose_state = self._state
        self._carry, self._before = self._before, ""
        self._wrapped, self._seen_invoke = wrapped, False
        self._opener = self._tag(marker) if wrapped else ""
        self._held = ""
        self._junk = False

    def _leave(self) -> None:
        """Back to prose after a block or lone invoke that stood."""
        state = self._prose_state
        carry = self._carry if self._carry.strip("\n") else ""
        if self._calls.committed:
            self._state = state
            self._say(carry, leave=True)
            state = State.AFTER if self.policy.text_after == "drop" else State.CONTENT
            carry = ""
        self._state = state
        self._reset_block()
        self._splice(carry)

    def _reset_block(self) -> None:
        self._carry = self._opener = self._held = ""
        self._wrapped = self._seen_invoke = self._junk = self._odd_opener = self._orphan = False
        self._family = "real"

    def _release(self, reason: str, held: str) -> None:
        """It was no block: its opener goes, the text around stays."""
        self._discard(self._opener, reason)
        carry = self._carry
        self._state = self._prose_state
        self._reset_block()
        if self._lexicon.identity and carry.strip("\n"):
            self._splice(carry)
            carry = ""
        self._buffer = carry + held + self._buffer[self._at :]
        self._at = 0

    def _step_block(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        found = self._lexicon.block_head[self._family].search(buffer, at)
        stop = found.start() if found else self._begun_from(self._lexicon.block_begun[self._family], at)
        if final and not found:
            tail = buffer[stop:]
            if not self._is_cut(tail):
                stop = len(buffer)
        if stop > at:
            state = self._state
            self._at = stop
            self._text_in_block(buffer[at:stop])
            if self._state is not state:
                return True
        if found is None:
            if final:
                self._discard(buffer[stop:], "cut")
                self._at = len(buffer)
            return False
        if not final and self._lexicon.may_grow(buffer, found):
            return False
        group = found.lastgroup or ""
        if group in PLAIN_KINDS:
            marker: Marker | None = Marker(PLAIN_KINDS[group], found.start(), found.end())
        else:
            marker = self._lexicon.read_tag(buffer, found, final)
        if marker is None:
            return False
        if self._undecided and self._quotes and self._quoting[self._prose_channel].quoted(self._carry + self._held):
            self._release("no_invoke", self._held)
            return True
        self._at = marker.end
        self._act(marker)
        return True

    @property
    def _prose_channel(self) -> State:
        return State.REASONING if self._prose_state is State.REASONING else State.CONTENT

    @property
    def _undecided(self) -> bool:
        return self._state is State.BLOCK and not self._seen_invoke and bool(self._held.strip()) and bool(self._opener)

    def _text_in_block(self, text: str) -> None:
        if self._orphan:
            body = text.lstrip()
            if body:  # prose goes on
                self._at -= len(body)
                self._end_invoke()
            return
        if self._state is State.INVOKE and self._calls.bare:
            body = text.lstrip()
            self._held = (self._held + text[: len(text) - len(body)])[:LEAD_LIMIT]
            if not body:
                return
            held, self._held = self._held, ""
            at = self._at - len(body)
            if body[0] == "{" and self.policy.direct_json == "parse" and self._calls.live:
                self._calls.open_body()
                self._state, self._at = State.BODY, at
                return
            if not self._wrapped:
                self._opener = self._invoke_tag
                self._calls.forget()
                self._at = at
                self._release("no_body", held)
                return
            self._calls.abort("no_body", "")
        elif self._state is State.BLOCK and not self._seen_invoke and self._opener:
            held = self._held + text
            rest = held.lstrip()
            lead = len(held) - len(rest)
            self._held = held[: min(lead, LEAD_LIMIT)] + rest
            if len(rest) > JUNK_LIMIT:
                self._release("no_invoke", self._held)
            return
        if not self._junk:
            text = text.lstrip()
            self._junk = bool(text)
        if self._state is State.INVOKE and not self._calls.live:
            self._calls.discard(self._lexicon.show(text))
        else:
            self._discard(text, "junk_in_block")

    def _begin_invoke(self) -> None:
        """A block is one: what was held to decide that goes."""
        self._orphan = False
        if self._state is State.BLOCK and not self._seen_invoke:
            held, self._held = self._held, ""
            if held.strip():
                self._discard(held, "junk_in_block", "block")
            if self._odd_opener:
                self._discard(self._opener, "stray_markup", "block")
        self._held = ""
        self._seen_invoke = True
        self._junk = False

    def _do_open_block(self, marker: Marker) -> None:
        self._enter(marker, wrapped=True)
        self._odd_opener = marker.kind is Kind.OTHER_OPEN
        self._state = State.BLOCK

    def _do_close_block(self, marker: Marker) -> None:
        tag = self._tag(marker)
        if self._undecided:
            held = self._held
            self._release("no_invoke", held)
            self._discard(tag, "stray_markup", "block")
            return
        if not self._seen_invoke:
            self._discard(self._opener + tag, "empty_block", "block")
        self._leave()

    def _do_leave_reasoning(self, marker: Marker) -> None:
        if self._undecided:
            self._at = marker.start
            self._release("no_invoke", self._held)
            return
        if self._prose_state is State.REASONING:
            self._say_carry()
            self._prose_state = State.CONTENT
            self._junk = False
        else:
            self._do_stray(marker)

    def _say_carry(self) -> None:
        """Held prose belongs to the channel that the block began in."""
        carry = self._carry if self._carry.strip("\n") else ""
        state, self._state = self._state, self._prose_state
        self._say(carry, leave=True)
        self._state, self._carry = state, ""

    def _do_open_invoke(self, marker: Marker) -> None:
        if self._state in PROSE:
            self._enter(marker, wrapped=False)
        self._begin_invoke()
        self._invoke_tag = self._tag(marker)
        refused = ""
        if self._family != "real" and self.policy.spelled == "strip":
            refused = "spelled_markup"
        elif (
            not self._wrapped
            and self.dialect.wrapper
            and self._prose_state is State.REASONING
            and self.policy.bare_invoke_in_reasoning == "suppress"
        ):
            refused = "draft_in_reasoning"
        if self.dialect.body == "envelope":
            self._calls.open_envelope(self._invoke_tag, refused)
            self._state = State.ENVELOPE
        else:
            self._calls.open(marker.name, self._invoke_tag, refused)
            self._state = State.INVOKE

    def _do_empty_invoke(self, marker: Marker) -> None:
        self._do_open_invoke(marker)
        self._calls.commit()
        self._end_invoke()

    def _do_bad_invoke(self, marker: Marker) -> None:
        if self._state in PROSE:
            self._enter(marker, wrapped=False)
        self._begin_invoke()
        self._calls.abort("malformed_invoke", "")
        self._calls.mute("malformed_invoke", self._tag(marker))
        self._state = State.INVOKE

    def _end_invoke(self) -> None:
        """The invoke is over, one way or other."""
        self._junk = False
        if self._wrapped:
            self._state = State.BLOCK
        else:
            self._leave()

    def _do_commit(self, marker: Marker) -> None:
        tag = self._tag(marker)
        calls = self._calls
        if not calls.live:
            calls.discard(tag)
        elif self._state is State.BODY:
            calls.end_body()
        elif self._state is State.ENVELOPE:
            calls.end_envelope(tag)
        else:
            calls.commit()
        calls.commit()
        self._end_invoke()
