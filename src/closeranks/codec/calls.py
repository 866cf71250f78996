"""Writing calls: from tags and values to events, so that arguments are valid JSON if and only if the call commits."""

from closeranks.codec.envelope import Envelope
from closeranks.codec.events import Discarded, Event, ToolCallArguments, ToolCallEnd, ToolCallStart
from closeranks.codec.jsonstream import JsonStream, json_string, string_body
from closeranks.codec.offer import Offer
from closeranks.codec.policy import Policy

PARAMETER_LIMIT = 4096  # parameters of one call
WRAPPER_KEYS = ("arguments", "input", "parameters")


class Calls:
    """All calls of a turn, one at a time. A call is *live*, or muted for a reason: then its text is discarded."""

    def __init__(self, offer: Offer, policy: Policy) -> None:
        self.out: list[Event] = []  # of the current feed; the decoder replaces it
        self.live = False
        self.streaming = False  # a string value of a live call is being sent
        self.direct: JsonStream | None = None  # a JSON value of a live call, all of whose output is sent as it is
        self.reason = ""  # why the current invoke is muted
        self.index = 0  # of the current or next call
        self.committed = 0
        self.value: JsonStream | None = None
        self.envelope: Envelope | None = None
        self.bare = False  # nothing was read since the opener
        self._offer = offer
        self._policy = policy
        self._name = ""
        self._opener = ""
        self._started = False
        self._keys: set[str] = set()
        self._in_body = False  # the value is the invoke's body
        self._skipped = ""  # why the value of the current parameter is skipped within a live call
        self._unwrap: list[str] | None = None  # prefix to send if the value is not unwrapped
        self._unwrapped = False

    def open(self, name: str, opener: str, refused: str = "") -> None:
        """An invoke of `name`; `refused` is a reason from outside to mute it."""
        self._name, self._opener = name, opener
        self._started = self._unwrapped = False
        self._keys = set()
        self._skipped = ""
        self.value = self.envelope = self.direct = self._unwrap = None
        self.bare, self._in_body = True, False
        self.reason = refused or self._refusal(name)
        self.live = not self.reason
        if not self.live:
            self.discard(opener)

    def open_envelope(self, opener: str, refused: str = "") -> None:
        """A call whose name comes in its body."""
        self.open("", opener, refused or ("tools_disabled" if self._offer.disabled else ""))
        self.envelope = Envelope() if self.live else None

    def mute(self, reason: str, text: str) -> None:
        """An invoke that cannot be read, with the tag that showed it."""
        self.live, self.reason, self.bare = False, reason, False
        self.value = self.envelope = self.direct = None
        self.discard(text)

    def discard(self, text: str) -> None:
        """Text of a muted invoke."""
        if text:
            self.out.append(Discarded(text, self.reason or "junk_in_block", "call"))

    def parameter(self, name: str, string: bool | None, tag: str) -> bool:
        """A parameter opens; `string` None: its tag does not say. Returns whether its value is a string."""
        self.bare = self._in_body = False
        self._skipped = ""
        self.value = self.direct = None
        if not self.live:
            self.discard(tag)
            return True
        if string is None:
            string = self._typed(name)
            if string is None:
                self.abort("malformed_parameter", tag)
                return True
        if name in self._keys:
            if self._policy.duplicate_parameter == "drop_call":
                self.abort("duplicate_parameter", tag)
            else:
                self._skipped = "duplicate_parameter"
                self.out.append(Discarded(tag, "duplicate_parameter", "call"))
            return True
        if self._unwrapped:
            self.abort("malformed_parameter", tag)
            return True
        if len(self._keys) >= PARAMETER_LIMIT:
            self.abort("limit", tag)
            return True
        first = not self._keys
        self._keys.add(name)
        self._start()
        prefix = ("{" if first else ", ") + json_string(name) + ": "
        if string:
            self._send(prefix + '"')
            self.streaming = True
            return True
        self.value = JsonStream()
        if first and self._may_unwrap(name):
            self._unwrap = [prefix]
        else:
            self._send(prefix)
            self.direct = self.value
        return False

    def text(self, text: str) -> None:
        """A piece of a string value."""
        if not self.live:
            self.discard(text)
        elif self._skipped:
            self.out.append(Discarded(text, self._skipped, "value"))
        elif text:
            self.out.append(ToolCallArguments(self.index, string_body(text)))

    def end_text(self) -> None:
        """A string value ends."""
        self.streaming = False
        if self.live and not self._skipped:
            self._send('"')

    def json(self, text: str) -> None:
        """A piece of a JSON value or body."""
        if not self.live or self.value is None:
            self.text(text)
            return
        read = self.value.unread + text if self._in_body else ""
        sent = self.value.feed(text)
        if self._in_body and self.value.raw:
            self.value = None
            self.abort("malformed_json", read)
            return
        if sent:
            self._send_value(sent)
        self._reject()

    def end_json(self) -> bool:
        """A JSON value ends. False: the call was dropped for it."""
        value, self.value = self.value, None
        self.direct = None
        if not self.live or value is None:
            return self.live
        self.value = value
        sent = value.finish(hold_last=self._unwrapped or (self._unwrap is not None and self._fits(value)))
        self._send_value(sent)
        self._reject()
        self.value, self._unwrap = None, None
        if value.broken and self._policy.broken_json == "drop_call":
            self.abort("malformed_json", "")
        return self.live

    def open_body(self) -> None:
        """A JSON object is the body."""
        self.bare = False
        self.value = JsonStream()
        self._in_body = True
        if self.live:
            self._start()

    def end_body(self) -> None:
        """The body ends: commit, or drop what is no object."""
        value, self.value = self.value, None
        self.direct = None
        if not self.live or value is None:
            return
        read = value.unread
        sent = value.finish(hold_last=True)
        if value.raw or (value.broken and self._policy.broken_json == "drop_call"):
            self.abort("malformed_json", read)
            return
        if value.rejected:
            self.out.append(Discarded(value.rejected, "malformed_json", "value"))
        self._send(sent)
        self._keys.add("")
        self.commit()

    def body(self, text: str) -> None:
        """A piece of an envelope."""
        if not self.live or self.envelope is None:
            self.text(text)
            return
        read = self.envelope.unread + text
        sent = self.envelope.feed(text)
        if self.envelope.name is not None and not self._named(self.envelope.name, read):
            return
        self._send(sent)
        if self.envelope.rejected:
            self.out.append(Discarded(self.envelope.rejected, "malformed_json", "value"))

    def end_envelope(self, closer: str) -> None:
        """The envelope ends: commit, or drop what is malformed."""
        envelope, self.envelope = self.envelope, None
        if not self.live or envelope is None:
            return
        read = envelope.unread
        sent = envelope.finish()
        if sent is None:
            self.abort("malformed_json", read + closer)
        elif self._named(envelope.name or "", read + closer):
            self._send(sent)
            self._keys.add("")
            self.commit()

    def _named(self, name: str, read: str) -> bool:
        """The envelope told its tool: start the call, or mute it with what was read of it."""
        if not self._started:
            self._name = name
            refusal = self._refusal(name) if name else "malformed_invoke"
            if refusal:
                self.envelope = None
                self.abort(refusal, read)
                return False
            self._start()
        return True

    def commit(self) -> None:
        """The invoke is complete."""
        if self.live:
            self._start()
            self._send("}" if self._keys else "{}")
            self.out.append(ToolCallEnd(self.index, True))
            self.index += 1
            self.committed += 1
        self.live = self.streaming = False
        self.reason = ""
        self.value = self.envelope = self.direct = None

    def abort(self, reason: str, text: str) -> None:
        """The call is dropped; what follows of it is muted, beginning with `text`."""
        self.streaming = False
        if self.live:
            if self._started:
                self.out.append(ToolCallEnd(self.index, False, reason))
                self.index += 1
            self.live, self.reason = False, reason
            if not self._started:
                self.discard(self._opener)
            for reader in (self.value, self.envelope):
                if reader is not None:
                    self.discard(reader.unread)
        self.value = self.envelope = self.direct = None
        self._unwrap = None
        self.bare = False
        self.discard(text)

    def forget(self) -> None:
        """The opener was a mention; nothing was sent."""
        self.live, self.reason = False, ""
        self.value = self.envelope = self.direct = None

    @property
    def held(self) -> int:
        """Characters of the current call that were taken and have not left."""
        kept = sum(len(reader.unread) for reader in (self.value, self.envelope) if reader is not None)
        return kept + (len(self._opener) if self.live and not self._started else 0)

    @property
    def started(self) -> bool:
        """Whether the consumer knows of the current call."""
        return self.live and self._started

    def _refusal(self, name: str) -> str:
        if self._offer.disabled:
            return "tools_disabled"
        if name and not self._offer.has(name) and self._policy.unknown_tool == "drop":
            return "tool_not_offered"
        return ""

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.out.append(ToolCallStart(self.index, self._name))

    def _send(self, delta: str) -> None:
        if delta:
            self.out.append(ToolCallArguments(self.index, delta))

    def _reject(self) -> None:
        if self.value is not None and self.value.rejected:
            self.out.append(Discarded(self.value.rejected, "malformed_json", "value"))

    def _typed(self, name: str) -> bool | None:
        """What the schema says of a parameter whose tag does not say whether it is a string."""
        if self._policy.malformed_parameter == "keep_raw":
            return True
        schema = (self._offer.properties(self._name) or {}).get(name)
        kind = schema.get("type") if isinstance(schema, dict) else None
        return kind == "string" if isinstance(kind, str) else None

    def _may_unwrap(self, name: str) -> bool:
        known = self._offer.properties(self._name)
        return (
            self._policy.wrapper_keys == "unwrap"
            and name in WRAPPER_KEYS
            and known is not None
            and len(known) > 0
            and name not in known
        )

    def _fits(self, value: JsonStream) -> bool:
        return value.first_key is not None and value.first_key in (self._offer.properties(self._name) or {})

    def _send_value(self, sent: str) -> None:
        """Send part of a value, deciding first whether it is the whole of the arguments."""
        if self._unwrap is None:
            self._send(sent)
            return
        if not sent or self.value is None:
            return
        if self._fits(self.value) and not self.value.raw:
            self._unwrapped = True
            self._send("{" + sent[sent.index("{") + 1 :])
        else:
            self._send(self._unwrap[0] + sent)
        self._unwrap = None
