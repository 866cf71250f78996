"""A grammar of assistant turns and of what goes wrong with them.

`turn(rng)` writes a well-formed turn and its truth; `damaged(rng)` breaks one: parts dropped, doubled, swapped, cut,
respelled, spliced into each other, wrapped in code, run into prose. Everything follows from the random generator, so a
fuzzer's bytes, a hypothesis draw or a seed give the same text again.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from closeranks.codec import DIALECTS, Dialect

NAMES = ["f", "get_weather", "bash", "list_files", "mcp__srv-1.do", "工具"]
KEYS = ["a", "city", "command", "with space", 'q"uote', "a<b", "键", "", "arguments", "input"]
WORDS = [
    "Hello",
    "a < b",
    "x<｜ y",
    "`code`",
    "```\nfence\n```",
    "~~~",
    "\n\n",
    "\n",
    " ",
    "2>&1",
    "é",
    "🙂",
    "\u2016",
    "|",
]
WORDS += [
    "</div>",
    "<b>",
    "<invoice>",
    "use `",
    "```",
    "a</th",
    "ink>",
    "<th",
    "｜DS",
    "ML｜",
    "<｜DS",
    "<",
    "</",
    "<｜",
    "ML",
]
JUNK = [
    "\x00",
    "\ud800",
    "\udcff",
    "\U0010ffff",
    "\r\n",
    "\u2028",
    '"',
    "\\",
    ">",
    "=",
    "name=",
    ' string="true">',
    "DSML",
]
VALUES: list[Any] = [
    1,
    -0.5,
    True,
    None,
    "s",
    [],
    {},
    [1, "two", {"three": [3]}],
    {"k": {"n": [None]}},
    "e\u0301",
    [[[]]],
]
RUBBISH = [
    "Bob",
    "True",
    "NaN",
    "12345e-3",
    "01",
    "[1, 2",
    '{"a": tru',
    "{'a': 1}",
    '"open',
    "[1,]",
    "9" * 400,
    "1e999",
]
RUBBISH += ['"\\ud83d"', '{"a":1} tail', "", "  ", "[}", '["\\x"]', "[" * 200, '{"k": "v\nw"}', "-", "- 1", "[NaN]"]
CONTROLS = ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜begin▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<|im_end|>"]
SPELLINGS = [
    "|DSML|",
    "||DSML||",
    " | DSML | ",
    "‖DSML‖",
    "│DSML│",
    "｜｜DSML｜｜",
    "",
    "｜DSML｜｜DSML｜",
    "｜dsml｜",
    "DSML｜",
]


@dataclass
class Turn:
    """A well-formed turn: its pieces of text in order, and what they mean."""

    dialect: str
    thinking: bool
    pieces: list[str] = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole output."""
        return "".join(self.pieces)


def _tag(dialect: Dialect, name: str, rest: str = "", close: bool = False) -> str:
    return f"<{'/' if close else ''}{dialect.sentinel}{dialect.gap}{name}{rest}>"


def plain(rng: random.Random) -> str:
    """Prose without anything that could be taken for markup or code."""
    words = [
        "Hello",
        "there",
        "a = b",
        "\n",
        "\n\n",
        "é",
        "🙂",
        "x > y",
        "(1|2)",
        "end.",
        '"quoted"',
        "{}",
        "[1]",
        "$x",
    ]
    text = " ".join(rng.choice(words) for _ in range(rng.randint(0, 8)))
    return text.strip()


def turn(rng: random.Random, dialect_name: str | None = None) -> Turn:
    """A well-formed turn."""
    dialect = DIALECTS[dialect_name or rng.choice(list(DIALECTS))]
    made = Turn(dialect.name, thinking=rng.random() < 0.5)
    if made.thinking:
        made.reasoning = plain(rng)
        made.pieces += [made.reasoning, "</think>"]
    made.content = plain(rng)
    made.pieces.append(made.content)
    count = rng.choice([0, 1, 1, 2, 3])
    if not count:
        return made
    made.pieces.append("\n\n")
    if dialect.wrapper:
        made.pieces.append(_tag(dialect, dialect.wrapper) + "\n")
    for i in range(count):
        name = rng.choice(NAMES)
        keys = rng.sample(KEYS, rng.randint(0, 4))
        if dialect.body == "envelope":
            arguments = {key: rng.choice(VALUES) for key in keys}
            made.calls.append((name, arguments))
            body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
            made.pieces += ["\n" if i else "", "<tool_call>", f"\n{body}\n", "</tool_call>"]
            continue
        arguments = {}
        made.pieces.append(_tag(dialect, "invoke", f' name="{name}"') + "\n")
        for key in keys:
            value = rng.choice(VALUES) if rng.random() < 0.5 else plain(rng) + rng.choice(["", "\n", " "])
            arguments[key] = value
            string = isinstance(value, str)
            made.pieces.append(_tag(dialect, "parameter", f' name="{key}" string="{"true" if string else "false"}"'))
            made.pieces.append(value if string else json.dumps(value, ensure_ascii=False))
            made.pieces.append(_tag(dialect, "parameter", close=True) + "\n")
        made.pieces.append(("\n" if not keys else "") + _tag(dialect, "invoke", close=True) + "\n")
        made.calls.append((name, arguments))
    if dialect.wrapper:
        made.pieces.append(_tag(dialect, dialect.wrapper, close=True))
    return made


def fragment(rng: random.Random) -> str:
    """A piece of a turn with no regard to its place."""
    dialect = DIALECTS[rng.choice(["v4", "v4", "v4", "v32", "v41", "hermes"])]
    kind = rng.randrange(16)
    close = rng.random() < 0.5
    if kind < 3:
        return rng.choice(WORDS)
    if kind == 3:
        return rng.choice(JUNK)
    if kind == 4:
        return rng.choice(CONTROLS)
    if kind == 5:
        return rng.choice(["<think>", "</think>", "<think", "</think", "`</think>`", "\n<think>\n"])
    if kind == 6:
        return _tag(
            dialect, rng.choice([dialect.wrapper, "tool", "toolcalls", "SugarPanel", "foo", "r=bash", ""]), close=close
        )
    if kind == 7:
        return _tag(
            dialect, "invoke", "" if close else f' name="{rng.choice(NAMES)}"{rng.choice(["", "", "/"])}', close
        )
    if kind == 8:
        typed = rng.choice([' string="true"', ' string="false"', ' string="false"', "", ' string="maybe"'])
        return _tag(dialect, "parameter", "" if close else f' name="{rng.choice(KEYS)}"{typed}', close)
    if kind == 9:
        return rng.choice(RUBBISH)
    if kind == 10:
        return "".join(turn(rng, dialect.name).pieces)
    if kind == 11:
        tag = fragment(rng)
        return tag[: rng.randint(0, len(tag))]
    if kind == 12:
        return "".join(turn(rng, dialect.name).pieces).replace("｜DSML｜", rng.choice(SPELLINGS))
    if kind == 13:
        opener, closer = rng.choice(["`", "```", "```xml", "~~~"]), rng.choice(["", "`", "\n```"])
        return opener + rng.choice(["", "\n"]) + fragment(rng) + closer
    if kind == 14:
        inner, outer = fragment(rng), rng.choice(["</think>", "<｜DSML｜invoke", "｜DSML｜", "<think>", "<｜User｜>"])
        at = rng.randint(1, len(outer) - 1)
        return outer[:at] + inner + outer[at:]
    return "\n" * rng.randint(1, 4)


def damaged(rng: random.Random) -> str:
    """A turn after an accident."""
    pieces = turn(rng).pieces if rng.random() < 0.7 else []
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        at = rng.randint(0, len(pieces))
        match rng.randrange(6):
            case 0:
                del pieces[at : at + rng.randint(1, 2)]
            case 1:
                pieces[at:at] = pieces[at : at + rng.randint(1, 3)]
            case 2 if len(pieces) > 1:
                other = rng.randrange(len(pieces))
                at = min(at, len(pieces) - 1)
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 3 if at < len(pieces):
                cut = rng.randint(0, len(pieces[at]))
                pieces[at] = pieces[at][:cut] + (fragment(rng) if rng.random() < 0.5 else "") + pieces[at][cut:]
            case 4 if at < len(pieces):
                pieces[at] = pieces[at].replace("｜DSML｜", rng.choice(SPELLINGS))
            case _:
                pieces.insert(at, fragment(rng))
    text = "".join(pieces)
    return text[: rng.randint(0, len(text))] if rng.random() < 0.2 else text
