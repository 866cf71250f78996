"""Checksums of page shares: one name and one function per kind of memory."""

import torch
import xxhash


def name(device: torch.device) -> str:
    """Goes into the fingerprint: engines that pair must compute the same."""
    return "xxh3_64" if device.type == "cpu" else "mix64"


NONE = "none"
"""In place of a name where pages are not verified."""


def share_sum(share: torch.Tensor) -> int:
    """Unsigned 64-bit checksum of a contiguous tensor's bytes, by the rule of its device.

    `mix64`, on devices: the sum, modulo 2^64, over all 32-bit words of mix(word + (index + 1) * odd constant), with
    the finaliser of splitmix64; it depends on every bit and on the order, and is one reduction on the device.
    """
    if share.device.type == "cpu":
        return bytes_sum(share.view(torch.uint8).numpy().data.cast("B"))
    return mix64(share)


def bytes_sum(share: memoryview) -> int:
    """`share_sum` of CPU memory without a tensor around it, which costs as much as the sum of a small share."""
    return xxhash.xxh3_64_intdigest(share)


def mix64(share: torch.Tensor) -> int:
    """See `share_sum`; runs on any device."""
    words = share.contiguous().view(-1).view(torch.int32).to(torch.int64)
    index = torch.arange(1, len(words) + 1, dtype=torch.int64, device=words.device)
    x = words + index * signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ shifted(x, shift)) * signed(factor)
    return int((x ^ shifted(x, 31)).sum()) & ((1 << 64) - 1)


def signed(value: int) -> int:
    """An unsigned 64-bit constant as torch's int64 holds it."""
    return value - (1 << 64) if value >> 63 else value


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)
