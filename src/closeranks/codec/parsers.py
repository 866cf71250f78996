"""The names that SGLang and vLLM give their tool-call and reasoning parsers, mapped to dialects.

    --tool-call-parser deepseekv4 --reasoning-parser deepseek-v4   ->   dialect "v4", reasoning decoded

Only the formats that a dialect here decodes are mapped; any other name is an error that lists these.
"""

from dataclasses import dataclass

# our own names are accepted, too
TOOL_CALL_PARSERS: dict[str, str] = {
    "v32": "v32",
    "deepseekv32": "v32",  # SGLang
    "deepseek_v32": "v32",  # vLLM
    "v4": "v4",
    "deepseekv4": "v4",  # SGLang
    "deepseek_v4": "v4",  # vLLM
    "v41": "v41",
    "deepseekv41": "v41",  # SGLang
    "deepseek_v41": "v41",  # vLLM
    "hermes": "hermes",  # both
    "qwen": "hermes",  # SGLang
    "qwen25": "hermes",  # SGLang
}
REASONING_PARSERS: dict[str, str] = {
    "v32": "v32",
    "deepseek-v32": "v32",
    "deepseek_v32": "v32",
    "deepseek-v3": "v32",  # SGLang: V3.1 and V3.2
    "deepseek_v3": "v32",  # vLLM
    "deepseek-r1": "v32",  # SGLang: <think> … </think>, as all of these
    "deepseek_r1": "v32",  # vLLM
    "v4": "v4",
    "deepseek-v4": "v4",  # SGLang
    "deepseek_v4": "v4",  # vLLM
    "v41": "v41",
    "deepseek-v41": "v41",
    "deepseek_v41": "v41",
    "hermes": "hermes",
    "qwen3": "hermes",  # both
    "qwen3-thinking": "hermes",  # SGLang
}
# these names mean that the model always reasons, whatever the request asks
ALWAYS_THINKING = frozenset({"deepseek-r1", "deepseek_r1", "qwen3-thinking"})


class UnknownParser(ValueError):
    """A parser name that no dialect answers to. The message lists those that do."""


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """What two parser flags come to.

    dialect: to decode calls and reasoning with.
    tools: a tool-call parser was named; without one calls are not decoded as such (pass `tools=[]`).
    reasoning: a reasoning parser was named; without one `thinking` stays off.
    always_thinking: the output starts in the reasoning part for every request.
    """

    dialect: str
    tools: bool
    reasoning: bool
    always_thinking: bool = False


def dialect_for(name: str) -> str:
    """The dialect of a tool-call or reasoning parser's name. UnknownParser if there is none."""
    key = name.strip().lower()
    found = TOOL_CALL_PARSERS.get(key) or REASONING_PARSERS.get(key) or _SPELLED.get(_squeeze(key))
    if found is None:
        raise UnknownParser(_message("parser or dialect", name, TOOL_CALL_PARSERS | REASONING_PARSERS))
    return found


def choose(tool_call_parser: str | None = None, reasoning_parser: str | None = None) -> ParserChoice:
    """What the two flags come to. UnknownParser for a name not known, ValueError for two that contradict."""
    tool = _lookup("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS)
    reasoning = _lookup("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    if tool and reasoning and ("hermes" in (tool, reasoning)) and tool != reasoning:
        raise ValueError(
            f"--tool-call-parser {tool_call_parser} and --reasoning-parser {reasoning_parser} are of different"
            " model families: name parsers of one"
        )
    return ParserChoice(
        dialect=tool or reasoning or "v4",
        tools=tool is not None,
        reasoning=reasoning is not None,
        always_thinking=(reasoning_parser or "").strip().lower() in ALWAYS_THINKING,
    )


def _lookup(flag: str, name: str | None, table: dict[str, str]) -> str | None:
    if not name:
        return None
    found = table.get(name.strip().lower())
    if found is None:
        raise UnknownParser(_message(flag, name, table))
    return found


def _message(what: str, name: str, table: dict[str, str]) -> str:
    return f"unknown {what} {name!r}: supported are {', '.join(sorted(table))}"


def _squeeze(name: str) -> str:
    return "".join(char for char in name if char.isalnum())


_SPELLED = {_squeeze(name): dialect for name, dialect in (REASONING_PARSERS | TOOL_CALL_PARSERS).items()} | {
    "dsmlv32": "v32",
    "dsmlv4": "v4",
    "dsmlv41": "v41",
    "dsml": "v4",
    "deepseekv32exp": "v32",
    "deepseekv4flash": "v4",
    "deepseekv4pro": "v4",
}
