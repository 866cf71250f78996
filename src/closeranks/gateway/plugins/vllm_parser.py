"""closeranks' decoder as a tool and reasoning parser of vLLM.

    vllm serve MODEL --enable-auto-tool-choice \\
        --tool-parser-plugin closeranks.gateway.plugins.vllm_parser --tool-call-parser closeranks_v4 \\
        --reasoning-parser-plugin closeranks.gateway.plugins.vllm_parser --reasoning-parser closeranks_v4

Names: closeranks_v32, closeranks_v4, closeranks_v41, closeranks_hermes. vLLM has two parsers per request, one after the
other; a model's output is one language, in which a call may begin inside the reasoning. So the pair shares one decoder:
the reasoning parser, made first, owns it, and the tool parser made right after it gives it the request's tools. Either
also works alone: a tool parser without a reasoning parser takes the output to start with content, a reasoning parser
without a tool parser makes no calls, and strips them.

Written for vLLM's parser interface of 0.32 and 0.33 (`DelegatingParser`, `engine_based_streaming`).
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from closeranks.codec import (
    Content,
    Decoder,
    Event,
    Reasoning,
    State,
    ToolCallArguments,
    ToolCallStart,
    Turn,
    assemble,
)

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_made = threading.local()  # the reasoning parser that waits for its tool parser: vLLM makes both in one constructor


class Shared:
    """One request's decoder, and what of its events waits for the other parser to say it."""

    def __init__(self, dialect: str, thinking: bool) -> None:
        self.dialect = dialect
        self.thinking = thinking
        self.tools: list[Any] = []
        self.paired = False
        self.waiting: list[Event] = []  # released in the delta in which the reasoning ended
        self.handed_over = False  # the tool parser has taken over the stream
        self.turn: tuple[str, Turn] | None = None  # the last whole output that was decoded, and its content
        self._decoder: Decoder | None = None

    def new_decoder(self, thinking: bool) -> Decoder:
        """A decoder for this request."""
        return Decoder(dialect=self.dialect, thinking=thinking, tools=self.tools)

    def feed(self, text: str) -> list[Event]:
        """Feed the stream's decoder."""
        if self._decoder is None:
            self._decoder = self.new_decoder(self.thinking)
        return self._decoder.feed(text)

    def close(self) -> list[Event]:
        """End the stream. What still waits comes first."""
        events, self.waiting = self.waiting, []
        if self._decoder is not None:
            events += self._decoder.close()
        return events

    @property
    def reasoning_ended(self) -> bool:
        """Whether the stream's decoder has left the reasoning for good."""
        return self._decoder is not None and self._decoder.state is not State.REASONING and not self._decoder.held

    def whole(self, text: str, thinking: bool) -> Turn:
        """Decode a whole output."""
        decoder = self.new_decoder(thinking)
        return assemble([*decoder.feed(text), *decoder.close()])


def message(events: Iterable[Event]) -> DeltaMessage | None:
    """Events as one delta of vLLM's; None where there is nothing to send."""
    content = reasoning = ""
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, ToolCallStart):
            function = DeltaFunctionCall(name=event.name, arguments="")
            calls[event.index] = DeltaToolCall(index=event.index, type="function", id=_call_id(), function=function)
        elif isinstance(event, ToolCallArguments):
            if event.index not in calls:
                calls[event.index] = DeltaToolCall(index=event.index, function=DeltaFunctionCall(arguments=""))
            function = calls[event.index].function
            assert function is not None
            function.arguments = (function.arguments or "") + event.delta
    if not (content or reasoning or calls):
        return None
    fields: dict[str, Any] = {}
    if content:
        fields["content"] = content
    if reasoning:
        fields["reasoning"] = reasoning
    if calls:
        fields["tool_calls"] = list(calls.values())
    return DeltaMessage(**fields)


def _call_id() -> str:
    from vllm.utils import random_uuid

    return f"chatcmpl-tool-{random_uuid()}"


def _tools(tools: Iterable[Any] | None) -> list[dict[str, Any]]:
    """Tools of the Chat Completions and of the Responses API in one form."""
    plain = [tool if isinstance(tool, dict) else tool.model_dump() for tool in tools or ()]
    return [tool for tool in plain if isinstance(tool.get("function", tool).get("name"), str)]


class CloseranksReasoningParser(ReasoningParser):  # type: ignore[misc]
    """Owns the decoder until the reasoning ends, and for the whole stream if no tool parser was made with it."""

    dialect = "v4"
    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        options = kwargs.get("chat_template_kwargs") or {}
        asked = [options[key] for key in ("thinking", "enable_thinking") if key in options]
        thinking = any(asked) if asked else True
        self.shared = Shared(self.dialect, thinking and options.get("reasoning_effort") != "none")
        # A Hermes model that thinks opens its reasoning itself, and the decoder sees that.
        self._thinks_untold = self.shared.thinking and self.dialect != "hermes"
        self._open_id = self.vocab.get(THINK_OPEN)
        self._close_id = self.vocab.get(THINK_CLOSE)
        _made.parser = self

    @property
    def reasoning_start_str(self) -> str:
        """See vLLM."""
        return THINK_OPEN

    @property
    def reasoning_end_str(self) -> str:
        """See vLLM."""
        return THINK_CLOSE

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last think tag among the ids is a closer. Without any tag the request's thinking mode decides."""
        for token in reversed(input_ids):
            if token == self._close_id:
                return True
            if token == self._open_id:
                return False
        return not self._thinks_untold

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the closer is among the new ids."""
        return self._close_id in delta_ids

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt left the reasoning open."""
        self.shared.thinking = True

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids after the last closer."""
        for at in range(len(input_ids) - 1, -1, -1):
            if input_ids[at] == self._close_id:
                return input_ids[at + 1 :]
        return []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Ids before the closer."""
        ids = list(token_ids)
        return ids.index(self._close_id) if self._close_id in ids else (len(ids) if self.shared.thinking else 0)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """True hands the stream over to the tool parser. Alone, this parser keeps it."""
        return self.shared.paired and self.shared.reasoning_ended

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Whatever the decoder says. In the delta that ends the reasoning the rest waits for the tool parser."""
        events = self.shared.feed(delta_text)
        if not self.has_engine_confirmed_reasoning_end():
            return message(events)
        self.shared.waiting = [event for event in events if not isinstance(event, Reasoning)]
        return message(event for event in events if isinstance(event, Reasoning))

    def finish_streaming(self) -> DeltaMessage | None:
        """What the decoder holds, unless the tool parser goes on with it."""
        return None if self.has_engine_confirmed_reasoning_end() else message(self.shared.close())

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Decode a whole output; its calls wait for `extract_tool_calls`."""
        turn = self.shared.whole(model_output, self.shared.thinking)
        self.shared.turn = (turn.content, turn)
        return turn.reasoning or None, turn.content or None

    def adjust_request(self, request: Any) -> Any:
        """Markup must reach the decoder even where the tokenizer calls it special."""
        request.skip_special_tokens = False
        return request


class CloseranksToolParser(ToolParser):  # type: ignore[misc]
    """Takes over from the reasoning parser, or decodes alone."""

    dialect = "v4"
    engine_based_streaming = True
    supports_required_and_named = False  # calls come in the model's own format, not as JSON

    def __init__(self, tokenizer: Any, tools: list[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools)
        reasoning, _made.parser = getattr(_made, "parser", None), None
        if reasoning is not None and reasoning.model_tokenizer is tokenizer and reasoning.dialect == self.dialect:
            self.shared: Shared = reasoning.shared
            self.shared.paired = True
        else:
            self.shared = Shared(self.dialect, thinking=False)
        self.shared.tools = _tools(tools)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The next delta. The first one after the reasoning was decoded already."""
        shared = self.shared
        if not shared.handed_over:
            shared.handed_over = True
            if shared.paired and shared.reasoning_ended:
                events, shared.waiting = shared.waiting, []
                return message(events)
            shared.thinking = False  # the prompt had closed the reasoning
        return message(shared.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What the decoder holds, unless the reasoning parser still has it."""
        return message(self.shared.close()) if self.shared.handed_over else None

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls of a whole output (or of the content that `extract_reasoning` made of it)."""
        known, self.shared.turn = self.shared.turn, None
        turn = known[1] if known is not None and known[0] == model_output else self.shared.whole(model_output, False)
        calls = [
            ToolCall(id=_call_id(), type="function", function=FunctionCall(name=c.name, arguments=c.arguments))
            for c in turn.tool_calls
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=turn.content or None)

    def adjust_request(self, request: Any) -> Any:
        """Markup must reach the decoder even where the tokenizer calls it special."""
        request = super().adjust_request(request)
        request.skip_special_tokens = False
        return request


# The dialect, and the name of the grammar that vLLM (xgrammar) has for it: guided decoding stays as it is.
_GRAMMARS = {"v32": "deepseek_v3_2", "v4": "deepseek_v4", "v41": "deepseek_v4_1", "hermes": None}

for _dialect, _grammar in _GRAMMARS.items():
    _name = f"closeranks_{_dialect}"
    _fields = {"dialect": _dialect, "__module__": __name__}
    ReasoningParserManager.register_module(
        name=_name, module=type(f"Closeranks{_dialect.title()}ReasoningParser", (CloseranksReasoningParser,), _fields)
    )
    ToolParserManager.register_module(
        name=_name,
        module=type(
            f"Closeranks{_dialect.title()}ToolParser",
            (CloseranksToolParser,),
            {**_fields, "structural_tag_model": _grammar},
        ),
    )
