"""The decoder: text, bytes or token ids in, events out."""

from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring
from typing import Any

from closeranks.codec.calls import Calls
from closeranks.codec.dialects import Dialect, dialect_of
from closeranks.codec.events import Content, Discarded, Event, Reasoning, ToolCallArguments
from closeranks.codec.intake import Bytes, Tokens, clean, token_id
from closeranks.codec.lexicon import HEAD_LIMIT, Kind, Lexicon, Marker, lexicon_of
from closeranks.codec.machine import CHAIN_LIMIT, JUNK_LIMIT, LEAD_LIMIT, NEWLINES, TRANSITIONS, Action, State
from closeranks.codec.offer import Offer
from closeranks.codec.policy import DEFAULT, Policy
from closeranks.codec.quoting import Quoting

PIECE = 4096  # longer input is taken in pieces of this size, which bounds every copy of the buffer

_PROSE = (State.CONTENT, State.REASONING, State.AFTER)
_VALUES = (State.STRING, State.JSON, State.BODY, State.ENVELOPE)
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
_PLAIN_KINDS = {"think_open": Kind.THINK_OPEN, "think_close": Kind.THINK_CLOSE, "control": Kind.CONTROL}


class Decoder:
    """Decodes one assistant turn incrementally.

    dialect: a name of `closeranks.codec.DIALECTS`, or a `Dialect`.
    thinking: the prompt opened the reasoning part, so the output starts inside it.
    tools: what the request offers, as OpenAI tool objects or names. None: not known, every name is taken; an empty
        list: none, so no call comes of anything. A gateway passes its request's list, or [] where it has none.
    tool_choice: as in the OpenAI API; "none" makes no call of anything, a named choice offers that tool only.
    tokenizer: needed for token ids, see `closeranks.codec.Tokenizer`.
    starts_in_tool_calls: the prompt opened the block (required or named choice), so the output starts inside it.

    `feed` and `close` raise for misuse only (TypeError: kinds of input mixed, ids without a tokenizer; ValueError: fed
    after close), never for what the model wrote. Any chunking of the same output gives the same `merge`d events.

    What is held back, at most, by state (characters; a newline or two, a marker's head, the tag after it):

        CONTENT, REASONING, AFTER   2 + CHAIN_LIMIT + max(HEAD_LIMIT + TAG_LIMIT, LOOKAHEAD_LIMIT)
        BLOCK                       the same as carry, + 16 + JUNK_LIMIT, + HEAD_LIMIT + TAG_LIMIT
        INVOKE, STRING              1 + HEAD_LIMIT + TAG_LIMIT (plus the carry of its block)
        JSON, BODY                  the same + 3 * MAX_SCALAR: white space, a key, a number or word
        ENVELOPE                    the same + 2 * envelope.HEAD_LIMIT, or WHOLE_LIMIT for an unusual order of keys
    """

    def __init__(
        self,
        dialect: str | Dialect = "v4",
        thinking: bool = False,
        tools: Iterable[Any] | None = None,
        tool_choice: Any = "auto",
        tokenizer: Any = None,
        policy: Policy = DEFAULT,
        *,
        starts_in_tool_calls: bool = False,
    ) -> None:
        self.dialect = dialect_of(dialect) if isinstance(dialect, str) else dialect
        self.policy = policy
        self._tokenizer = tokenizer
        self._calls = Calls(Offer(tools, tool_choice), policy)
        self._lexicon: Lexicon = lexicon_of(self.dialect)
        self._spelling = self._lexicon  # how markers look in the output
        self._bytes: Bytes | None = None
        self._tokens: Tokens | None = None
        self._plain_text = True  # neither bytes nor ids were fed, and not closed
        self._taken = False  # text was fed
        self._closed = False
        self._state = State.CONTENT
        self._buffer = ""
        self._at = 0
        self._out: list[Event] = self._calls.out
        # prose
        self._quoting = {State.REASONING: Quoting(), State.CONTENT: Quoting()}
        self._quotes = policy.quoted == "keep"
        self._guard = {State.REASONING: "", State.CONTENT: ""}  # end of sent text that begins a marker
        self._overflow = False
        self._line_start = True  # only white space since the last newline of sent content
        # blocks
        self._prose_state = State.CONTENT  # to return to
        self._carry = ""  # prose held while a block decides whether it is one
        self._opener = ""  # the block's opener; "" where an invoke stands alone
        self._wrapped = False
        self._odd_opener = False  # a tag of unknown name
        self._seen_invoke = False
        self._held = ""  # text in a block before its first invoke
        self._junk = False  # text that is not white space since the last tag
        self._family = "real"
        self._loose: set[str] = set()  # spelled families of which an invoke was seen
        self._newline = ""  # before the marker at hand, in a value
        self._before = ""  # prose before the marker at hand, held
        self._joint = ""  # by token ids: prose before a deleted marker that may join with the prose after it
        if thinking:
            self._state = State.REASONING
        if starts_in_tool_calls:
            self._prose_state = self._state
            self._state, self._wrapped = State.BLOCK, True
        self._read_by_text()

    # ---- input

    def feed(self, data: str | bytes | bytearray | Sequence[int]) -> list[Event]:
        """Take the next piece of output; return what it makes certain."""
        if self._plain_text and type(data) is str:
            self._taken = True
            if not self._buffer and data:
                # the common case: nothing held, nothing in `data` that could begin a marker or change a decision
                state = self._state
                if state is State.STRING:
                    if self._calls.streaming and self._value_suspect(data) is None and data[-1] != "\n":
                        return [ToolCallArguments(self._calls.index, encode_basestring(data)[1:-1])]
                elif state is State.CONTENT or state is State.REASONING:
                    if self._suspect(data) is None and not self._guard[state]:
                        self._quoting[state].plain(data)
                        return [Content(data) if state is State.CONTENT else Reasoning(data)]
                elif state in _VALUES and self._value_suspect(data) is None:
                    self._out = self._calls.out = []
                    self._value(data)
                    return self._out
            return self._take(clean(data))
        if self._closed:
            raise ValueError("feed after close: a decoder decodes one turn")
        return self._feed_other(data)

    def close(self, finish_reason: str | None = "stop") -> list[Event]:
        """The output is over; return what that makes certain. Closing again returns nothing.

        finish_reason: the engine's: after "stop" an open call is reported as `unclosed_call`, after anything else as
            `cut`.
        """
        if self._closed:
            return []
        rest = ""
        if self._bytes is not None:
            rest = self._bytes.text(b"", final=True)
        elif self._tokens is not None:
            rest = self._tokens.text([], final=True)
        out = self._take(rest)
        self._out = self._calls.out = []
        self._run(final=True)
        self._finish("unclosed_call" if finish_reason == "stop" else "cut")
        self._closed = True
        self._plain_text = False
        self._buffer = ""
        return out + self._out

    @property
    def state(self) -> State:
        """Where in the turn the decoder is."""
        return self._state

    @property
    def held(self) -> int:
        """Characters taken in and not yet accounted for."""
        return len(self._buffer) + len(self._carry) + len(self._held) + len(self._opener)

    def _feed_other(self, data: Any) -> list[Event]:
        """Bytes and token ids, and text around them."""
        text = ""
        if isinstance(data, (str, bytes, bytearray, memoryview)):
            if self._tokens is not None:
                raise TypeError(f"{type(data).__name__} fed after token ids: one decoder takes text or ids")
            if self._bytes is None:
                self._bytes = Bytes()
                self._plain_text = False
            if not isinstance(data, str):
                text = self._bytes.text(bytes(data))
            else:
                text = self._bytes.text(b"", final=True) + clean(data)
        elif not isinstance(data, Iterable):
            raise TypeError(f"feed takes text, bytes or token ids, not {type(data).__name__}")
        elif self._tokens is None and self._taken:
            raise TypeError("token ids fed after text: one decoder takes text or ids")
        else:
            if self._tokens is None:
                self._tokens = self._read_by_identity()
                self._plain_text = False
            text = self._tokens.text([int(token) for token in data])
        return self._take(text)

    def _read_by_text(self) -> None:
        lexicon, spelling = self._lexicon, self._spelling
        self._head = lexicon.strict_head if self.policy.spelled == "pass" else lexicon.head
        self._begun = spelling.strict_begun if self.policy.spelled == "pass" else spelling.begun
        self._suspect = lexicon.suspect
        self._value_suspect = lexicon.value_suspect

    def _read_by_identity(self) -> Tokens:
        """Switch to token ids: where the dialect's own marker is an added token, only added tokens are markup."""
        if self._tokenizer is None:
            raise TypeError("token ids need a tokenizer: Decoder(..., tokenizer=...)")
        dialect = self.dialect
        tags = () if dialect.sentinel else (f"<{dialect.invoke}>", f"</{dialect.invoke}>")
        markers = (*([dialect.sentinel] if dialect.sentinel else []), *tags, dialect.think_open, dialect.think_close)
        ids = {marker: token_id(self._tokenizer, marker) for marker in (*markers, *dialect.controls)}
        own = [dialect.sentinel] if dialect.sentinel else list(tags)
        if any(ids[marker] is None for marker in own):
            return Tokens(self._tokenizer, {})
        added = tuple(marker for marker, token in ids.items() if token is not None)
        self._lexicon = lexicon_of(dialect, added)
        self._quotes = False
        self._read_by_text()
        private = {ids[marker]: self._lexicon.private[marker] for marker in added}
        return Tokens(self._tokenizer, {token: char for token, char in private.items() if token is not None})

    # ---- the loop

    def _take(self, data: str) -> list[Event]:
        out: list[Event] = []
        self._out = self._calls.out = out
        for start in range(0, len(data), PIECE):
            self._buffer = self._buffer[self._at :] + data[start : start + PIECE]
            self._at = 0
            self._run(final=False)
        if self._at:
            self._buffer = self._buffer[self._at :]
            self._at = 0
        return out

    def _run(self, final: bool) -> None:
        going = True
        while going:
            if self._state in _PROSE:
                going = self._step_prose(final)
            elif self._state in _VALUES:
                going = self._step_value(final)
            else:
                going = self._step_block(final)

    def _act(self, marker: Marker) -> None:
        action = TRANSITIONS[self._state][marker.kind]
        getattr(self, f"_do_{action.value}")(marker)

    def _tag(self, marker: Marker) -> str:
        return self._lexicon.show(self._buffer[marker.start : marker.end])

    def _discard(self, text: str, reason: str, where: str = "") -> None:
        if text:
            self._out.append(Discarded(self._lexicon.show(text), reason, where or self._state.value))

    # ---- prose

    def _step_prose(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        found = self._head.search(buffer, at)
        if found is None:
            return self._end_of_prose(final)
        start = found.start()
        if self._joint:
            at = self._join(at, start)
        hold = self._hold_from(at, start)
        if hold > at:
            self._say(buffer[at:hold])
            self._at = hold
        if not final and self._lexicon.may_grow(buffer, found):
            return False
        group = found.lastgroup or ""
        self._before = self._joint + buffer[hold:start]
        if (self._quotes or group in _LOOSE) and self._is_quoted(group, found.end()):
            self._say(self._unjoin() + buffer[hold : found.end()])
            self._at = found.end()
            return True
        if group in _PLAIN_KINDS:
            marker: Marker | None = Marker(_PLAIN_KINDS[group], start, found.end())
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
        keep = strict if len(tail) >= 5 or "｜D" in tail or self._lexicon.show(tail) != tail else len(buffer)
        self._say(buffer[at:keep])
        self._discard(buffer[keep:], "cut")
        self._at = len(buffer)
        return False

    def _begun_from(self, pattern: Any, at: int) -> int:
        """Where the buffer's end could begin a marker; its length if nowhere."""
        size = len(self._buffer)
        found = pattern.search(self._buffer, max(at, size - HEAD_LIMIT))
        return found.start() if found else size

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
        if hold <= limit:
            self._overflow = True
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
            self._quoting[channel].update(text)
            self._out.append(Reasoning(text) if channel is State.REASONING else Content(text))

    def _say_guarded(self, channel: State, text: str) -> None:
        """`text` without the characters that would complete a marker begun by text already sent."""
        head, begun, guard = self._spelling.strict_head, self._spelling.strict_begun, self._guard[channel]
        sent = 0
        for i, char in enumerate(text):
            if not guard and i:
                tail = text[max(i, len(text) - HEAD_LIMIT) :]
                found = begun.search(tail)
                guard = tail[found.start() :] if found else ""
                break
            if head.search(guard + char):
                self._put(channel, text[sent:i])
                self._discard(char, "spliced_markup")
                sent = i + 1
                continue
            guard += char
            found = begun.search(guard)
            guard = guard[found.start() :] if found else ""
        self._guard[channel] = guard
        self._put(channel, text[sent:])

    def _do_stray(self, marker: Marker) -> None:
        tag = self._tag(marker)
        if self._state not in _PROSE:
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

    # ---- blocks

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
        self._wrapped = self._seen_invoke = self._junk = self._odd_opener = False
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
            if len(tail) < 5 and self._lexicon.show(tail) == tail and "｜D" not in tail:
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
        if group in _PLAIN_KINDS:
            marker: Marker | None = Marker(_PLAIN_KINDS[group], found.start(), found.end())
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
        if self._state in _PROSE:
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
        if self._state in _PROSE:
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

    # ---- parameters and values

    def _do_open_parameter(self, marker: Marker) -> None:
        self._open_value(marker, marker.string)

    def _do_bad_parameter(self, marker: Marker) -> None:
        if marker.kind is Kind.PARAM_ODD:
            self._open_value(marker, None)
            return
        self._junk = False
        self._calls.abort("malformed_parameter", self._tag(marker))

    def _do_orphan_parameter(self, marker: Marker) -> None:
        """A parameter without an invoke: there is no name to call."""
        self._do_bad_invoke(marker)
        if marker.kind is not Kind.PARAM_BAD:
            self._state = State.STRING

    def _open_value(self, marker: Marker, string: bool | None) -> None:
        self._junk = False
        as_text = self._calls.parameter(marker.name, string, self._tag(marker))
        self._state = State.STRING if as_text else State.JSON

    def _step_value(self, final: bool) -> bool:
        buffer, at = self._buffer, self._at
        found = self._lexicon.value_head[self._family].search(buffer, at)
        if found is None:
            stop = self._begun_from(self._lexicon.value_begun[self._family], at)
            if final:
                self._value(buffer[at:stop])
                self._discard(buffer[stop:], "cut")
                self._at = len(buffer)
                return False
            self._at = self._value_up_to(at, stop)
            return False
        self._at = self._value_up_to(at, found.start())
        if not final and self._lexicon.may_grow(buffer, found):
            return False
        marker = self._lexicon.read_tag(buffer, found, final)
        if marker is None:
            return False
        self._newline = buffer[self._at : found.start()]
        if TRANSITIONS[self._state][marker.kind] is Action.LITERAL:
            self._value(self._newline + buffer[found.start() : found.end()])
            self._at = found.end()
            return True
        self._at = marker.end
        self._act(marker)
        return True

    def _value_up_to(self, at: int, stop: int) -> int:
        """Pass on `buffer[at:stop]`, less a last newline, which is framing if the parameter is never closed."""
        if stop > at and self._state is State.STRING and self._buffer[stop - 1] == "\n":
            stop -= 1
        self._value(self._buffer[at:stop])
        return stop

    def _value(self, text: str) -> None:
        if not text:
            return
        text = self._lexicon.show(text)
        if self._state is State.STRING:
            self._calls.text(text)
        elif self._state is State.ENVELOPE:
            self._calls.body(text)
        else:
            self._calls.json(text)

    def _end_value(self) -> None:
        if self._state is State.JSON:
            self._calls.end_json()
        else:
            self._calls.end_text()
        self._state = State.INVOKE
        self._junk = False

    def _do_close_parameter(self, marker: Marker) -> None:
        self._value(self._newline)
        if not self._calls.live:
            self._calls.discard(self._tag(marker))
        self._end_value()

    def _do_commit_unclosed(self, marker: Marker) -> None:
        if self.policy.unclosed_parameter == "accept":
            self._end_value()
        else:
            self._calls.abort("malformed_parameter", "")
            self._state = State.INVOKE
        self._do_commit(marker)

    def _do_bad_closer(self, marker: Marker) -> None:
        self._calls.abort("malformed_parameter", self._tag(marker))
        self._state = State.INVOKE
        self._junk = False

    def _do_nested(self, marker: Marker) -> None:
        self._calls.abort("malformed_parameter", self._tag(marker))
        self._state = State.INVOKE if marker.kind is Kind.PARAM_BAD else State.STRING

    # ---- markers of an outer level

    def _break(self) -> None:
        self._calls.abort("unclosed_call", "")
        self._calls.commit()
        self._junk = False

    def _do_break_to_block(self, marker: Marker) -> None:
        self._break()
        self._discard(self._tag(marker), "stray_markup", "block")
        self._wrapped = True
        self._state = State.BLOCK

    def _do_break_to_invoke(self, marker: Marker) -> None:
        self._break()
        self._do_open_invoke(marker)

    def _do_break_to_empty(self, marker: Marker) -> None:
        self._break()
        self._do_empty_invoke(marker)

    def _do_break_and_close(self, marker: Marker) -> None:
        self._break()
        self._leave()

    # ---- the end

    def _finish(self, reason: str) -> None:
        """Account for what is open."""
        calls = self._calls
        while self._undecided:
            self._release("no_invoke", self._held)
            self._run(final=True)
        if self._state is State.BLOCK and not self._seen_invoke:
            self._discard(self._opener, "empty_block")
        elif self._state is State.INVOKE and calls.started and self.policy.incomplete_call == "accept":
            calls.commit()
        elif self._state not in _PROSE:
            calls.abort(reason, "")
        carry = self._carry if self._state not in _PROSE and self._carry.strip("\n") else ""
        if carry or self._joint:
            self._state = self._state if self._state in _PROSE else self._prose_state
            self._say(carry + self._unjoin(), leave=True)
