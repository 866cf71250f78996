"""Where weights come from: one file per format, each yielding a `Source`. Used at conversion only."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..models.config import ModelConfig
from ..models.hf import shown


@dataclass(frozen=True)
class Source:
    """An opened model."""

    config: ModelConfig
    inv_freq: list[float]
    read: Callable[[str], npt.NDArray[np.float32]]
    """Canonical tensor name -> values in float32; raises `KeyError` for a tensor that is not there."""
    unknown: list[str]
    """Tensors of the source that no canonical name stands for."""
    write_tokenizer: Callable[[Path], None]
    """Writes `tokenizer.json` into a folder."""
    chat_template: str
    """Empty: the model has none."""
    warnings: tuple[str, ...] = ()
    """What was left out of the source, for the operator."""


def known_ids(config: ModelConfig, where: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """(config without special tokens that its vocabulary lacks, warnings that say so).

    No such token can be sampled, and a grammar cannot be told to end with it.
    """
    said = []
    eos = tuple(i for i in config.eos_token_ids if 0 <= i < config.vocab)
    strange = ", ".join(shown(i) for i in config.eos_token_ids if i not in eos)
    if strange:
        left = "" if eos else "; no other is named, so answers may end by max_tokens and stop strings only"
        said.append(f"{where}: eos_token_id {strange} is outside of the vocabulary of {config.vocab}, left out{left}")
    bos = config.bos_token_id
    if bos != -1 and not 0 <= bos < config.vocab:
        said.append(f"{where}: bos_token_id {shown(bos)} is outside of the vocabulary of {config.vocab}, left out")
        bos = -1
    return msgspec.structs.replace(config, eos_token_ids=eos, bos_token_id=bos), tuple(said)
