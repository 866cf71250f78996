"""Linear layers on the CPU with their weight in oneDNN's own layout."""

import torch

Tensor = torch.Tensor


class PackedLinear:
    """The weight is laid out anew once, in a layout that serves any number of rows; the original is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, None)
        self.bias = bias
        self.op = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.op(x, self.packed, self.bias, "none", [], "")
        return y
