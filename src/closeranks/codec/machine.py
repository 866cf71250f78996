"""The states of a turn and the table of what each marker does in each of them.

    CONTENT    text for the user                      REASONING  the reasoning part
    AFTER      after a committed call: text goes (policy text_after)
    BLOCK      inside the wrapper, between invokes    INVOKE     inside an invoke, between its parameters
    STRING     the value of a string="true" parameter
    JSON       the value of a string="false" one      BODY       a JSON object as the body of an invoke
    ENVELOPE   the JSON body of a Hermes call

How the table was made:

1. Think tags change between REASONING and CONTENT; `<think>` opens only at the start of a line, being prose elsewhere.
   Inside a block `</think>` ends the reasoning around it, since models close it late.
2. A wrapper, or a tag of unknown name, opens a block from any prose. It is a block only once an invoke follows; text
   that comes first, up to `JUNK_LIMIT` characters of it, waits for that decision.
3. An invoke opens a call from any prose or block. It starts for the consumer with its first parameter, brace or closer.
4. In a value only parameter, invoke and wrapper tags are markup, all else is the value: there is no escaping.
5. An opener of an outer level ends all inner levels: an invoke inside a value ends the call before it, uncommitted.
6. A closer that fits nothing is stray: it goes, nothing else changes.
"""

from enum import Enum

from closeranks.codec.lexicon import Kind

JUNK_LIMIT = 256  # text between a block's opener and its first invoke that is held to see whether it is a block
CHAIN_LIMIT = 32  # text before a marker that is held because deleting the marker could join it to the text after
LEAD_LIMIT = 16  # white space before that text, or before the body of an invoke, that is held with it
NEWLINES = 2  # newlines before a block that belong to its framing


class State(Enum):
    """Where in the turn the decoder is."""

    CONTENT = "content"
    REASONING = "reasoning"
    AFTER = "after"
    BLOCK = "block"
    INVOKE = "invoke"
    STRING = "string"
    JSON = "json"
    BODY = "body"
    ENVELOPE = "envelope"


class Action(Enum):
    """What a marker does; the decoder has one method for each."""

    STRAY = "stray"
    LITERAL = "literal"
    OPEN_REASONING = "open_reasoning"
    CLOSE_REASONING = "close_reasoning"
    LEAVE_REASONING = "leave_reasoning"
    OPEN_BLOCK = "open_block"
    CLOSE_BLOCK = "close_block"
    OPEN_INVOKE = "open_invoke"
    EMPTY_INVOKE = "empty_invoke"
    BAD_INVOKE = "bad_invoke"
    COMMIT = "commit"
    OPEN_PARAMETER = "open_parameter"
    ORPHAN_PARAMETER = "orphan_parameter"
    BAD_PARAMETER = "bad_parameter"
    CLOSE_PARAMETER = "close_parameter"
    NESTED = "nested"
    COMMIT_UNCLOSED = "commit_unclosed"
    BAD_CLOSER = "bad_closer"
    BREAK_TO_BLOCK = "break_to_block"
    BREAK_TO_INVOKE = "break_to_invoke"
    BREAK_TO_EMPTY = "break_to_empty"
    BREAK_AND_CLOSE = "break_and_close"


_PROSE = {
    Kind.THINK_OPEN: Action.STRAY,
    Kind.THINK_CLOSE: Action.STRAY,
    Kind.CONTROL: Action.STRAY,
    Kind.SENTINEL: Action.STRAY,
    Kind.WRAP_OPEN: Action.OPEN_BLOCK,
    Kind.WRAP_CLOSE: Action.STRAY,
    Kind.INVOKE_OPEN: Action.OPEN_INVOKE,
    Kind.INVOKE_EMPTY: Action.EMPTY_INVOKE,
    Kind.INVOKE_BAD: Action.STRAY,
    Kind.INVOKE_CLOSE: Action.STRAY,
    Kind.PARAM_OPEN: Action.ORPHAN_PARAMETER,
    Kind.PARAM_ODD: Action.ORPHAN_PARAMETER,
    Kind.PARAM_BAD: Action.STRAY,
    Kind.PARAM_CLOSE: Action.STRAY,
    Kind.PARAM_CLOSE_BAD: Action.STRAY,
    Kind.OTHER_OPEN: Action.OPEN_BLOCK,
    Kind.OTHER_INVOKE: Action.BAD_INVOKE,
    Kind.OTHER_CLOSE: Action.STRAY,
}
_BLOCK = _PROSE | {
    Kind.THINK_CLOSE: Action.LEAVE_REASONING,
    Kind.WRAP_OPEN: Action.STRAY,
    Kind.OTHER_OPEN: Action.STRAY,
    Kind.WRAP_CLOSE: Action.CLOSE_BLOCK,
    Kind.INVOKE_BAD: Action.BAD_INVOKE,
    Kind.PARAM_BAD: Action.ORPHAN_PARAMETER,
}
_INVOKE = _BLOCK | {
    Kind.WRAP_CLOSE: Action.BREAK_AND_CLOSE,
    Kind.INVOKE_OPEN: Action.BREAK_TO_INVOKE,
    Kind.INVOKE_EMPTY: Action.BREAK_TO_EMPTY,
    Kind.INVOKE_CLOSE: Action.COMMIT,
    Kind.PARAM_OPEN: Action.OPEN_PARAMETER,
    Kind.PARAM_ODD: Action.BAD_PARAMETER,
    Kind.PARAM_BAD: Action.BAD_PARAMETER,
    Kind.PARAM_CLOSE_BAD: Action.STRAY,
}
_VALUE = _INVOKE | {
    Kind.THINK_OPEN: Action.LITERAL,
    Kind.THINK_CLOSE: Action.LITERAL,
    Kind.CONTROL: Action.LITERAL,
    Kind.SENTINEL: Action.LITERAL,
    Kind.OTHER_OPEN: Action.LITERAL,
    Kind.OTHER_INVOKE: Action.LITERAL,
    Kind.WRAP_OPEN: Action.BREAK_TO_BLOCK,
    Kind.INVOKE_CLOSE: Action.COMMIT_UNCLOSED,
    Kind.PARAM_OPEN: Action.NESTED,
    Kind.PARAM_ODD: Action.NESTED,
    Kind.PARAM_BAD: Action.NESTED,
    Kind.PARAM_CLOSE: Action.CLOSE_PARAMETER,
    Kind.PARAM_CLOSE_BAD: Action.BAD_CLOSER,
    Kind.OTHER_CLOSE: Action.BAD_CLOSER,
}
_BODY = _VALUE | {
    Kind.INVOKE_CLOSE: Action.COMMIT,
    Kind.PARAM_CLOSE: Action.STRAY,
    Kind.PARAM_CLOSE_BAD: Action.STRAY,
    Kind.OTHER_CLOSE: Action.STRAY,
}

TRANSITIONS: dict[State, dict[Kind, Action]] = {
    State.CONTENT: _PROSE | {Kind.THINK_OPEN: Action.OPEN_REASONING},
    State.REASONING: _PROSE | {Kind.THINK_CLOSE: Action.CLOSE_REASONING},
    State.AFTER: _PROSE,
    State.BLOCK: _BLOCK,
    State.INVOKE: _INVOKE,
    State.STRING: _VALUE,
    State.JSON: _VALUE,
    State.BODY: _BODY,
    State.ENVELOPE: _BODY,
}
