"""What all states of the decoder share: its fields, the buffer, and saying what goes."""

import re

from closeranks.codec.calls import Calls
from closeranks.codec.dialects import Dialect
from closeranks.codec.events import Discarded, Event
from closeranks.codec.lexicon import HEAD_LIMIT, Kind, Lexicon, Marker, lexicon_of
from closeranks.codec.machine import TRANSITIONS, State
from closeranks.codec.offer import Offer
from closeranks.codec.policy import Policy
from closeranks.codec.quoting import Quoting

PROSE = (State.CONTENT, State.REASONING, State.AFTER)
VALUES = (State.STRING, State.JSON, State.BODY, State.ENVELOPE)
# groups of a head's pattern that are whole markers by themselves
PLAIN_KINDS = {"think_open": Kind.THINK_OPEN, "think_close": Kind.THINK_CLOSE, "control": Kind.CONTROL}


class Core:
    """The fields, and what reads or writes them in every state.

    `_buffer[_at:]` is the input not accounted for. Steps take text from its front; what may be part of a marker stays.
    """

    def __init__(self, dialect: Dialect, offer: Offer, policy: Policy, state: State, in_block: bool) -> None:
        self.dialect = dialect
        self.policy = policy
        self._calls = Calls(offer, policy)
        self._out: list[Event] = self._calls.out  # of the current feed
        self._lexicon: Lexicon = lexicon_of(dialect)
        self._spelling = self._lexicon  # how markers look in the output
        self._state = State.BLOCK if in_block else state
        self._buffer = ""
        self._at = 0
        self._was_cut = False  # the output ended for another reason than that it was over
        # prose
        self._quoting = {State.REASONING: Quoting(), State.CONTENT: Quoting()}
        self._quotes = policy.quoted == "keep"
        self._guard = {State.REASONING: "", State.CONTENT: ""}  # end of sent text that begins a marker
        self._overflow = False  # text was released that a chain of begun markers would have held
        self._before = ""  # prose before the marker at hand, held
        self._chain_cut = False  # ... and what leads up to it was longer than is held
        self._tail = ""  # by token ids: the end of sent prose
        self._joint = ""  # by token ids: prose before a deleted marker that may join with the prose after it
        # blocks
        self._prose_state = state  # to return to
        self._carry = ""  # prose held while a block decides whether it is one
        self._opener = ""  # the block's opener; "" where an invoke stands alone, or the prompt opened the block
        self._wrapped = in_block  # there is a wrapper
        self._odd_opener = False  # ... a tag of unknown name
        self._seen_invoke = False
        self._orphan = False  # what is open is no invoke but parameters without one, in prose
        self._held = ""  # text in a block before its first invoke, white space in an invoke before its body
        self._junk = False  # text that is not white space since the last tag
        self._invoke_tag = ""
        self._family = "real"  # how the block at hand spells its sentinel
        self._loose: set[str] = set()  # spelled families of which an invoke was seen
        self._newline = ""  # before the marker at hand, in a value
        self._choose_patterns()

    def _choose_patterns(self) -> None:
        """Take the patterns from the lexicon, after it changed."""
        lexicon, spelling = self._lexicon, self._spelling
        strict = self.policy.spelled == "pass"
        self._head = lexicon.strict_head if strict else lexicon.head
        self._begun = spelling.strict_begun if strict else spelling.begun
        self._suspect = lexicon.suspect
        self._value_suspect = lexicon.value_suspect

    def _act(self, marker: Marker) -> None:
        action = TRANSITIONS[self._state][marker.kind]
        getattr(self, f"_do_{action.value}")(marker)

    def _tag(self, marker: Marker) -> str:
        return self._lexicon.show(self._buffer[marker.start : marker.end])

    def _discard(self, text: str, reason: str, where: str = "") -> None:
        if text:
            self._out.append(Discarded(self._lexicon.show(text), reason, where or self._state.value))

    def _begun_from(self, pattern: re.Pattern[str], at: int) -> int:
        """Where the buffer's end could begin a marker; its length if nowhere."""
        size = len(self._buffer)
        found = pattern.search(self._buffer, max(at, size - HEAD_LIMIT))
        return found.start() if found else size
