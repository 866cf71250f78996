"""The decoder's properties (P0-P6), on damaged turns without end."""

import json
import random
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.codec import DIALECTS, Content, Decoder, Policy, State, assemble

sys.path.insert(0, str(Path(__file__).parent))
from damage import damaged, turn
from properties import check, run, settings_of

SEEDS = st.integers(min_value=0, max_value=2**63)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(SEEDS)
def test_damaged_turns(seed: int) -> None:
    """P0-P4 on turns from the grammar of damage, under every policy."""
    rng = random.Random(seed)
    check(damaged(rng), rng, **settings_of(rng))


@QUICK
@given(st.text(alphabet="<>/｜|‖DSML` \n~thinkvoe=\"'{}[]:,a1\\", max_size=80), SEEDS)
def test_any_text_of_telling_characters(text: str, seed: int) -> None:
    """P0-P4 on text that is made of the characters of markup, but not of markup."""
    rng = random.Random(seed)
    check(text, rng, **settings_of(rng))


@QUICK
@given(st.text(max_size=200), SEEDS)
def test_any_text(text: str, seed: int) -> None:
    """P0-P4 on whatever hypothesis calls text, lone surrogates included."""
    rng = random.Random(seed)
    check(text, rng, **settings_of(rng))


@settings(QUICK, max_examples=200)
@given(SEEDS, st.sampled_from(sorted(DIALECTS)))
def test_well_formed_turns_are_read_back(seed: int, dialect: str) -> None:
    """What was written is what is read, nothing discarded, and arguments are the reference decoder's text."""
    made = turn(random.Random(seed), dialect)
    got = assemble(run([made.text], dialect=dialect, thinking=made.thinking))
    assert got.discarded == ()
    assert (got.reasoning, got.content) == (made.reasoning, made.content)
    assert [(call.name, json.loads(call.arguments)) for call in got.tool_calls] == made.calls
    if dialect != "hermes":
        wanted = [
            "{"
            + ", ".join(
                f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in args.items()
            )
            + "}"
            for _, args in made.calls
        ]
        assert [call.arguments for call in got.tool_calls] == wanted


@QUICK
@given(SEEDS)
def test_no_tools_no_call(seed: int) -> None:
    """A request without tools, or with tool_choice none, never yields a call, whatever the model writes."""
    rng = random.Random(seed)
    text = damaged(rng)
    for chosen in ({"tools": []}, {"tools": ["f"], "tool_choice": "none"}):
        turned = assemble(run([text], dialect=rng.choice(sorted(DIALECTS)), **chosen))
        assert turned.tool_calls == ()


@QUICK
@given(SEEDS)
def test_output_decodes_to_itself(seed: int) -> None:
    """Content holds nothing that a second decoder would take for markup: it comes back unchanged. (Its end may look
    like a marker that was cut, and the newlines before that like framing.)"""
    rng = random.Random(seed)
    policy = Policy(spelled="pass")  # closure is promised for real markers; a look-alike alone is text
    content = assemble(run([damaged(rng)], policy=policy)).content
    again = assemble(run([content], policy=policy))
    cut = "".join(d.text for d in again.discarded if d.reason == "cut")
    assert (again.content + cut).replace("\n", "") == content.replace("\n", "")
    assert again.tool_calls == ()


@QUICK
@given(SEEDS)
def test_payload_is_accounted_for(seed: int) -> None:
    """P1: a character that stands outside tags ends in exactly one place."""
    rng = random.Random(seed)
    text = damaged(rng)
    tags = [found.span() for found in re.finditer("<[^>]*>?", text)]
    outside = [i for i in range(len(text) + 1) if not any(start < i < end for start, end in tags)]
    marks = ""
    for k, i in enumerate(sorted(rng.sample(outside, min(len(outside), 5)), reverse=True)):
        marks += chr(0xE000 + k)
        text = text[:i] + marks[-1] + text[i:]
    got = assemble(run([text], **settings_of(rng)))
    everything = [got.content, got.reasoning, *(d.text for d in got.discarded)]
    everything += [part for call in got.tool_calls for part in (call.name, call.arguments)]
    for mark in marks:
        assert sum(part.count(mark) for part in everything) == 1, (mark, text, got)


@pytest.mark.parametrize("seed", range(40))
def test_stray_pieces_do_no_harm(seed: int) -> None:
    """P6: fragments after a whole call change neither that call nor the text before it."""
    rng = random.Random(seed)
    text = 'Hi.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    closers = [
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls>",
        "</think>",
        "\n",
        "text",
    ]
    tail = "".join(rng.choice(closers) for _ in range(rng.randint(1, 8)))
    got = assemble(run([text + tail]))
    assert got.content == "Hi."
    assert [(call.name, call.arguments) for call in got.tool_calls] == [("f", "{}")]


OPENED = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="{}">'
HOSTILE = {
    "prose": ("", "word "),
    "angles": ("", "<"),
    "think prefixes": ("", "</th"),
    "sentinel prefixes": ("", "<｜DS"),
    "strays": ("", "</think>"),
    "nested splices": ("", "</th</think>"),
    "backticks": ("", "`"),
    "fences": ("", "\n```\n"),
    "newlines": ("", "\n"),
    "spelled openers": ("", '<|DSML|invoke name="x'),
    "sentinels": ("", "｜DSML｜"),
    "openers": ("", "<｜DSML｜tool_calls>"),
    "blocks": ("", '<｜DSML｜tool_calls><｜DSML｜invoke name="f"/></｜DSML｜tool_calls>'),
    "value": (OPENED.format("true"), "line > of <b>text</b>\n"),
    "closer prefixes": (OPENED.format("true"), "</｜DSML｜para"),
    "json strings": (OPENED.format("false") + '["', "text \\n"),
    "json numbers": (OPENED.format("false") + "[", "1234,"),
    "json digits": (OPENED.format("false"), "9"),
    "json nesting": (OPENED.format("false"), "["),
    "json escapes": (OPENED.format("false") + '["', "\\ud83d"),
    "body": ('<｜DSML｜tool_calls><｜DSML｜invoke name="f">{"k": "', "v "),
    "parameters": (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f">',
        '<｜DSML｜parameter name="{i}" string="true">v</｜DSML｜parameter>',
    ),
    "name": ('<｜DSML｜tool_calls><｜DSML｜invoke name="', "x"),
}


@pytest.mark.parametrize("shape", HOSTILE)
def test_memory_is_bounded(shape: str) -> None:
    """P5: what a decoder keeps does not grow with what it was fed."""
    before, unit = HOSTILE[shape]
    decoder = Decoder("v4", tools=["f"])
    decoder.feed(before)

    def feed(count: int) -> int:
        for start in range(0, count, 50):
            decoder.feed("".join(unit.replace("{i}", str(start + i)) for i in range(50)))
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = feed(250)
        second = feed(1500)
    finally:
        tracemalloc.stop()
    limit = 400_000 if shape == "parameters" else 40_000
    assert second - first < limit


@pytest.mark.parametrize("shape", HOSTILE)
def test_work_is_linear(shape: str) -> None:
    """P5: ten times the input takes about ten times the steps, whole and per character. Counted, not timed."""
    before, unit = HOSTILE[shape]

    def steps(count: int, whole: bool) -> int:
        text = "".join(unit.replace("{i}", str(i)) for i in range(count // len(unit)))
        decoder = Decoder("v4", tools=["f"])
        decoder.feed(before)
        counted = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal counted
            counted += 1

        sys.setprofile(trace)
        try:
            for piece in [text] if whole else text:
                decoder.feed(piece)
        finally:
            sys.setprofile(None)
        return counted

    for whole in (True, False):
        small, large = steps(300, whole), steps(3000, whole)
        assert large < 13 * small + 4000, (small, large)


def test_everything_is_released_at_once_where_it_can_be() -> None:
    """P4 the other way: plain prose and values are never held."""
    decoder = Decoder("v4")
    for piece in ("Hello", " there", " 2 > 1", " é"):
        assert decoder.feed(piece) == [Content(piece)]
        assert decoder.held == 0
    decoder.feed(OPENED.format("true"))
    assert decoder.state is State.STRING
    decoder.feed("abc")
    assert decoder.held <= 40  # the opener of the block, kept to report it


def test_close_twice_and_feed_after_close() -> None:
    """Misuse is an error that says so; closing twice is none."""
    decoder = Decoder()
    decoder.feed("x")
    decoder.close()
    assert decoder.close() == []
    with pytest.raises(ValueError, match="after close"):
        decoder.feed("y")
