"""What a decoder says: frozen events, and the turn that they add up to.

A consumer that streams (an OpenAI gateway, a proxy) maps events one to one onto its own deltas; one that does not calls
`assemble`. For every call the order is `ToolCallStart`, any number of `ToolCallArguments`, one `ToolCallEnd`; calls do
not overlap, and indices count from 0 without gaps. Concatenated `delta`s are the call's JSON text. That text parses if
and only if the call is complete: the last brace is sent with the commit, so a cut or abandoned call cannot be run by
accident even by a consumer that overlooks `complete`.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning part."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of an offered tool begins. `index` is its place in the turn."""

    index: int
    name: str


@dataclass(frozen=True, slots=True, init=False)  # the most frequent one: dataclass's own __init__ takes twice as long
class ToolCallArguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    delta: str

    def __init__(self, index: int, delta: str) -> None:
        _index(self, index)
        _delta(self, delta)


_index = ToolCallArguments.__dict__["index"].__set__
_delta = ToolCallArguments.__dict__["delta"].__set__


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call ends. `complete` is the commit; otherwise `reason` (a `Discarded` reason) says why there is none."""

    index: int
    complete: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Discarded:
    """Text that ends neither in content nor in reasoning nor in a call.

    `reason` is one of `closeranks.codec.REASONS`; `where` is the state that it was read in: content, reasoning, after,
    block, invoke, value or call.
    """

    text: str
    reason: str
    where: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | Discarded

REASONS: dict[str, str] = {
    "stray_markup": "a marker with nothing to open or close at this place",
    "spliced_markup": "the character that would have completed a marker out of text already sent",
    "control_token": "a control token of the model (end of sentence, user, ...) as text",
    "empty_block": "the markers of a block without an invoke",
    "no_invoke": "a block opener after which text went on: a mention, not a block; the text is kept",
    "no_body": "an invoke opener after which text went on: a mention, not a call",
    "junk_in_block": "text between the parts of a block or of an invoke",
    "after_call": "text after a committed call (policy text_after)",
    "tool_not_offered": "an invoke of a tool that the request did not offer (policy unknown_tool)",
    "tools_disabled": "an invoke although the request has no tools, or tool_choice none",
    "draft_in_reasoning": "an invoke without its wrapper inside reasoning (policy bare_invoke_in_reasoning)",
    "spelled_markup": "a block with spelled sentinels under policy spelled='strip'",
    "malformed_invoke": "an invoke whose name cannot be read, or that has no opener",
    "malformed_parameter": "a parameter that cannot be read as written (policy malformed_parameter)",
    "duplicate_parameter": "a parameter given twice",
    "malformed_json": 'the rest of a string="false" value after the point where it stopped being JSON',
    "unclosed_call": "an invoke that ended without its closer",
    "cut": "the stream ended inside markup or inside a call",
    "limit": "a bound of the decoder was reached (`closeranks.codec.lexicon` names them)",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A committed call: the tool's name and its arguments as the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """All of one assistant turn. `discarded` also holds the arguments of calls that were begun but not committed."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    discarded: tuple[Discarded, ...]


def merge(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined: equal for every chunking of the same output."""
    merged: list[Event] = []
    run: list[str] = []
    head: Event | None = None

    def flush() -> None:
        match head:
            case Content():
                merged.append(Content("".join(run)))
            case Reasoning():
                merged.append(Reasoning("".join(run)))
            case ToolCallArguments():
                merged.append(ToolCallArguments(head.index, "".join(run)))
            case Discarded():
                merged.append(Discarded("".join(run), head.reason, head.where))
            case _:
                pass

    for event in events:
        match event:
            case Content() | Reasoning():
                same, piece = type(head) is type(event), event.text
            case ToolCallArguments():
                same, piece = isinstance(head, ToolCallArguments) and head.index == event.index, event.delta
            case Discarded():
                same = isinstance(head, Discarded) and (head.reason, head.where) == (event.reason, event.where)
                piece = event.text
            case _:
                flush()
                head, run = None, []
                merged.append(event)
                continue
        if not same:
            flush()
            head, run = event, []
        run.append(piece)
    flush()
    return merged


def assemble(events: Iterable[Event]) -> Turn:
    """The turn that a whole stream of events (feeds and close) adds up to."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    discarded: list[Discarded] = []
    name = ""
    arguments: list[str] = []
    for event in merge(events):
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(_, name):
                arguments = []
            case ToolCallArguments(_, delta):
                arguments.append(delta)
            case ToolCallEnd(_, complete, reason):
                if complete:
                    calls.append(ToolCall(name, "".join(arguments)))
                else:
                    discarded.append(Discarded(f"{name}({''.join(arguments)}", reason, "call"))
            case Discarded():
                discarded.append(event)
    return Turn("".join(reasoning), "".join(content), tuple(calls), tuple(discarded))
