"""Token ids: identity decides between markup and quotation. With a small vocabulary of bytes and added tokens, so that
no real tokenizer is needed; the scorer runs the real one where it is installed."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from damage import damaged
from properties import check_json, check_order, run, settings_of
from test_properties import QUICK

from closeranks.codec import Decoder, Discarded, Policy, assemble, merge
from closeranks.codec.lexicon import lexicon_of

ADDED = ["｜DSML｜", "<think>", "</think>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<tool_call>", "</tool_call>"]
BASE = 1000


class ByteTokenizer:
    """One token per byte, and the added tokens; decodes as byte-level tokenizers do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        parts = [ADDED[i - BASE].encode() if i >= BASE else bytes([i]) for i in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        return BASE + ADDED.index(token) if token in ADDED else None

    def encode(self, text: str, added: bool = True) -> list[int]:
        """Ids of text; without `added`, markers are spelled byte by byte."""
        ids: list[int] = []
        while text:
            marker = next((token for token in ADDED if added and text.startswith(token)), None)
            ids += [BASE + ADDED.index(marker)] if marker else list(text[0].encode("utf-8", "replace"))
            text = text[len(marker or "x") :]
        return ids


TOKENIZER = ByteTokenizer()
CALL = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
CALL += '<｜DSML｜parameter name="a" string="true">{}</｜DSML｜parameter>'
CALL += "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"


def turn(ids: list[int], **settings: Any) -> Any:
    return assemble(run([ids], tokenizer=TOKENIZER, **settings))


def test_added_tokens_are_markup_even_in_a_fence() -> None:
    made = turn(TOKENIZER.encode("```\n" + CALL.format("x") + "\n```"))
    assert [(call.name, call.arguments) for call in made.tool_calls] == [("f", '{"a": "x"}')]


def test_the_same_characters_spelled_are_a_quotation() -> None:
    text = "See " + CALL.format("x") + " and </think>."
    made = turn(TOKENIZER.encode(text, added=False))
    assert (made.content, made.tool_calls, made.discarded) == (text, (), ())


def test_a_value_may_hold_the_spelled_closer() -> None:
    before, after = CALL.split("{}")
    value = "a </｜DSML｜parameter> b"
    ids = TOKENIZER.encode(before) + TOKENIZER.encode(value, added=False) + TOKENIZER.encode(after)
    assert [call.arguments for call in turn(ids).tool_calls] == ['{"a": "a </｜DSML｜parameter> b"}']


def test_a_deleted_token_does_not_join_spelled_halves() -> None:
    ids = TOKENIZER.encode("b</th") + TOKENIZER.encode("</think>") + TOKENIZER.encode("ink>c")
    made = turn(ids)
    assert made.content == "bc"
    assert Discarded("</think>", "spliced_markup", "content") in made.discarded


def test_look_alikes_are_recognised_by_ids_too() -> None:
    """ASCII bars are never the added token, whoever reads them: a leaked block is repaired, a mention is text."""
    made = turn(TOKENIZER.encode("Hi.\n\n" + CALL.format("x").replace("｜", "|")))
    assert (made.content, [call.arguments for call in made.tool_calls]) == ("Hi.", ['{"a": "x"}'])
    made = turn(TOKENIZER.encode("The <|DSML|tool_calls> tag."))
    assert made.content == "The <|DSML|tool_calls> tag."


def test_a_vocabulary_without_the_sentinel_is_read_as_text() -> None:
    class Bare(ByteTokenizer):
        def token_to_id(self, token: str) -> int | None:
            return None

    ids = TOKENIZER.encode(CALL.format("x"), added=False)
    assert len(assemble(run([ids], tokenizer=Bare())).tool_calls) == 1


def test_ids_and_text_do_not_mix() -> None:
    decoder = Decoder(tokenizer=TOKENIZER)
    decoder.feed([65])
    with pytest.raises(TypeError, match="after token ids"):
        decoder.feed("x")
    decoder = Decoder(tokenizer=TOKENIZER)
    decoder.feed("x")
    with pytest.raises(TypeError, match="after text"):
        decoder.feed([65])


@QUICK
@given(st.integers(min_value=0, max_value=2**63))
def test_damaged_turns_by_ids(seed: int) -> None:
    """Order, JSON and chunk invariance by ids; no marker comes of joining, whatever was spelled."""
    rng = random.Random(seed)
    settings = settings_of(rng) | {"tokenizer": TOKENIZER}
    pieces = [damaged(rng) for _ in range(rng.randint(1, 2))]
    ids = [i for piece in pieces for i in TOKENIZER.encode(piece, added=rng.random() < 0.8)]
    whole = run([ids], **settings)
    check_order(whole)
    check_json(whole)
    chunkings = [[[i] for i in ids]]
    chunkings += [[ids[:at], ids[at:]] for at in rng.sample(range(len(ids)), min(len(ids), 4))]
    for chunks in chunkings:
        assert merge(run(chunks, **settings)) == merge(whole), chunks


@QUICK
@given(st.integers(min_value=0, max_value=2**63))
def test_added_tokens_never_show(seed: int) -> None:
    """P0 by ids: where markers came as added tokens only, none is in the output, not even in code."""
    rng = random.Random(seed)
    text = damaged(rng)
    made = turn(TOKENIZER.encode(text), policy=Policy(spelled="pass"))
    strict = lexicon_of(Decoder("v4").dialect).strict_head
    spelled = [found.group() for found in strict.finditer(text) if not any(token in found.group() for token in ADDED)]
    for output in (made.content, made.reasoning):
        assert all(found.group() in spelled for found in strict.finditer(output))
