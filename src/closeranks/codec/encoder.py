"""Messages → prompt. A prompt is a list of segments, so that text can never turn into control tokens.

    prompt = encoder_for("v4").encode(messages, tools, thinking=True)
    ids = PromptTokenizer(tokenizer).ids(prompt)

`prompt.text` is what a log shows. To be run, a prompt is encoded segment by segment: a `token` segment is that one
token of the added vocabulary, a `text` segment (all that came from the request) is encoded without the added
vocabulary, whatever it spells, and a `template` segment (the author of a chat template wrote it) with it.

Encoders: V4 and V4.1 by DeepSeek's own `deepseek-recipe` (optional, `closeranks[recipe]`), V3.2 here, Jinja templates
for all other models.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Message = Mapping[str, Any]
"""A message in OpenAI's chat format."""

Tool = Mapping[str, Any]
"""A tool in OpenAI's chat format: `{"type": "function", "function": {...}}`."""


class EncodeError(ValueError):
    """The request cannot be written as a prompt; the text says why, for the client."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. See the module for the three kinds."""

    text: str
    kind: Literal["token", "text", "template"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`thinking`: the prompt ends inside an opened reasoning part, so the model's output starts with reasoning."""

    segments: tuple[Segment, ...]
    thinking: bool = False

    @property
    def text(self) -> str:
        """The prompt as one string. Not for encoding: in it a token and its spelling look the same."""
        return "".join(segment.text for segment in self.segments)


class Encoder(Protocol):
    """One way of writing prompts."""

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **extra: Any,
    ) -> Prompt:
        """The prompt for the next assistant turn.

        Args:
            messages: OpenAI chat messages; tool results have role `tool`.
            tools: the tools to offer; none for `tool_choice: "none"`.
            thinking: open a reasoning part.
            reasoning_effort: `low`, `medium`, `high`, `max`, ...; None for the model's default.
            extra: variables of a chat template (`chat_template_kwargs`); the DeepSeek encoders have none and ignore it.

        Raises:
            EncodeError: the messages break a rule of the format.
        """
        ...


def encoder_for(dialect: str, template: str | None = None, special_tokens: Mapping[str, str] | None = None) -> Encoder:
    """The encoder of a dialect (`v32`, `v4`, `v41`), or for a Jinja `template` that of the template.

    Args:
        dialect: of the decoder, ignored if a template is given.
        template: the model's chat template.
        special_tokens: what the template may name: `bos_token`, `eos_token`, ...

    Raises:
        EncodeError: `deepseek-recipe` is needed and missing, the template does not parse, or there is no such dialect.
    """
    if template is not None:
        from closeranks.codec.template import TemplateEncoder

        return TemplateEncoder(template, special_tokens or {})
    if dialect in ("v4", "v41"):
        from closeranks.codec.recipe import RecipeEncoder

        return RecipeEncoder(dialect)
    if dialect == "v32":
        from closeranks.codec.v32 import V32Encoder

        return V32Encoder()
    raise EncodeError(f"no encoder for dialect {dialect!r}: give the model's chat template, or v32, v4 or v41")


class PromptTokenizer:
    """Encodes prompts with a `tokenizers.Tokenizer` of the model.

    Where the tokenizer lacks a token that the format names (V3.2's first tokenizer has no `｜DSML｜`), its spelling is
    joined with the text around it, as the model was trained.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        self._full = tokenizer
        self._added: dict[str, int] = {
            token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._control = {number for text, number in self._added.items() if text.strip()}
        description = json.loads(tokenizer.to_str())
        description["added_tokens"] = []
        description["post_processor"] = None
        self._plain = Tokenizer.from_str(json.dumps(description))

    @property
    def added_tokens(self) -> frozenset[str]:
        """The spellings of the added vocabulary."""
        return frozenset(self._added)

    def ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. No text of the request becomes a token of the added vocabulary."""
        ids: list[int] = []
        text = ""
        for segment in prompt.segments:
            if segment.kind == "text" or (segment.kind == "token" and segment.text not in self._added):
                text += segment.text
                continue
            ids += self._text(text)
            text = ""
            if segment.kind == "token":
                ids.append(self._added[segment.text])
            else:
                ids += token_ids(self._full, segment.text)
        return ids + self._text(text)

    def _text(self, text: str) -> list[int]:
        if not text:
            return []
        ids = token_ids(self._plain, text)
        if self._control.isdisjoint(ids):
            return ids
        # The base vocabulary itself knows the spelling of a control token as one word (some do): take it apart.
        return [number for character in text for number in token_ids(self._plain, character)]


def token_ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The ids of a text. `special`: with what the tokenizer adds around a whole text.

    Of the tokenizer's ways this one alone lets other threads run meanwhile; it is also several times faster.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def text_of(content: Any, role: str) -> str:
    """A message's content as one string: text parts are joined, None is empty.

    Raises EncodeError for parts that are no text. Lone surrogates, which no tokenizer takes, become U+FFFD.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if not isinstance(content, (list, tuple)):
        raise EncodeError(
            f"content of a {role} message must be a string or a list of parts, not {type(content).__name__}"
        )
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
            parts.append(str(part.get("text") or ""))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise EncodeError(f"content part {kind!r} of a {role} message: this model takes text only")
    return clean("\n\n".join(parts))


def clean(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call in the history, as an object.

    Clients send JSON text, some an object. What is no JSON object (a call that an engine let through broken) is kept
    under the key `arguments`, as text: a history must not make a conversation unusable.
    """
    function = call.get("function")
    raw = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(raw, Mapping):
        return dict(raw)
    if not raw:
        return {}
    try:
        value = json.loads(str(raw), strict=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": str(raw)}


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one kind joined (each `token` stays alone), empty ones left out."""
    joined: list[Segment] = []
    run: list[Segment] = []

    def close() -> None:
        if run:
            joined.append(run[0] if len(run) == 1 else Segment("".join(part.text for part in run), run[0].kind))
            run.clear()

    for segment in segments:
        if not segment.text:
            continue
        if run and not run[0].kind == segment.kind != "token":
            close()
        run.append(segment)
    close()
    return tuple(joined)
