"""Kernels in plain torch, for any device and dtype; also the reference that other kernels are tested against."""

import numpy as np
import torch
import torch.nn.functional as F

from ..models.batch import Batch
from .packed import PackedLinear

Tensor = torch.Tensor


class PlainLinear:
    """A linear layer with its weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PlainKernels:
    """See `Kernels`."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> PlainLinear | PackedLinear:
        return PlainLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        x += delta
        return self.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotation(self, batch: Batch, inv_freq: Tensor) -> None:
        angles = batch.positions.float()[:, None] * inv_freq
        batch.on_device["cos"], batch.on_device["sin"] = angles.cos(), angles.sin()

    def attend(self, qkv: Tensor, heads: int, pool: Tensor, layer: int, batch: Batch) -> Tensor:
        kv, dim = pool.shape[1], pool.shape[5]
        where = batch.on_device
        if "pages" not in where:
            where["pages"] = torch.from_numpy(batch.pages.astype(np.int64)).to(qkv.device, non_blocking=True)
            where["places"] = torch.from_numpy(batch.places.astype(np.int64)).to(qkv.device, non_blocking=True)
            where["table"] = torch.from_numpy(batch.table.astype(np.int64)).to(qkv.device, non_blocking=True)
            where["plan"] = plan(batch, pool.shape[4], qkv.device)
        parts = qkv.view(len(qkv), heads + 2 * kv, dim)
        q, k, v = parts[:, :heads], parts[:, heads : heads + kv], parts[:, heads + kv :]
        q, k = rotated(q, where["cos"], where["sin"]), rotated(k, where["cos"], where["sin"])
        pool[where["pages"], :, layer, 0, where["places"]] = k
        pool[where["pages"], :, layer, 1, where["places"]] = v
        out = torch.empty_like(q)
        for rows, tokens, width, mask in where["plan"]:
            pages = where["table"][rows, :width]
            past = pool[pages, :, layer, :2]  # [R, width, kv, 2, page, dim]
            past = past.permute(3, 0, 2, 1, 4, 5).reshape(2, len(pages), kv, -1, dim)
            picked = q[tokens].view(len(pages), -1, heads, dim).transpose(1, 2)
            part = F.scaled_dot_product_attention(picked, past[0], past[1], attn_mask=mask, enable_gqa=heads != kv)
            out[tokens] = part.transpose(1, 2).reshape(-1, heads, dim)
        return out.view(len(qkv), heads * dim)


class PackedKernels(PlainKernels):
    """The same with packed linear weights, on the CPU."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(weight, bias)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [T, n, dim] by angles [T, dim / 2], halves apart (not interleaved)."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def plan(
    batch: Batch, page_size: int, device: torch.device
) -> list[tuple[slice | Tensor, slice | Tensor, int, Tensor]]:
    """Groups of rows that attend together: all rows of one token in one group, every other row alone.

    Each is (rows, their tokens, pages to gather, mask [R, 1, tokens per row, keys]).
    """
    counts = np.diff(batch.offsets)
    groups: list[tuple[slice | Tensor, slice | Tensor, int, Tensor]] = []
    single = np.flatnonzero(counts == 1)
    if len(single):
        ends = batch.starts[single] + 1
        width = -(-int(ends.max()) // page_size)
        mask = np.arange(width * page_size)[None, :] < ends[:, None]
        rows, tokens = torch.from_numpy(single).to(device), torch.from_numpy(batch.offsets[single].astype(np.int64))
        groups.append((rows, tokens.to(device), width, torch.from_numpy(mask[:, None, None]).to(device)))
    for row in np.flatnonzero(counts > 1):
        start, count = int(batch.starts[row]), int(counts[row])
        width = -(-(start + count) // page_size)
        mask = np.arange(width * page_size)[None, :] <= np.arange(start, start + count)[:, None]
        own = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        groups.append((slice(row, row + 1), own, width, torch.from_numpy(mask[None, None]).to(device)))
    return groups
