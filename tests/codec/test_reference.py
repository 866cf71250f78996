"""On well-formed turns the decoder equals DeepSeek's own: turns written by its encoder, decoded by both."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.codec import Decoder, assemble
from closeranks.codec.encoder import encoder_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepseek_recipe") is None, reason="deepseek-recipe is missing (closeranks[recipe])"
)

# No text that is markup in itself: there the two differ on purpose (docs/codec.md).
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>｜|‖`"), max_size=40)
PROSE = TEXT.filter(lambda text: text == text.strip())
VALUES = st.recursive(
    st.one_of(
        TEXT, st.integers(-(10**12), 10**12), st.booleans(), st.none(), st.floats(-1e6, 1e6).filter(lambda f: f == f)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
NAMES = st.from_regex(r"\A[a-z][a-z0-9_]{0,12}\Z")
KEYS = st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z")
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), max_size=3)


def reference() -> Callable[[dict[str, Any]], dict[str, Any]]:
    path = Path(__file__).parents[2] / "bench" / "codec_peers" / "peer.py"
    spec = importlib.util.spec_from_file_location("codec_peer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run: Callable[[dict[str, Any]], dict[str, Any]] = module.recipe()
    return run


@pytest.mark.parametrize("dialect", ["v4", "v41"])
@pytest.mark.parametrize("thinking", [False, True])
def test_well_formed_turns_decode_as_the_reference_decodes_them(dialect: str, thinking: bool) -> None:
    encoder, decode = encoder_for(dialect), reference()

    @settings(max_examples=25, deadline=None)
    @given(PROSE, PROSE, CALLS, st.integers(1, 9))
    def check(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], size: int) -> None:
        tools = [{"type": "function", "function": {"name": name}} for name, _ in calls] or [
            {"type": "function", "function": {"name": "unused"}}
        ]
        user = {"role": "user", "content": "x"}
        prompt = encoder.encode([user], tools, thinking=thinking).text
        written = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for n, (name, arguments) in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": written}
        whole = encoder.encode([user, answer], tools, thinking=thinking).text
        assert whole.startswith(prompt)
        turn_text = whole.removeprefix(prompt).partition("<｜end▁of▁sentence｜>")[0]

        pieces = [turn_text[at : at + size] for at in range(0, len(turn_text), size)]
        decoder = Decoder(dialect=dialect, thinking=thinking, tools=tools)
        events = [event for piece in pieces for event in decoder.feed(piece)] + decoder.close()
        turn = assemble(events)
        job = {"pieces": pieces, "tools": tools, "thinking": thinking, "dialect": dialect, "finish_reason": "stop"}
        want = decode(job)

        assert turn.discarded == ()
        assert (turn.content, turn.reasoning) == (want["content"], want["reasoning"])
        assert [(c.name, json.loads(c.arguments)) for c in turn.tool_calls] == [
            (name, json.loads(arguments)) for name, arguments in want["calls"]
        ]
        assert [(c.name, json.loads(c.arguments)) for c in turn.tool_calls] == calls
        assert (turn.content, turn.reasoning) == (content, reasoning if thinking else "")

    check()
