"""Where weights come from: one file per format, each yielding a `Source`. Used at conversion only."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..models.config import ModelConfig


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
