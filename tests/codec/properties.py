"""The properties that hold for any input whatever, as one function to be called from every test and fuzzer.

P0 no marker in content, reasoning or a tool name, asserted on the output strings; arguments are strict JSON if and only
   if the call is complete. P1 nothing raises. P2 any chunking gives the same events. P3 calls start, go on and end in
   order, each once. P4 what is held stays under the bound of its state.
"""

import json
import random
from typing import Any

from closeranks.codec import (
    REASONS,
    Content,
    Decoder,
    Discarded,
    Event,
    Policy,
    State,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Turn,
    assemble,
    merge,
)
from closeranks.codec.envelope import WHOLE_LIMIT
from closeranks.codec.jsonstream import MAX_PENDING, MAX_SCALAR
from closeranks.codec.lexicon import HEAD_LIMIT, LOOKAHEAD_LIMIT, TAG_LIMIT, lexicon_of
from closeranks.codec.machine import CHAIN_LIMIT, JUNK_LIMIT
from closeranks.codec.quoting import Quoting

_MARKER = HEAD_LIMIT + TAG_LIMIT
_PROSE = 2 + CHAIN_LIMIT + max(_MARKER, LOOKAHEAD_LIMIT)
BOUNDS = {
    State.CONTENT: _PROSE,
    State.REASONING: _PROSE,
    State.AFTER: _PROSE,
    State.BLOCK: _PROSE + _MARKER + 16 + JUNK_LIMIT,
    State.INVOKE: _PROSE + _MARKER,
    State.STRING: _PROSE + _MARKER,
    State.JSON: _PROSE + _MARKER + MAX_PENDING + MAX_SCALAR,
    State.BODY: _PROSE + _MARKER + MAX_PENDING + MAX_SCALAR,
    State.ENVELOPE: _PROSE + _MARKER + WHOLE_LIMIT,
}


def run(pieces: list[Any], **settings: Any) -> list[Event]:
    """All events of one chunking, with P4 asserted on the way."""
    finish = settings.pop("finish_reason", "stop")
    decoder = Decoder(**settings)
    events: list[Event] = []
    for piece in pieces:
        events += decoder.feed(piece)
        assert decoder.held <= BOUNDS[decoder.state], (decoder.state, decoder.held)
    return events + decoder.close(finish)


def check_order(events: list[Event]) -> None:
    """P3, and that every reason is a documented one."""
    open_call: int | None = None
    ended = 0
    for event in events:
        match event:
            case ToolCallStart(index, name):
                assert open_call is None, "a call starts inside another"
                assert index == ended
                assert name
                open_call = index
            case ToolCallArguments(index, delta):
                assert index == open_call
                assert delta
            case ToolCallEnd(index, complete, reason):
                assert index == open_call
                assert complete == (not reason)
                assert complete or reason in REASONS
                open_call, ended = None, ended + 1
            case Discarded(text, reason, _):
                assert text
                assert reason in REASONS
            case _:
                assert event.text
    assert open_call is None, "a call never ended"


def check_json(events: list[Event]) -> None:
    """P0, arguments: strict JSON object if and only if the call is complete."""
    arguments = ""
    for event in events:
        match event:
            case ToolCallStart():
                arguments = ""
            case ToolCallArguments(_, delta):
                arguments += delta
            case ToolCallEnd(_, complete, _):
                try:
                    value = json.loads(arguments, parse_constant=lambda name: 1 / 0)
                    json.dumps(value, ensure_ascii=False).encode()
                    valid = isinstance(value, dict)
                except ValueError:
                    valid = False
                assert valid == complete, (valid, complete, arguments)


def check_text(text: str, dialect: str, quoted: bool) -> None:
    """P0, one output string: every marker left in it stands in code."""
    text.encode()
    head = lexicon_of(Decoder(dialect).dialect).strict_head
    for found in head.finditer(text):
        inside = Quoting()
        inside.update(text[: found.start()])
        assert quoted, (found.group(), text)
        assert inside.quoted(), (found.group(), text)


def check(text: str, rng: random.Random, **settings: Any) -> Turn:
    """All properties of one text; returns its turn."""
    whole = run([text], **settings)
    check_order(whole)
    check_json(whole)
    turn = assemble(whole)
    policy = settings.get("policy", Policy())
    dialect = settings.get("dialect", "v4")
    for output in (turn.content, turn.reasoning):
        check_text(output, dialect, policy.quoted == "keep")
    for call in turn.tool_calls:
        check_text(call.name, dialect, False)
    expected = merge(whole)
    chunkings: list[list[Any]] = [list(text)]
    places = rng.sample(range(len(text)), min(len(text), 4))
    chunkings += [[text[:place], text[place:]] for place in places]
    if text:
        step = rng.randint(2, 9)
        chunkings.append([text[i : i + step] for i in range(0, len(text), step)])
    data = text.encode("utf-8", "surrogatepass")
    if data.decode("utf-8", "replace") == text:
        chunkings.append([data[i : i + 1] for i in range(len(data))])
    for pieces in chunkings:
        assert merge(run(pieces, **settings)) == expected, pieces
    return turn


def settings_of(rng: random.Random) -> dict[str, Any]:
    """A setting of the decoder, most often a usual one."""
    tools = rng.choice([None, None, ["f", "get_weather", "bash"], [], [_schema("f"), _schema("bash")]])
    return {
        "dialect": rng.choice(["v4", "v4", "v4", "v32", "v41", "hermes"]),
        "thinking": rng.random() < 0.4,
        "tools": tools,
        "tool_choice": rng.choice(["auto", "auto", "auto", "none", "required"]),
        "finish_reason": rng.choice(["stop", "length", None]),
        "starts_in_tool_calls": rng.random() < 0.1,
        "policy": Policy() if rng.random() < 0.6 else random_policy(rng),
    }


def random_policy(rng: random.Random) -> Policy:
    """Each switch at random."""
    from typing import get_args, get_type_hints

    return Policy(**{name: rng.choice(get_args(kind)) for name, kind in get_type_hints(Policy).items()})


def _schema(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {"k": {}, "city": {"type": "string"}}}},
    }


def visible(events: list[Event]) -> str:
    """Content only."""
    return "".join(event.text for event in events if isinstance(event, Content))
