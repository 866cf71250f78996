"""JSON values piece by piece: JSON passes as it is, limits do not depend on the cuts, everything is accounted for."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.codec.jsonstream import MAX_PENDING, MAX_SCALAR, JsonStream
from tests.codec.properties import check

OPENED = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="false">'
CLOSED = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def run(text: str, cuts: random.Random | None) -> tuple[str, str, JsonStream]:
    """(what was sent, what was rejected, the stream after its end); `cuts` None: in one piece."""
    stream = JsonStream()
    sent = rejected = ""
    at = 0
    while at < len(text):
        step = cuts.choice((1, 1, 2, 3, 4, 50, 1000)) if cuts else len(text)
        sent += stream.feed(text[at : at + step])
        rejected += stream.rejected
        at += step
    sent += stream.finish()
    return sent, rejected + stream.rejected, stream


@given(
    VALUES, st.sampled_from([None, 0, 2]), st.sampled_from([(",", ":"), (", ", ": "), (" ,  ", " :\n ")]), st.randoms()
)
@settings(max_examples=200, deadline=None)
def test_json_passes_as_it_is(value: Any, indent: int | None, separators: tuple[str, str], cuts: random.Random) -> None:
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=cuts.random() < 0.5)
    if cuts.random() < 0.3:
        text = f" \n{text}\t"
    sent, rejected, stream = run(text, cuts)
    assert sent.strip() == text.strip()
    assert not rejected
    assert stream.complete
    assert not stream.broken


PARTS = st.sampled_from(["\x00", "\t", "\n", "\x1f", "\\d", "\\x", "x", "é", ", ", "{", "1"])
TEXTS = st.lists(PARTS, max_size=6).map("".join)


@given(st.dictionaries(TEXTS, TEXTS, min_size=1, max_size=3), st.randoms())
@settings(max_examples=200, deadline=None)
def test_what_strings_may_not_hold_is_escaped_in_its_place(value: dict[str, str], cuts: random.Random) -> None:
    """Raw control characters, and backslashes that begin no escape."""
    text = ", ".join(f'"{key}": "{inside}"' for key, inside in value.items())
    sent, rejected, stream = run(f"{{{text}}}", cuts)
    assert json.loads(sent) == value
    assert not rejected
    assert stream.complete


PLACES = [
    "[1,{}2]",
    "[1{},2]",
    "{}[1]",
    '{{"a":1}}{}',
    '{{"a"{}:1}}',
    '{{"a":{}1}}',
    '{{"a":1,{}"b":2}}',
    "[{}]",
]
LENGTHS = [n + by for n in (MAX_SCALAR, MAX_PENDING, 4096) for by in (-3, -2, -1, 0, 1, 2)]


@pytest.mark.parametrize("length", LENGTHS)
def test_limits_do_not_depend_on_the_cuts(length: int) -> None:
    long = [place.format(" " * length) for place in PLACES]
    long += [
        f"[1,{'7' * length}]",
        "7" * length,
        f'{{"{"k" * length}": 1}}',
        f'{{"a": 1, "{"k" * (length - 1)}\\n": 1}}',
    ]
    long += [f'{{"a": 1, "{"k" * (length + by)}\x00\n{"k" * more}": 1}}' for by in (-6, -1) for more in (0, 2)]
    long += [f'{{"a": 1, "{"k" * length}\\u12', f'{{"a": 1,{" " * (length // 2)}"{"k" * (length // 2)}" : 2}}']
    for text in long:
        whole = run(text, None)[:2]
        pieces = run(text, random.Random(length))[:2]
        assert pieces == whole, text[:20]
        singly = JsonStream()
        sent = rejected = ""
        for char in text:
            sent += singly.feed(char)
            rejected += singly.rejected
        if not singly.raw:
            closed = sent + singly.finish()
            rejected += singly.rejected
            assert (closed, rejected) == whole, text[:20]


@pytest.mark.parametrize("length", [MAX_SCALAR + 1, MAX_PENDING + 1])
def test_what_breaks_at_a_limit_is_rejected_once_and_whole(length: int) -> None:
    for text in (
        f'{{"a": 1, "{"k" * length}": 2, "c": 3}}',
        f'{{"a": 1, "{"k" * length}\\u12',
        f'{{"a": 1, "{"k" * length}',
        f'{{"a": 1,{" " * length}{" " * length}"b": 2}}',
    ):
        for cuts in (None, random.Random(1), random.Random(2)):
            sent, rejected, stream = run(text, cuts)
            assert stream.broken
            assert sent == '{"a": 1}'
            assert sent[:-1] + rejected == text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("length", [MAX_SCALAR + 1, MAX_PENDING + 1])
def test_limits_keep_the_properties_of_the_decoder(place: str, length: int) -> None:
    for text in (OPENED + place.format(" " * length) + CLOSED, OPENED + place.format(" " * length)):
        check(text, random.Random(length), tools=["f"])
