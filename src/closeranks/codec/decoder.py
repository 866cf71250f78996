"""The decoder: text, bytes or token ids in, events out."""

from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring
from typing import Any

from closeranks.codec.core import PROSE, VALUES
from closeranks.codec.dialects import Dialect, dialect_of
from closeranks.codec.events import Content, Discarded, Event, Reasoning, ToolCallArguments
from closeranks.codec.intake import Bytes, Tokens, clean, token_id
from closeranks.codec.lexicon import lexicon_of
from closeranks.codec.machine import State
from closeranks.codec.offer import Offer
from closeranks.codec.policy import DEFAULT, Policy
from closeranks.codec.values import Values

# looking up a member costs as much as the rest of a decision
_STRING, _CONTENT, _REASONING = State.STRING, State.CONTENT, State.REASONING

PIECE = 4096  # longer input is taken in pieces of this size, which bounds every copy of the buffer


class Decoder(Values):
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

    What is held back, at most, by state, in characters (MARKER = HEAD_LIMIT + TAG_LIMIT):

        CONTENT, REASONING, AFTER   PROSE = NEWLINES + CHAIN_LIMIT + max(MARKER, LOOKAHEAD_LIMIT)
        BLOCK                       PROSE (until its first invoke) + LEAD_LIMIT + JUNK_LIMIT + 2 * MARKER
        INVOKE, STRING              PROSE (the same) + 2 * MARKER
        JSON, BODY                  the same + MAX_PENDING + MAX_SCALAR: white space and a key, a number or word
        ENVELOPE                    the same + envelope.WHOLE_LIMIT, or HEAD_LIMIT where the name comes first

    In practice a delta of prose or of a value leaves at once unless it ends in `<`, a bar or a newline.
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
        super().__init__(
            dialect_of(dialect) if isinstance(dialect, str) else dialect,
            Offer(tools, tool_choice),
            policy,
            State.REASONING if thinking else State.CONTENT,
            starts_in_tool_calls,
        )
        self._tokenizer = tokenizer
        self._bytes: Bytes | None = None
        self._tokens: Tokens | None = None
        self._plain_text = True  # neither bytes nor ids were fed, and not closed
        self._taken = False  # text was fed
        self._closed = False

    def feed(self, data: str | bytes | bytearray | Sequence[int]) -> list[Event]:
        """Take the next piece of output; return what it makes certain."""
        plain = self._plain_text and type(data) is str
        if plain:
            self._taken = True
            text: str = data  # type: ignore[assignment]
        elif self._closed:
            raise ValueError("feed after close: a decoder decodes one turn")
        else:
            text = self._text_of(data)
        if text and not self._buffer:
            calls = self._calls
            if (value := calls.direct) is not None and self._value_suspect(text) is None:
                sent = value.feed(text)
                out: list[Event] = [ToolCallArguments(calls.index, sent)] if sent else []
                if value.rejected:
                    out.append(Discarded(value.rejected, "malformed_json", "value"))
                return out
            fast = self._fast(text)
            if fast is not None:
                return fast
        return self._take(clean(text) if plain else text)

    def close(self, finish_reason: str | None = "stop") -> list[Event]:
        """The output is over; return what that makes certain. Closing again returns nothing.

        finish_reason: the engine's: after "stop" or "tool_calls" an open call is reported as `unclosed_call`, after
            anything else as `cut`.
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
        self._was_cut = finish_reason not in ("stop", "tool_calls")
        self._run(final=True)
        self._finish("cut" if self._was_cut else "unclosed_call")
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
        kept = (self._buffer, self._carry, self._held, self._opener, self._joint)
        return sum(map(len, kept)) + self._calls.held

    def _text_of(self, data: Any) -> str:
        """The text of bytes or token ids, or of text beside bytes."""
        if isinstance(data, (str, bytes, bytearray, memoryview)):
            if self._tokens is not None:
                raise TypeError(f"{type(data).__name__} fed after token ids: one decoder takes text or ids")
            if self._bytes is None:
                self._bytes = Bytes()
                self._plain_text = False
            if not isinstance(data, str):
                return self._bytes.text(bytes(data))
            return self._bytes.text(b"", final=True) + clean(data)
        if not isinstance(data, Iterable):
            raise TypeError(f"feed takes text, bytes or token ids, not {type(data).__name__}")
        if self._tokens is None:
            if self._taken:
                raise TypeError("token ids fed after text: one decoder takes text or ids")
            self._tokens = self._read_by_identity()
            self._plain_text = False
        return self._tokens.text([int(token) for token in data])

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
        self._choose_patterns()
        private = {ids[marker]: self._lexicon.private[marker] for marker in added}
        return Tokens(self._tokenizer, {token: char for token, char in private.items() if token is not None})

    def _fast(self, data: str) -> list[Event] | None:
        """The common case: nothing is held, and nothing in `data` could begin a marker or change a decision."""
        state = self._state
        if state is _STRING:
            if self._calls.streaming and self._value_suspect(data) is None and data[-1] != "\n":
                return [ToolCallArguments(self._calls.index, encode_basestring(data)[1:-1])]
        elif state is _CONTENT or state is _REASONING:
            if self._suspect(data) is None and not self._guard[state] and not self._joint:
                self._quoting[state].plain(data)
                self._tail = ""
                return [Content(data) if state is _CONTENT else Reasoning(data)]
        elif state in VALUES and self._value_suspect(data) is None:
            self._out = self._calls.out = []
            self._value(data)
            return self._out
        return None

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
            if self._state in PROSE:
                going = self._step_prose(final)
            elif self._state in VALUES:
                going = self._step_value(final)
            else:
                going = self._step_block(final)

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
        elif self._state not in PROSE:
            calls.abort(reason, "")
        carry = self._carry if self._state not in PROSE and self._carry.strip("\n") else ""
        if carry or self._joint:
            self._state = self._state if self._state in PROSE else self._prose_state
            self._say(carry + self._unjoin(), leave=True)
