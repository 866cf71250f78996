"""How a model is dealt to the ranks of a tensor-parallel group."""

from dataclasses import dataclass

from ..planes import deal
from .config import ModelConfig


def slice_of(n: int, parts: int, part: int) -> range:
    """The contiguous piece of `range(n)` that falls to `part`; the first pieces are larger by one if `n` is uneven."""
    return range(part * n // parts, (part + 1) * n // parts) if n < parts else deal(n, parts, part)


@dataclass(frozen=True)
class Shard:
    """One rank's part: whole KV groups with their query heads, a slice of the MLP, a slice of the vocabulary."""

    rank: int
    size: int
    kv: range
    """KV heads, which are the share numbers of the rank's pages."""
    heads: range
    mlp: range
    vocab: range
    """Rows of the output layer."""

    @staticmethod
    def of(config: ModelConfig, rank: int, size: int) -> "Shard":
        """Raises `ValueError` for more ranks than KV heads: heads are not replicated."""
        kv = deal(config.kv_heads, size, rank)
        group = config.heads // config.kv_heads
        return Shard(
            rank=rank,
            size=size,
            kv=kv,
            heads=range(kv.start * group, kv.stop * group),
            mlp=slice_of(config.intermediate, size, rank),
            vocab=slice_of(config.vocab, size, rank),
        )
