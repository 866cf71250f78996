"""Prompts of DeepSeek V3.2. The format is that of DeepSeek's own test prompts, published with the model's weights.

Differences to V4: `function_calls` as wrapper, results as `<function_results>`, the assistant header inside the user
turn, tools in the first system message, and no reasoning effort. (The copies of the encoding module in vLLM 0.32 and
SGLang 0.5.23 have lost the blank lines of the text about tools; the test prompts have them.)
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

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_THINK, _THOUGHT = "<think>", "</think>"
_DSML = "｜DSML｜"
_TOKENS = (_BOS, _EOS, _USER, _ASSISTANT, _THINK, _THOUGHT, _DSML)

# The text before and after the list of tools, word for word as the model was trained with it.
_TOOLS_HEAD = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_TAIL = "\n</functions>\n"


class V32Encoder:
    """See `Encoder`."""

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **extra: Any,
    ) -> Prompt:
        """See `Encoder.encode`. Reasoning of turns before the last user message is left out, as in training."""
        thinking = thinking and reasoning_effort != "none"
        if not messages:
            raise EncodeError("there are no messages")
        messages = _results_in_call_order(messages)
        writer = _Writer(messages, thinking)
        writer.own(_BOS)
        tools_at = next((i for i, m in enumerate(messages) if m.get("role") == "system"), -1)
        if tools and tools_at < 0:
            writer.tools(tools)
        for index, message in enumerate(messages):
            writer.message(index, message)
            if tools and index == tools_at:
                writer.tools(tools)
        return Prompt(join_segments(writer.segments), thinking)


class _Writer:
    def __init__(self, messages: Sequence[Message], thinking: bool) -> None:
        self.segments: list[Segment] = []
        self._thinking = thinking
        users = [i for i, m in enumerate(messages) if m.get("role") in ("user", "developer")]
        self._last_user = users[-1] if users else -1
        self._results_left = 0

    def text(self, text: str) -> None:
        """Text of the request: never a token."""
        self.segments.append(Segment(clean(text), "text"))

    def own(self, text: str) -> None:
        """Text of the format: the control tokens in it are tokens."""
        while text:
            at, token = min(((text.find(t), t) for t in _TOKENS if t in text), default=(len(text), ""))
            self.segments += [Segment(text[:at], "text"), Segment(token, "token")]
            text = text[at + len(token) :]

    def tools(self, tools: Sequence[Tool]) -> None:
        self.own("\n\n" + _TOOLS_HEAD)
        self.text("\n".join(_json(tool.get("function", tool)) for tool in tools))
        self.own(_TOOLS_TAIL)

    def message(self, index: int, message: Message) -> None:
        role = message.get("role")
        content = text_of(message.get("content"), str(role))
        own_tools = message.get("tools")
        if role == "system":
            self.text(content)
            if own_tools:
                self.tools(own_tools)
        elif role in ("user", "developer"):
            self.own(_USER)
            if role == "developer" and own_tools:
                self.tools(own_tools)
            if role == "developer":
                self.own("\n\n# The user's message is: ")
            self.text(content)
            self.own(_ASSISTANT + self._opener(index == self._last_user))
        elif role == "tool":
            self._result(index, content)
        elif role == "assistant":
            self._assistant(index, message, content)
        else:
            raise EncodeError(f"there is no role {role!r} in the V3.2 format")

    def _opener(self, last: bool) -> str:
        return _THINK if self._thinking and last else _THOUGHT

    def _result(self, index: int, content: str) -> None:
        if not self._results_left:
            raise EncodeError(f"message {index} is a tool result without a tool call that it could answer")
        if self._results_left == self._results:
            self.own("\n\n<function_results>")
        self._results_left -= 1
        self.own("\n<result>")
        self.text(content)
        self.own("</result>")
        if not self._results_left:
            self.own("\n</function_results>\n\n" + self._opener(index >= self._last_user))

    def _assistant(self, index: int, message: Message, content: str) -> None:
        calls = message.get("tool_calls") or ()
        if self._thinking and index > self._last_user:
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            self.text(str(reasoning))
            self.own(_THOUGHT)
        self.text(content)
        if calls:
            self.own(f"\n\n<{_DSML}function_calls>\n")
            for number, call in enumerate(calls):
                self.own("\n" if number else "")
                self._call(call)
            self.own(f"\n</{_DSML}function_calls>")
        self.own(_EOS)
        self._results = self._results_left = len(calls)

    _results = 0

    def _call(self, call: Mapping[str, Any]) -> None:
        self.own(f'<{_DSML}invoke name="')
        self.text(str((call.get("function") or {}).get("name") or ""))
        self.own('">\n')
        for number, (key, value) in enumerate(arguments_of(call).items()):
            string = isinstance(value, str)
            self.own(("\n" if number else "") + f'<{_DSML}parameter name="')
            self.text(key)
            self.own(f'" string="{"true" if string else "false"}">')
            self.text(value if string else _json(value))
            self.own(f"</{_DSML}parameter>")
        self.own(f"\n</{_DSML}invoke>")


def _results_in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Tool results follow the order of the calls that they answer, by id; those of unknown id stay where they are."""
    ordered: list[Message] = []
    place: dict[Any, int] = {}
    start = 0  # of the run of results
    for message in messages:
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            place = {call.get("id"): number for number, call in enumerate(calls) if call.get("id")}
            start = len(ordered) + 1
        ordered.append(message)
        run = ordered[start:]
        if len(run) > 1 and all(result.get("tool_call_id") in place for result in run):
            ordered[start:] = sorted(run, key=lambda result: place[result.get("tool_call_id")])
    return ordered


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
