"""Token ids to text, one at a time: a table of each token's bytes and an incremental UTF-8 decoder.

Concatenated, the pieces are the UTF-8 decoding of all tokens' bytes, wherever the tokens were cut, with U+FFFD for
what is no UTF-8; never more than an unfinished character (3 bytes) is held back. This equals the tokenizer's own
one-shot decoding except where a SentencePiece vocabulary spells invalid UTF-8 in byte tokens (there one-shot decoding
changes characters that are already out), and for the leading space that it strips from a whole text: output
continues a prompt.
"""

import codecs
import json
from typing import Any

from tokenizers import Tokenizer


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder is none of those whose tokens have bytes of their own; the text names both."""


class Vocabulary:
    """The bytes of each token of a tokenizer. `special`: ids that a text without markup leaves out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedTokenizer."""
        whole = json.loads(tokenizer.to_str())
        to_bytes = _decoder(whole.get("decoder"))
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = {int(token["id"]): token for token in whole.get("added_tokens", ())}
        self.special = frozenset(token_id for token_id, token in added.items() if token["special"])
        self.pieces: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for text, token_id in vocabulary.items():
            self.pieces[token_id] = text.encode() if token_id in added else to_bytes(text)
        self.longest = max(map(len, self.pieces), default=0)

    def __len__(self) -> int:
        return len(self.pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids that a padded output layer has beyond the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


class Detokenizer:
    """The text of one growing output."""

    __slots__ = ("_decoder", "_skip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip = vocabulary.special if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._vocabulary.bytes_of(token_id))

    def close(self) -> str:
        """What an unfinished character at the end makes."""
        return self._decoder.decode(b"", True)


def _decoder(spec: dict[str, Any] | None) -> Any:
    """The function from a token's spelling to its bytes."""
    kinds = [d.get("type") for d in spec.get("decoders", [])] if spec and spec.get("type") == "Sequence" else []
    kind = spec.get("type") if spec else None
    if kind == "ByteLevel" or kinds == ["ByteLevel"]:
        return _byte_level
    if kind == "Metaspace" or (kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}):
        return _sentence_piece
    raise UnsupportedTokenizer(
        f"tokenizer decoder {kind or 'none'}{kinds or ''}: supported are ByteLevel and SentencePiece's (Metaspace, or "
        "Replace + ByteFallback + Fuse + Strip)"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: visible Latin-1 is itself, the rest follows from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[c] for c in text])
    except KeyError:  # a token spelt outside the alphabet stands for its own text
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return text.encode()
    return text.replace("▁", " ").encode()
