"""Jinja chat templates (of any model), in a sandbox, such that text of the request cannot become control tokens.

A template mixes its own text with that of the request, so the seams are lost in what it renders. Before rendering, each
spelling of an added token inside the request's strings is therefore replaced by a single private character, which
templates treat as an ordinary letter, and after rendering put back as a `text` segment. So is a beginning or an end of
a string that could grow into such a spelling where two strings meet. Everything else reaches the template untouched:
without forged markup the prompt is, character for character, what the template alone would give.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from closeranks.codec.encoder import EncodeError, Message, Prompt, Segment, Tool, clean, join_segments

# Plane 16 is private use; no tokenizer has it, no text needs it. Its occurrences in requests are replaced as well.
_FIRST = 0x100000
_MOST = 0xFFFD
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _MOST)}]")
_THINK_OPEN = re.compile(r"<think>\s*\Z")
_ROLES = frozenset(("system", "user", "assistant", "tool", "developer", "function", "ipython"))

# Used where the tokenizer is not known: what control tokens look like in the families seen so far.
_LOOKS_LIKE_CONTROL = (
    r"<[|｜][^<>\s]{1,64}[|｜]>|</?(?:s|unk|pad|think|tool_call|tool_response|tools)>|\[/?[A-Z_]{3,32}\]|<<?/?SYS>>?"
)


class TemplateEncoder:
    """See `Encoder`. `extra` of `encode` are further variables of the template.

    Args:
        template: the chat template's source.
        special_tokens: variables such as `bos_token`.
        added_tokens: spellings of the tokenizer's added vocabulary (`PromptTokenizer.added_tokens`). Without it, what
            looks like a control token is protected.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str] | None = None,
        added_tokens: Sequence[str] | frozenset[str] = (),
    ) -> None:
        from jinja2 import TemplateError

        self._special = dict(special_tokens or {})
        tokens = sorted({t for t in (*added_tokens, *self._special.values()) if t.strip()}, key=len, reverse=True)
        pattern = "|".join(map(re.escape, tokens))
        if not added_tokens:
            pattern = "|".join(filter(None, (pattern, _LOOKS_LIKE_CONTROL)))
        self._forged = re.compile(f"{pattern}|{_PRIVATE.pattern}")
        self._heads, self._tails = _partials(tokens or ["<think>", "</think>", "<|im_start|>", "<|im_end|>"])
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise EncodeError(f"the chat template does not parse: {error}") from error

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **extra: Any,
    ) -> Prompt:
        """See `Encoder.encode`. The template gets `enable_thinking`, `thinking` and `reasoning_effort`."""
        from jinja2 import TemplateError

        shield = _Shield(self._forged, self._heads, self._tails)
        try:
            variables = {
                **self._special,
                "add_generation_prompt": True,
                "enable_thinking": thinking,
                "thinking": thinking,
                **({"reasoning_effort": reasoning_effort} if reasoning_effort is not None else {}),
                **{key: shield.value(value) for key, value in extra.items()},
                "messages": [shield.value(_message(message)) for message in messages],
                "tools": [shield.value(tool) for tool in tools] or None,
            }
        except RecursionError as error:
            raise EncodeError("messages, tools or variables are nested too deeply") from error
        try:
            text = self._template.render(variables)
        except (
            TemplateError,
            AttributeError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AssertionError,
            RuntimeError,  # RecursionError is one
        ) as error:
            raise EncodeError(f"the chat template refuses these messages: {error}") from error
        return Prompt(shield.segments(text), _THINK_OPEN.search(text) is not None)


class _Shield:
    """Replaces what could be read as control tokens, and puts it back."""

    def __init__(self, forged: re.Pattern[str], heads: frozenset[str], tails: frozenset[str]) -> None:
        self._forged = forged
        self._heads = heads
        self._tails = tails
        self._spelling: list[str] = []
        self._known: dict[str, str] = {}

    def value(self, value: Any) -> Any:
        """The same value, with every string in it (keys too) replaced."""
        if isinstance(value, str):
            return self._string(clean(value))
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _string(self, text: str) -> str:
        text = self._forged.sub(lambda match: self._private(match.group()), text)
        # The longest end that begins a spelling, and the longest beginning that ends one.
        for size in range(min(len(text), max(map(len, self._heads), default=0)), 0, -1):
            if text[-size:] in self._heads:
                text = text[:-size] + self._private(text[-size:])
                break
        for size in range(min(len(text), max(map(len, self._tails), default=0)), 0, -1):
            if text[:size] in self._tails:
                return self._private(text[:size]) + text[size:]
        return text

    def _private(self, spelling: str) -> str:
        known = self._known.get(spelling)
        if known is None:
            if len(self._spelling) > _MOST:
                raise EncodeError("too many different spellings of control tokens in one request")
            known = self._known[spelling] = chr(_FIRST + len(self._spelling))
            self._spelling.append(spelling)
        return known

    def segments(self, text: str) -> tuple[Segment, ...]:
        """The rendered text, cut at the private characters."""
        segments = []
        at = 0
        for match in _PRIVATE.finditer(text):
            spelling = self._spelling[ord(match.group()) - _FIRST]
            segments += [Segment(text[at : match.start()], "template"), Segment(spelling, "text")]
            at = match.end()
        return join_segments([*segments, Segment(text[at:], "template")])


def _partials(tokens: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
    """All proper beginnings and all proper ends of the tokens, without those that are plain words or white space."""

    def telling(part: str) -> bool:
        return any(not character.isalnum() and not character.isspace() for character in part)

    heads = {token[:size] for token in tokens for size in range(1, len(token)) if telling(token[:size])}
    tails = {token[size:] for token in tokens for size in range(1, len(token)) if telling(token[size:])}
    return frozenset(heads), frozenset(tails)


def _message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text parts joined, calls' arguments as objects, thought split from content."""
    role = message.get("role")
    if role not in _ROLES:
        raise EncodeError(f"there is no role {role!r}")
    written = dict(message)
    content = written.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        written["content"] = content = "\n".join(part["text"] for part in content)
    if content is None:
        written["content"] = ""
    if role == "assistant" and isinstance(content, str) and "</think>" in content:
        # Templates cut a thought out of the content themselves; with the marker hidden from them it is done here.
        thought, _, answer = content.rpartition("</think>")
        written.setdefault("reasoning_content", thought.removeprefix("<think>").strip("\n"))
        written["content"] = answer.lstrip("\n")
    if calls := written.get("tool_calls"):
        written["tool_calls"] = [_call(call) for call in calls]
    return written


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What does not parse stays text: some templates print it, those that need an object refuse it in their words.
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what training is on; in a prompt it is its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a set)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(text: str) -> None:
        raise TemplateError(text)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
