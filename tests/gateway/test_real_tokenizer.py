"""Detokenizing and stop strings with the embedded model's own tokenizer."""

import functools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.gateway.detokenize import Detokenizer
from closeranks.gateway.model import Model, load
from closeranks.gateway.stops import Stops

pytestmark = pytest.mark.slow

TEXT = st.one_of(
    st.text(max_size=80),
    st.sampled_from(
        [
            "The quick brown fox, 中文字符 and العربية — 😀👩‍👩‍👧‍👦 naïve façade.",
            "def f(x):\n\treturn {'a': [1, 2.5e-3]}\n\n\n   # трудно",
            "日本語のテキスト\r\n\x00\x7f\u200d\ufeff\ufffd",
        ]
    ),
)


@functools.cache
def model() -> Model:
    # in another process: converting is the engine's
    code = "from closeranks.engine.rank import convert; print(convert.prepare('', '', 'float32').path)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return load(done.stdout.strip().splitlines()[-1])


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_text_survives_token_by_token(text: str) -> None:
    detokenizer = Detokenizer(model().vocabulary, skip_special=False)
    ids = model().encode(text, special=False)
    # its vocabulary lacks the tokens of a few control bytes: such text does not survive the tokenizer itself
    whole = model().tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.close() == whole


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=60), st.booleans())
def test_any_tokens_equal_one_shot(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(model().vocabulary, skip_special=skip)
    pieces = "".join(map(detokenizer.feed, ids)) + detokenizer.close()
    assert pieces == model().tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(TEXT, st.integers(0, 79), st.integers(1, 12))
def test_a_stop_string_that_ends_inside_a_token_cuts_exactly(text: str, at: int, length: int) -> None:
    ids = model().encode(text, special=False)
    text = model().tokenizer.decode(ids)
    stop = text[at : at + length]
    if not stop:
        return
    detokenizer = Detokenizer(model().vocabulary)
    stops = Stops([stop])
    shown = ""
    for token in ids:
        shown += stops.feed(detokenizer.feed(token))
    shown += stops.feed(detokenizer.close()) + stops.close()
    assert shown == text[: text.find(stop)]


def test_the_chat_template_and_its_end() -> None:
    assert model().encoder is not None
    assert model().stop_ids
    assert model().tokenizer.id_to_token(model().stop_ids[-1]) == "<|im_end|>"
