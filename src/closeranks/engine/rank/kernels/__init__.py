"""The operations of a model that differ between devices, behind one small protocol; `choose` picks.

`plain` is torch alone and runs everywhere; `cpu` packs linear weights and walks page tables with compiled loops.
"""

from typing import Protocol

import torch

from ..models.batch import Batch

Tensor = torch.Tensor


class Linear(Protocol):
    """`y = x W^T + b`, [T, in] -> [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Kernels(Protocol):
    """Operations on activations of one dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Takes the weight [out, in] over: it may be kept in another layout."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        ...

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x += delta` in place, then the norm of `x`."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 n] -> [T, n]: silu(first half) * second half."""
        ...

    def rotation(self, batch: Batch, inv_freq: Tensor) -> None:
        """Prepare the rotary angles of a batch; once per forward pass."""
        ...

    def attend(self, qkv: Tensor, heads: int, pool: Tensor, layer: int, batch: Batch) -> Tensor:
        """Rotate q and k, store k and v in the pool's planes 0 and 1, attend causally over each row's pages.

        qkv [T, (heads + 2 kv) * head_dim], pool [pages, kv, layers, planes, page_size, head_dim]
        -> [T, heads * head_dim].
        """
        ...


def choose(device: torch.device, dtype: torch.dtype, threads: int) -> Kernels:
    """The best kernels for a device and dtype. `threads` matters on the CPU only.

    The compiled CPU loops need the GNU-compatible OpenMP runtime that torch for Linux brings; without it, and in half
    precision, the CPU runs packed linear layers and plain torch.
    """
    from .plain import PackedKernels, PlainKernels

    if device.type != "cpu":
        return PlainKernels()
    if dtype == torch.float32:
        from .team import runtime

        if runtime() is not None:
            from .cpu import CpuKernels

            return CpuKernels(threads)
    return PackedKernels()
