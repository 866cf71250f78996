"""From what arrives (text, bytes cut anywhere, token ids) to text for the machine."""

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol

_SURROGATES = re.compile("[\ud800-\udfff]")
_TEXTS: list[tuple[Any, dict[int, str | None]]] = []  # of the tokenizers used last
_PENDING_LIMIT = 8  # tokens of one character; UTF-8 needs at most four bytes


class Tokenizer(Protocol):
    """What is needed of a tokenizer: `tokenizers.Tokenizer` has it, and tokenizers of transformers and others have
    `convert_tokens_to_ids` in place of `token_to_id`. Its tokens must stand for bytes (byte-level BPE), as those of
    all dialects here do."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Text of ids, control tokens included."""


def clean(text: str) -> str:
    """`text` with lone surrogates, which no encoding can carry, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of one added token; None if the vocabulary has no such token."""
    if hasattr(tokenizer, "token_to_id"):
        found = tokenizer.token_to_id(token)
    elif hasattr(tokenizer, "convert_tokens_to_ids"):
        found = tokenizer.convert_tokens_to_ids(token)
        if found is not None and found == getattr(tokenizer, "unk_token_id", None):
            return None
    else:
        raise TypeError(f"{type(tokenizer).__name__} has neither token_to_id nor convert_tokens_to_ids")
    return found if isinstance(found, int) else None


def _texts_of(tokenizer: Any) -> dict[int, str | None]:
    """Texts of single tokens, remembered for all decoders of one tokenizer."""
    for known, texts in _TEXTS:
        if known is tokenizer:
            return texts
    del _TEXTS[3:]
    _TEXTS.insert(0, (tokenizer, {}))
    return _TEXTS[0][1]


class Bytes:
    """UTF-8 that may be cut inside a character; what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, data: bytes, final: bool = False) -> str:
        """The characters that are complete with `data`."""
        return self._decoder.decode(data, final)


class Tokens:
    """Token ids to text; ids in `private` become their private character."""

    def __init__(self, tokenizer: Any, private: dict[int, str]) -> None:
        self._tokenizer = tokenizer
        self._private = private
        self._texts = _texts_of(tokenizer)
        self._pending: list[int] = []

    def text(self, ids: Sequence[int], final: bool = False) -> str:
        """The characters that are complete with `ids`."""
        out: list[str] = []
        for token in ids:
            mark = self._private.get(token)
            if mark is not None:
                out.append(self._flush())
                out.append(mark)
                continue
            if not self._pending:
                text = self._text_of(token)
                if text is not None:
                    out.append(text)
                    continue
            self._pending.append(token)
            text = self._decode(self._pending)
            if not text.endswith("\ufffd") or len(self._pending) >= _PENDING_LIMIT:
                out.append(text)
                self._pending.clear()
        if final:
            out.append(self._flush())
        return "".join(out)

    def _text_of(self, token: int) -> str | None:
        """The text of a token that stands for whole characters, remembered."""
        if token not in self._texts:
            text = self._decode([token])
            self._texts[token] = None if "\ufffd" in text else text
        return self._texts[token]

    def _flush(self) -> str:
        text = self._decode(self._pending) if self._pending else ""
        self._pending.clear()
        return text

    def _decode(self, ids: list[int]) -> str:
        return clean(self._tokenizer.decode(ids, skip_special_tokens=False))
