"""Text and tokens of a model family: the decoder of assistant turns. Pure; a leaf.

    from closeranks.codec import Decoder, assemble

    decoder = Decoder(dialect="v4", thinking=True, tools=request_tools)
    events = [event for delta in stream for event in decoder.feed(delta)] + decoder.close("stop")
    turn = assemble(events)   # turn.reasoning, turn.content, turn.tool_calls, turn.discarded

See docs/codec.md for policies, bounds and how to add a dialect.
"""

from closeranks.codec.decoder import Decoder
from closeranks.codec.dialects import DIALECTS, Dialect, dialect_of
from closeranks.codec.events import (
    REASONS,
    Content,
    Discarded,
    Event,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Turn,
    assemble,
    merge,
)
from closeranks.codec.intake import Tokenizer
from closeranks.codec.machine import State
from closeranks.codec.policy import Policy

__all__ = [
    "DIALECTS",
    "REASONS",
    "Content",
    "Decoder",
    "Dialect",
    "Discarded",
    "Event",
    "Policy",
    "Reasoning",
    "State",
    "Tokenizer",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "Turn",
    "assemble",
    "dialect_of",
    "merge",
]
