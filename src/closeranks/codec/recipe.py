"""The only place that knows `deepseek-recipe`, DeepSeek's own encoder of V4 and V4.1 (PyPI, MIT, optional).

It is asked to render and not to encode: its rendering names the ranges that are control tokens, and these become
`token` segments. Conversations are built directly and not from a request body: the library's request conversion refuses
what it would not serve (a history with a missing tool result, a forced tool choice while thinking), which is not the
encoder's to decide.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.codec.encoder import (
    EncodeError,
    Message,
    Prompt,
    Segment,
    Tool,
    arguments_of,
    clean,
    join_segments,
    text_of,
)

# Names of the effort levels of OpenAI, SGLang and vLLM -> the library's.
_EFFORT = {"minimal": "low", "low": "low", "medium": "low", "high": "high", "xhigh": "xhigh", "max": "max"}


class RecipeEncoder:
    """Prompts of DeepSeek V4 (`v4`) and V4.1 (`v41`)."""

    def __init__(self, dialect: str) -> None:
        try:
            import deepseek_recipe
        except ImportError as error:
            raise EncodeError(
                f"prompts of DeepSeek {dialect} are written by deepseek-recipe, which is not installed: "
                "pip install 'closeranks[recipe]'"
            ) from error
        self._recipe = deepseek_recipe
        v41 = dialect == "v41"
        self._encoding = deepseek_recipe.DeepseekV41Encoding() if v41 else deepseek_recipe.DeepseekV4Encoding()

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **extra: Any,
    ) -> Prompt:
        """See `Encoder.encode`. `developer` messages are system messages; an unknown effort is the default one."""
        thinking = thinking and reasoning_effort != "none"
        if not messages:
            raise EncodeError("there are no messages")
        recipe = self._recipe
        try:
            conversation = recipe.Conversation(
                [self._message(message, thinking) for message in messages],
                thinking_mode=thinking,
                tools=[self._tool(tool) for tool in tools] or None,
                reasoning_effort=_EFFORT.get(reasoning_effort or "") if thinking else None,
            )
            rendered = self._encoding.render_conversation(conversation)
        except ValueError as error:
            raise EncodeError(str(error)) from error
        return Prompt(_segments(rendered.prompt, rendered.special_ranges), thinking)

    def _message(self, message: Message, thinking: bool) -> Any:
        recipe = self._recipe
        role = str(message.get("role") or "")
        content = text_of(message.get("content"), role)
        match role:
            case "system" | "developer":
                return recipe.SystemMessage(content)
            case "user":
                return recipe.UserMessage(content)
            case "tool" | "function":
                return recipe.ToolMessage(content, str(message.get("tool_call_id") or "") or None)
            case "latest_reminder":
                return recipe.LatestReminderMessage(content)
            case "assistant":
                reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
                calls = [self._call(call) for call in message.get("tool_calls") or ()]
                return recipe.AssistantMessage(
                    content, clean(str(reasoning)) if thinking else None, calls or None, bool(message.get("prefix"))
                )
            case _:
                raise EncodeError(f"there is no role {role!r} in the format of DeepSeek V4")

    def _call(self, call: Mapping[str, Any]) -> Any:
        name = str((call.get("function") or {}).get("name") or "")
        arguments = clean(json.dumps(arguments_of(call), ensure_ascii=False))
        return self._recipe.ToolCall(clean(str(call.get("id") or "")), clean(name), arguments)

    def _tool(self, tool: Tool) -> Any:
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise EncodeError("a tool must be an object with a `function` that has a `name`")
        known = json.loads(clean(json.dumps(dict(function), ensure_ascii=False)))
        return self._recipe.ToolDefinition(
            known["name"], known.get("description"), known.get("parameters"), known.get("strict")
        )


def _segments(text: str, ranges: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    segments = []
    at = 0
    for start, end in ranges:
        segments += [Segment(text[at:start], "text"), Segment(text[start:end], "token")]
        at = end
    return join_segments([*segments, Segment(text[at:], "text")])
