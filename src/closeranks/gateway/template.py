"""A model's chat template: Jinja in a sandbox, with what Hugging Face templates expect around them."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateError(ValueError):
    """The template refused the conversation (`raise_exception`), or failed on it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks training targets; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """Renders conversations. `special`: the tokenizer's named tokens, e.g. {"bos_token": "<s>"}."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._special = dict(special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `continue_final`: the last message is not ended, the answer continues it.

        Raises TemplateError.
        """
        try:
            text = self._template.render(
                {
                    **self._special,
                    "add_generation_prompt": not continue_final,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                }
            )
        except TemplateError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise TemplateError(f"the chat template failed on these messages: {error}") from error
        if continue_final:
            last = str(messages[-1].get("content") or "")
            at = text.rfind(last.strip()) if last.strip() else -1
            if at < 0:
                raise TemplateError("the chat template does not show the final message: it cannot be continued")
            end = (text.startswith(last, at) and at + len(last)) or at + len(last.strip())
            text = text[:end]
        return text


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
