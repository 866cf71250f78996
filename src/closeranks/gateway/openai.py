"""Requests of the OpenAI API as strict structs, and their parameters checked.

A field that is not known is an error, not ignored: an answer that silently lacks what was asked for is worse than a
refusal. Fields that ask for nothing from the model (`user`, `metadata`, ...) are taken and dropped. Fields that are
known but not supported are refused unless they have the value that asks for nothing.
"""

import contextlib
import gc
import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from closeranks.gateway.errors import Invalid, shown
from closeranks.protocol import Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_NESTING = 128
"""Objects and lists within each other, in what a request may nest as it likes: code that follows recurses into it."""
_SAID = 400
"""Characters of what the JSON decoder says is wrong (it quotes names as they are)."""
LARGE = 16_384
"""Bytes of a body from which it costs the event loop something."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of a request's choices (2^64 / golden ratio, odd)."""

Name = Annotated[str, msgspec.Meta(max_length=256)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call in an assistant message of the past."""

    function: FunctionCall
    id: str = ""
    type: str = "function"


class TextPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message. Clients send answers back with all that was in them: further fields are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


class Function(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(msgspec.Struct):
    """Enforced in any case; `strict` changes nothing."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions share. `null` everywhere means the default."""

    model: Name | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None

    # asked of the service around the model: taken, without effect here
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    response_format: ResponseFormat | None = None

    # not supported
    logit_bias: dict[str, float] | None = None


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /tokenize`: of a text, or of a conversation as the model would see it."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: Name | None = None


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /abort_request`: the request with exactly this id."""

    rid: str


T = TypeVar("T")
_AT = re.compile(r" - at `\$?\.?(.*)`$")
_FIELD = re.compile(r"field `(.*?)`")


def parse(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises Invalid, with the field at fault as `param` where there is one."""
    try:
        with _without_gc(len(body)):
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        if len(text) > _SAID:
            text = f"{text[: _SAID // 2]} … {text[-_SAID // 2 :]}"
        at = _AT.search(text)
        param = at.group(1) if at else ""
        if not param or "field `" in text:
            named = _FIELD.search(text)
            param = ".".join(filter(None, (param, named.group(1) if named else "")))
        raise Invalid(f"{_AT.sub('', text)}{f' (at {param})' if param else ''}", param=param or None) from error
    except msgspec.DecodeError as error:
        raise Invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise Invalid("the body is nested too deeply", code="invalid_json") from error


@contextlib.contextmanager
def _without_gc(size: int) -> Iterator[None]:
    """Millions of small lists make the collector look through all of them again and again: seconds for one body."""
    pause = size >= LARGE and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


def check(request: Common) -> None:
    """What the types do not say, for both kinds. Raises Invalid."""
    _between(request, "temperature", 0, 2)
    _between(request, "top_p", 0, 1, above=True)
    _between(request, "min_p", 0, 1)
    _between(request, "presence_penalty", -2, 2)
    _between(request, "frequency_penalty", -2, 2)
    _between(request, "repetition_penalty", 0, 2, above=True)
    _between(request, "top_k", -1, 2**31)
    _between(request, "seed", -(2**63), 2**63 - 1)
    _between(request, "n", 1, MAX_CHOICES)
    _between(request, "max_tokens", 1, 2**31)
    if request.stream_options is not None and not request.stream:
        raise Invalid("stream_options goes with stream: true only", param="stream_options")
    stops = stop_strings(request)
    if len(stops) > MAX_STOPS:
        raise Invalid(f"{len(stops)} stop strings; at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise Invalid(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    if request.logit_bias:
        raise Invalid("logit_bias is not supported", param="logit_bias", code="unsupported")


def check_chat(request: ChatRequest) -> None:
    """Raises Invalid."""
    check(request)
    _between(request, "max_completion_tokens", 1, 2**31)
    _between(request, "top_logprobs", 0, MAX_LOGPROBS)
    if request.top_logprobs and not request.logprobs:
        raise Invalid("top_logprobs goes with logprobs: true only", param="top_logprobs")
    check_messages(request.messages)
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        if name not in {tool.function.name for tool in request.tools or ()}:
            raise Invalid(f"tool_choice names {shown(name)}, which is not among tools", param="tool_choice")
    elif request.tool_choice == "required" and not request.tools:
        raise Invalid("tool_choice `required` without tools", param="tool_choice")
    if request.modalities not in (None, ["text"]):
        raise Invalid("modalities: only text is supported", param="modalities", code="unsupported")
    for name in ("audio", "prediction", "web_search_options", "functions", "function_call"):
        if getattr(request, name) not in (None, [], "none"):
            raise Invalid(f"{name} is not supported", param=name, code="unsupported")


def check_nesting(request: ChatRequest | CompletionRequest | TokenizeRequest) -> None:
    """What may be nested freely, is it within bounds? Looks at all of it: not for the event loop where it is large.

    Raises Invalid.
    """
    form = None if isinstance(request, TokenizeRequest) else request.response_format
    if form is not None and form.json_schema is not None:
        _nesting(form.json_schema.schema, "response_format.json_schema.schema")
    if isinstance(request, CompletionRequest):
        return
    if isinstance(request, ChatRequest):
        _nesting(request.chat_template_kwargs, "chat_template_kwargs")
    for i, tool in enumerate(request.tools or ()):
        _nesting(tool.function.parameters, f"tools[{i}].function.parameters")
    for i, message in enumerate(request.messages or ()):
        for j, call in enumerate(message.tool_calls or ()):
            _nesting_of_text(call.function.arguments, f"messages[{i}].tool_calls[{j}].function.arguments")


def _nesting(value: Any, at: str) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inner = [part for part in level if isinstance(part, dict | list)]
        if not inner:
            return
        level = [item for part in inner for item in (part.values() if isinstance(part, dict) else part)]
    raise Invalid(f"{at} is nested too deeply: at most {MAX_NESTING} levels are allowed", param=at)


def _nesting_of_text(text: str, at: str) -> None:
    """Of JSON in a text. What is none stays text, for whoever reads it."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    try:
        _nesting(msgspec.json.decode(text), at)
    except RecursionError as error:
        raise Invalid(f"{at} is nested too deeply: at most {MAX_NESTING} levels are allowed", param=at) from error
    except (msgspec.DecodeError, UnicodeEncodeError):
        return


def check_messages(messages: list[Message]) -> None:
    """Raises Invalid."""
    if not messages:
        raise Invalid("messages is empty", param="messages")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")


def check_completion(request: CompletionRequest) -> None:
    """Raises Invalid."""
    check(request)
    _between(request, "logprobs", 0, MAX_LOGPROBS)
    if request.echo:
        raise Invalid("echo is not supported", param="echo", code="unsupported")
    if request.suffix:
        raise Invalid("suffix is not supported", param="suffix", code="unsupported")
    if request.best_of not in (None, request.n or 1):
        raise Invalid("best_of other than n is not supported", param="best_of", code="unsupported")


def sampling(
    request: Common, seed: int, logprobs: int, nth: int = 0, grammar: str = "", stop_ids: Sequence[int] = ()
) -> Sampling:
    """Defaults are OpenAI's (temperature 1). `seed`: used where the request gives none; `nth`: number of the choice.

    A seed is drawn once per request, never per attempt: so a resumed stream is the one it would have been.
    """
    seed = seed if request.seed is None else request.seed
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=(seed + nth * _SEED_STRIDE) & (2**63 - 1),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logprobs=logprobs,
        grammar=grammar,
        stop_ids=tuple(stop_ids) if grammar else (),
    )


def stop_strings(request: Common) -> list[str]:
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop


def text_of(message: Message) -> str:
    """A message's content as one text; its parts in lines of their own."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(part.text or "" for part in message.content)


def _check_message(message: Message, at: str) -> None:
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise Invalid(f"a {message.role} message needs content", param=f"{at}.content")
    if message.tool_calls and message.role != "assistant":
        raise Invalid("only an assistant message has tool_calls", param=f"{at}.tool_calls")
    for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type != "text" or part.text is None:
            said = f"content part {shown(part.type)} is not supported: this model takes text"
            raise Invalid(said, param=f"{at}.content[{i}]", code="unsupported")


def _between(request: Common, name: str, low: float, high: float, above: bool = False) -> None:
    """Refuse a number outside `low .. high`; `above`: `low` itself is outside too."""
    value = getattr(request, name)
    if value is None:
        return
    if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high or (above and value == low):
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise Invalid(f"{name} is {shown(value)}; it must be {bounds}", param=name, code="out_of_range")
