"""Tokens to text: pieces add up to the one-shot decoding, whatever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from closeranks.gateway.detokenize import Detokenizer, UnsupportedTokenizer, Vocabulary

from . import tiny

TOKENIZER = tiny.tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)


def whole(tokens: list[int], skip_special: bool = True) -> str:
    detokenizer = Detokenizer(VOCABULARY, skip_special)
    return "".join(map(detokenizer.feed, tokens)) + detokenizer.close()


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=40), st.booleans())
def test_pieces_equal_one_shot_for_any_tokens(tokens: list[int], skip_special: bool) -> None:
    assert whole(tokens, skip_special) == TOKENIZER.decode(tokens, skip_special_tokens=skip_special)


@given(st.text(max_size=60))
def test_text_survives(text: str) -> None:
    assert whole(TOKENIZER.encode(text).ids, skip_special=False) == text


@given(st.text("aé😀 ", min_size=1, max_size=20))
def test_no_more_than_an_unfinished_character_is_held(text: str) -> None:
    detokenizer = Detokenizer(VOCABULARY)
    data = b""
    shown = ""
    for token in TOKENIZER.encode(text).ids:
        data += VOCABULARY.bytes_of(token)
        shown += detokenizer.feed(token)
        assert len(data) - len(shown.encode()) <= 3
    assert shown == text


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert whole([10**6, TOKENIZER.encode("a").ids[0], -1]) == "a"


def test_sentencepiece_byte_tokens() -> None:
    words = {"<unk>": 0, "▁hello": 1, "<0xE4>": 2, "<0xB8>": 3, "<0xAD>": 4, "▁": 5, "x": 6}
    made = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    detokenizer = Detokenizer(Vocabulary(made))
    assert [detokenizer.feed(t) for t in (6, 1, 2, 3, 4, 1)] == ["x", " hello", "", "", "中", " hello"]


def test_an_unknown_decoder_is_named() -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        Vocabulary(made)
