"""A pytest plug-in: vLLM's own tests of its DSML parsers, with closeranks in the place of these parsers.

Loaded by `vllm_tests.py`. The engine classes (`DeepSeekV4Parser`, ...) are replaced by one over the decoder, the
registered adapters by closeranks' vLLM plug-in. vLLM's parsers know no list of offered tools and take any name, so here
no list is given either.
"""

import json
from typing import Any

import vllm.parser.deepseek_v4 as deepseek_v4
import vllm.parser.deepseek_v32 as deepseek_v32
import vllm.parser.deepseek_v41 as deepseek_v41
import vllm.parser.engine.registered_adapters as registered
import vllm.tool_parsers.deepseekv4_engine_tool_parser as v4_tool_parser
import vllm.tool_parsers.deepseekv32_engine_tool_parser as v32_tool_parser
from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from closeranks.codec import Decoder, Turn, assemble
from closeranks.gateway.plugins import vllm_parser as plugin

GRAMMARS = {"v32": "deepseek_v3_2", "v4": "deepseek_v4", "v41": "deepseek_v4_1"}


class AnyTool:
    """Mixed into the plug-in's tool parser: without tools every name is taken."""

    def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(tokenizer, tools, **kwargs)
        self.shared.tools = _tools(tools)  # type: ignore[attr-defined]


def _tools(tools: Any) -> Any:
    """Real tools with their schemas and any other name besides; None if there are none."""
    given = []
    for tool in tools or ():
        function = getattr(tool, "function", tool)
        given.append({"function": {"name": function.name, "parameters": function.parameters}})
    return given or None


def engine(dialect: str, config: Any, thinks: bool) -> type:
    """A stand-in for vLLM's `ParserEngine` of a dialect, over the decoder."""

    class Engine:
        def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
            options = kwargs.get("chat_template_kwargs") or {}
            asked = [options[key] for key in ("thinking", "enable_thinking") if key in options]
            self.thinking = thinks and (any(asked) if asked else True) and options.get("reasoning_effort") != "none"
            self.shared = plugin.Shared(dialect, self.thinking)
            self.shared.tools = _tools(tools)
            self.vocab = tokenizer.get_vocab()
            self.parser_engine_config = config(thinking=self.thinking) if thinks else config()

        def _whole(self, text: str) -> Turn:
            return self.shared.whole(text, self.thinking)

        def extract_reasoning(self, text: str, request: Any) -> tuple[str | None, str | None]:
            turn = self._whole(text)
            return turn.reasoning or None, turn.content or None

        def extract_tool_calls(self, text: str, request: Any) -> ExtractedToolCallInformation:
            turn = self._whole(text)
            calls = [
                ToolCall(type="function", function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in turn.tool_calls
            ]
            return ExtractedToolCallInformation(
                tools_called=bool(calls), tool_calls=calls, content=turn.content or None
            )

        def parse(self, text: str, request: Any, *_: Any, **__: Any) -> tuple[str | None, str | None, Any]:
            turn = self._whole(text)
            calls = [FunctionCall(name=call.name, arguments=call.arguments) for call in turn.tool_calls]
            return turn.reasoning or None, turn.content or None, calls or None

        def extract_reasoning_streaming(self, **delta: Any) -> Any:
            return plugin.message(self.shared.feed(delta["delta_text"]))

        def extract_tool_calls_streaming(self, **delta: Any) -> Any:
            return plugin.message(self.shared.feed(delta["delta_text"]))

        def parse_delta(self, delta_text: str, ids: Any, request: Any, prompt: Any = None, *, finished: bool) -> Any:
            events = self.shared.feed(delta_text)
            return plugin.message([*events, *(self.shared.close() if finished else ())])

        def finish_streaming(self) -> Any:
            return plugin.message(self.shared.close())

    return Engine


def convert_arguments(raw: str, partial: bool) -> str:
    """vLLM's converter of raw parameters to JSON, by way of a whole invoke."""
    closer = "" if partial else "</｜DSML｜invoke>"
    decoder = Decoder(dialect="v4")
    events = [*decoder.feed(f'<｜DSML｜invoke name="f">{raw}{closer}'), *decoder.close("length")]
    calls = assemble(events).tool_calls
    if calls:
        return calls[0].arguments
    return "".join(event.delta for event in events if hasattr(event, "delta"))


def unwrap(arguments: str, tools: Any, name: str | None) -> str:
    """vLLM's removal of a wrapper key, by way of a call whose one parameter is the wrapper."""
    decoder = Decoder(dialect="v4", tools=_tools(tools))
    pieces = [f'<｜DSML｜invoke name="{name}">']
    for key, value in json.loads(arguments).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = "true" if isinstance(value, str) else "false"
        pieces.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>')
    events = [*decoder.feed("".join(pieces) + "</｜DSML｜invoke>"), *decoder.close()]
    return assemble(events).tool_calls[0].arguments


def _replace() -> None:
    for module, name, dialect, config, thinks in (
        (deepseek_v4, "DeepSeekV4Parser", "v4", deepseek_v4.deepseek_v4_config, True),
        (deepseek_v32, "DeepSeekV32Parser", "v32", deepseek_v32.deepseek_v32_config, False),
        (deepseek_v41, "DeepSeekV41Parser", "v41", deepseek_v41.deepseek_v41_config, True),
    ):
        setattr(module, name, engine(dialect, config, thinks))
        reasoning = type(f"Reasoning{dialect}", (plugin.CloseranksReasoningParser,), {"dialect": dialect})
        fields = {"dialect": dialect, "structural_tag_model": GRAMMARS[dialect]}
        tool = type(f"Tool{dialect}", (AnyTool, plugin.CloseranksToolParser), fields)
        setattr(registered, f"{name}ReasoningAdapter", reasoning)
        setattr(registered, f"{name}ToolAdapter", tool)
        if dialect == "v4":
            v4_tool_parser.DeepSeekV4EngineToolParser = tool
        if dialect == "v32":
            v32_tool_parser.DeepSeekV32EngineToolParser = tool
        official = {"v32": "deepseek_v32", "v4": "deepseek_v4", "v41": "deepseek_v41"}[dialect]
        ToolParserManager.tool_parsers[official] = tool
        ReasoningParserManager.reasoning_parsers[official] = reasoning
    deepseek_v4._dsml_arg_converter = convert_arguments
    deepseek_v4._unwrap_wrapper_args = unwrap


_replace()
