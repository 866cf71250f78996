"""The dialects that the decoder knows, as data. The machine in `decoder` reads nothing else about a model family.

A DSML tag is `<`, the sentinel, a name, attributes, `>`; the sentinel is one added token of the model's vocabulary. The
dialects of DSML differ in names only, and each accepts the names of the others, since models are served with the wrong
template. Hermes has no sentinel and no wrapper: its one tag is the call, its body a JSON envelope.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing calls.

    name: as given to `Decoder`.
    sentinel: the marker inside each tag, or "" where tags are plain.
    gap: what stands between sentinel and tag name.
    wrapper: the name of the tag around all invokes of a block, "" where there is none.
    invoke, parameter: the names of the tags of a call and of one of its arguments.
    aliases: other names read as `wrapper`: of other dialects, and as models misspell them.
    body: `parameters` (tags in the invoke, a bare JSON object is tolerated) or `envelope`
        (`{"name": ..., "arguments": {...}}`).
    controls: control tokens of the family that are markup wherever they show up as text.
    spelled: whether look-alikes of the sentinel are known to occur and are recognised from text.
    """

    name: str
    sentinel: str
    wrapper: str
    invoke: str
    gap: str = ""
    parameter: str = ""
    aliases: frozenset[str] = frozenset()
    body: Literal["parameters", "envelope"] = "parameters"
    think_open: str = "<think>"
    think_close: str = "</think>"
    controls: tuple[str, ...] = ()
    spelled: bool = False


_WRAPPERS = frozenset(
    {"tool_calls", "function_calls", "calls", "tool", "tools", "tool_use", "tool_call", "toolcall", "toolcalls"}
    | {"function_call", "functioncalls"}
)
_DEEPSEEK_CONTROLS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)


def _dsml(name: str, wrapper: str, gap: str = "") -> Dialect:
    return Dialect(
        name=name,
        sentinel="｜DSML｜",
        wrapper=wrapper,
        invoke="invoke",
        gap=gap,
        parameter="parameter",
        aliases=_WRAPPERS,
        controls=_DEEPSEEK_CONTROLS,
        spelled=True,
    )


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        _dsml("v32", "function_calls"),
        _dsml("v4", "tool_calls"),
        _dsml("v41", "calls", gap=" "),
        Dialect(
            name="hermes",
            sentinel="",
            wrapper="",
            invoke="tool_call",
            body="envelope",
            controls=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ),
    )
}


def dialect_of(name: str) -> Dialect:
    """The dialect of that name; ValueError lists the known ones."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise ValueError(f"unknown dialect {name!r}: expected one of {', '.join(DIALECTS)}") from None
