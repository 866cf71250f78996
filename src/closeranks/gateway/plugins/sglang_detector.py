"""closeranks' decoder as a tool-call and reasoning detector of SGLang.

    sglang serve --model-path MODEL ... --tool-call-parser closeranks-v4 --reasoning-parser closeranks-v4

SGLang finds `install` by the entry point that an installation of closeranks declares (`sglang.srt.plugins`), and calls
it in each of its processes: the HTTP server decodes, and the scheduler asks the reasoning detector for its tokens.
`install` puts the detectors into SGLang's tables under the names closeranks-v32, -v4, -v41 and -hermes.

SGLang splits reasoning off before it looks for calls, in two objects that do not know each other. So the reasoning
detector only finds where the reasoning ends (at its closer, or where a block of calls opens inside it), cleans the part
before, and hands the rest on untouched to the tool-call detector, which decodes it. Without a tool-call parser behind
it, it decodes the rest itself, without tools.

Written for SGLang 0.5.23.
"""

import re
from collections.abc import Sequence
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult as ToolResult
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.deepseekv4_detector import DeepSeekV4Detector
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector
from sglang.srt.function_call.deepseekv41_detector import DeepSeekV41Detector
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector, ReasoningParser
from sglang.srt.parser.reasoning_parser import StreamingParseResult as ReasoningResult

from closeranks.codec import Content, Decoder, Event, Reasoning, ToolCallArguments, ToolCallStart, assemble
from closeranks.codec.lexicon import LOOK_ALIKES

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# What ends the reasoning: its closer, or the opener of a block. A lone invoke inside the reasoning does not.
_END = re.compile(
    rf"</think>|<[｜{LOOK_ALIKES}]{{1,2}} ?DSML ?[｜{LOOK_ALIKES}]{{1,2}} ?(?!invo|para)[a-z_]{{4}}|<tool_call>",
)
_LONGEST_END = 32  # characters from its `<` until `_END` has matched or cannot


def _tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    return [tool if isinstance(tool, dict) else tool.model_dump() for tool in tools or ()]


class CloseranksDetector:
    """What the tool-call detectors share. Mixed into SGLang's own, whose grammars for guided decoding stay in place."""

    dialect = "v4"
    _decoder: Decoder | None = None

    @classmethod
    def parses_without_tools(cls) -> bool:
        """Markup is taken out of the text of requests without tools, too."""
        return True

    def has_tool_call(self, text: str) -> bool:
        """Whether the text must be decoded: anything that could be markup. SGLang shows it as it is otherwise."""
        return "<" in text or "｜" in text

    def detect_and_parse(self, text: str, tools: Sequence[Any]) -> ToolResult:
        """Decode a whole output."""
        decoder = Decoder(dialect=self.dialect, tools=_tools(tools))
        turn = assemble([*decoder.feed(text), *decoder.close()])
        calls = [
            ToolCallItem(tool_index=index, name=call.name, parameters=call.arguments)
            for index, call in enumerate(turn.tool_calls)
        ]
        return ToolResult(normal_text=turn.content, calls=calls)

    def parse_streaming_increment(self, new_text: str, tools: Sequence[Any]) -> ToolResult:
        """Decode the next piece."""
        if self._decoder is None:
            self._decoder = Decoder(dialect=self.dialect, tools=_tools(tools))
        return _result(self._decoder.feed(new_text))

    def finish(self, tools: Sequence[Any]) -> ToolResult:
        """What is held back at the end."""
        if self._decoder is None:
            return ToolResult()
        decoder, self._decoder = self._decoder, None
        return _result(decoder.close())


def _result(events: Sequence[Event]) -> ToolResult:
    text = ""
    calls: list[ToolCallItem] = []
    for event in events:
        if isinstance(event, (Content, Reasoning)):
            text += event.text
        elif isinstance(event, ToolCallStart):
            calls.append(ToolCallItem(tool_index=event.index, name=event.name, parameters=""))
        elif isinstance(event, ToolCallArguments):
            if calls and calls[-1].tool_index == event.index and calls[-1].name is None:
                calls[-1].parameters += event.delta
            else:
                calls.append(ToolCallItem(tool_index=event.index, parameters=event.delta))
    return ToolResult(normal_text=text, calls=calls)


class CloseranksReasoningDetector(BaseReasoningFormatDetector):  # type: ignore[misc]
    """Splits the reasoning off; see the module."""

    dialect = "v4"
    default = "explicit_thinking"
    _in_reasoning: bool  # as `force_reasoning` says, to begin with

    def __init__(
        self,
        stream_reasoning: bool = True,
        force_reasoning: bool = False,
        continue_final_message: bool = False,
        previous_content: str = "",
        force_nonempty_content: bool = False,
        tool_call_parser_active: bool = False,
    ) -> None:
        super().__init__(
            THINK_OPEN,
            THINK_CLOSE,
            force_reasoning=force_reasoning,
            stream_reasoning=stream_reasoning,
            continue_final_message=continue_final_message,
            previous_content=previous_content,
            thinks_internally=True,
            reasoning_default=self.default,
            force_nonempty_content=force_nonempty_content,
        )
        self._raw_content = tool_call_parser_active
        self._start()

    def _start(self) -> None:
        self._began = self._in_reasoning  # else an output may open its reasoning itself, at its very start
        self._held = ""
        self._reasoning_held = ""
        self._thought = Decoder(dialect=self.dialect, thinking=True, tools=[])
        self._answer = Decoder(dialect=self.dialect, tools=[])

    def parse_streaming_increment(self, new_text: str) -> ReasoningResult:
        """Split the next piece."""
        return self._take(new_text, final=False)

    def finish(self) -> ReasoningResult:
        """What is held back at the end."""
        return self._take("", final=True)

    def detect_and_parse(self, text: str) -> ReasoningResult:
        """Split a whole output."""
        self._start()
        first = self._take(text, final=False)
        last = self._take("", final=True)
        return ReasoningResult(
            normal_text=first.normal_text + last.normal_text, reasoning_text=first.reasoning_text + last.reasoning_text
        )

    def _take(self, text: str, final: bool) -> ReasoningResult:
        text = self._held + text
        self._held = ""
        thought: list[Event] = []
        if not self._began:
            start = text.lstrip()
            if not final and THINK_OPEN.startswith(start):
                self._held = text
                return ReasoningResult()
            self._began = True
            if start.startswith(THINK_OPEN):
                self._in_reasoning = True
                text = start.removeprefix(THINK_OPEN)
        if self._in_reasoning:
            end = _END.search(text)
            if end is None:
                keep = 0 if final else _undecided(text)
                self._held = text[len(text) - keep :]
                thought = self._thought.feed(text[: len(text) - keep])
                text = ""
            else:
                before = text[: end.start()]
                if end.group() != THINK_CLOSE:
                    before = before[: len(before) - _framing(before)]
                thought = [*self._thought.feed(before), *self._thought.close()]
                self._in_reasoning = False
                text = text[end.end() if end.group() == THINK_CLOSE else end.start() :]
            if final and self._in_reasoning:
                thought += self._thought.close()
        return self._say(thought, text, final)

    def _say(self, thought: Sequence[Event], text: str, final: bool) -> ReasoningResult:
        reasoning = self._reasoning_held + "".join(e.text for e in thought if isinstance(e, Reasoning))
        self._reasoning_held = ""
        if self._in_reasoning and not self.stream_reasoning and not final:
            self._reasoning_held, reasoning = reasoning, ""
        if not self._raw_content:
            answer = self._answer.feed(text) + (self._answer.close() if final else [])
            text = "".join(e.text for e in answer if isinstance(e, Content))
        if self._force_nonempty_content:
            self._accumulated_reasoning += reasoning
            if final and self._in_reasoning:
                text, reasoning = self._accumulated_reasoning + text, ""
        return ReasoningResult(normal_text=text, reasoning_text=reasoning)


def _undecided(text: str) -> int:
    """How many characters at the end might begin what `_END` looks for, or be the newlines before it."""
    at = text.rfind("<", max(0, len(text) - _LONGEST_END))
    if at < 0 or ">" in text[at:] or "\n" in text[at:]:
        at = len(text)
    return len(text) - at + _framing(text[:at])


def _framing(text: str) -> int:
    """How many newlines at the end belong to the framing of a block that follows: at most two."""
    return min(2, len(text) - len(text.rstrip("\n")))


_BASES: dict[str, type[BaseFormatDetector]] = {
    "v32": DeepSeekV32Detector,
    "v4": DeepSeekV4Detector,
    "v41": DeepSeekV41Detector,
    "hermes": HermesDetector,
}


def install() -> list[str]:
    """Put the detectors into SGLang's tables; the names under which they are found there."""
    names = []
    for dialect, base in _BASES.items():
        name = f"closeranks-{dialect}"
        fields = {"dialect": dialect, "__module__": __name__}
        kind = dialect.title()
        FunctionCallParser.ToolCallParserEnum[name] = type(
            f"{kind}CloseranksDetector", (CloseranksDetector, base), fields
        )
        default = {"default": "always"} if dialect == "hermes" else {}
        ReasoningParser.DetectorMap[name] = type(
            f"{kind}CloseranksReasoningDetector", (CloseranksReasoningDetector,), {**fields, **default}
        )
        names.append(name)
    return names
