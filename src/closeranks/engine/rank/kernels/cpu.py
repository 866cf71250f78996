"""Kernels for float32 on the CPU: linear weights packed by oneDNN, the rest compiled by numba."""

import torch

from .plain import PlainKernels

Tensor = torch.Tensor


class PackedLinear:
    """A linear layer whose weight was brought into oneDNN's own layout, once; the original is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, None)
        self.bias = bias
        self.op = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.op(x, self.packed, self.bias, "none", [], "")
        return y


class CpuKernels(PlainKernels):
    """See `Kernels`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:  # type: ignore[override]
        return PackedLinear(weight, bias)
