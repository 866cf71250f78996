"""One forward pass's work as the model sees it: rows of tokens laid end to end, and where their KV lies."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """`R` rows with together `T` tokens, `S` of the rows sample.

    Host arrays (int32) describe the rows; tensors lie on the model's device.
    """

    offsets: Ints
    """[R + 1]: row r's tokens are `offsets[r] .. offsets[r + 1] - 1`."""
    starts: Ints
    """[R]: position of the row's first token; what lies before is in the pool already."""
    table: Ints
    """[R, P]: pages of each row; entries beyond `ceil((start + count) / page_size)` are undefined page numbers >= 0."""
    pages: Ints
    """[T]: page that takes the token's KV."""
    places: Ints
    """[T]: place within that page."""
    tokens: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int64."""
    sampled: torch.Tensor
    """[S] int64: index of the last token of each row that samples."""
    on_device: dict[str, Any]
    """Kernels keep here what they derive from the batch once and use in every layer."""

    @property
    def rows(self) -> int:
        return len(self.starts)


def make_batch(
    starts: Ints, counts: Ints, table: Ints, page_size: int, tokens: torch.Tensor, sampled_rows: list[int]
) -> Batch:
    """Lay out rows; `tokens` are the fed tokens of all rows in order, on the model's device."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[rows]
    device = tokens.device
    return Batch(
        offsets=offsets,
        starts=starts,
        table=table,
        pages=table[rows, positions // page_size],
        places=(positions % page_size).astype(np.int32),
        tokens=tokens,
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
        sampled=torch.from_numpy(offsets[1:][sampled_rows].astype(np.int64) - 1).to(device, non_blocking=True),
        on_device={},
    )
