"""KV pages in one buffer: which bytes belong to which page, share, layer and plane, and who holds them.

Everything here knows a model's planes through its `PageLayout` only. A *share* is one KV-head group of one page,
contiguous over all layers and planes: one descriptor, one copy, one checksum.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from closeranks.protocol import Memory


@dataclass(frozen=True)
class PageLayout:
    """What a model keeps per token, declared by the model.

    `planes` are named in the order in which they lie in memory; each holds `head_dim` values of `dtype` per token, KV
    head and layer.
    """

    planes: tuple[str, ...]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def share_shape(self, page_size: int) -> tuple[int, int, int, int]:
        """[layers, planes, page_size, head_dim] of one share."""
        return self.layers, len(self.planes), page_size, self.head_dim

    def share_bytes(self, page_size: int) -> int:
        """Bytes of one share."""
        return self.layers * len(self.planes) * page_size * self.head_dim * self.dtype.itemsize

    def pages_in(self, budget: int, page_size: int) -> int:
        """Whole pages (all shares, so over all ranks) in `budget` bytes; the same number on every rank.

        Raises:
            ValueError: not even one page fits.
        """
        page = self.share_bytes(page_size) * self.kv_heads
        if budget < page:
            raise ValueError(f"kv_memory of {budget} B holds no page: one page of {page_size} tokens takes {page} B")
        return budget // page

    def describe(self, page_size: int) -> str:
        """The layout in words, for the fingerprint: engines that differ in it cannot exchange pages."""
        return (
            f"{page_size} tokens x {self.kv_heads} shares x {self.share_bytes(page_size)} B: "
            f"{','.join(self.planes)} [{self.layers} x {len(self.planes)} x {page_size} x {self.head_dim}] "
            f"{str(self.dtype).removeprefix('torch.')}"
        )


def deal(shares: int, tp_size: int, rank: int) -> range:
    """Share numbers (KV-head groups) of one rank: contiguous, the first ranks take one more where it does not divide.

    Raises:
        ValueError: more ranks than shares.
    """
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank} is not in 0 .. {tp_size - 1}")
    if tp_size > shares:
        raise ValueError(f"tp_size {tp_size} is more than the model's {shares} KV heads: a rank would hold none")
    each, more = divmod(shares, tp_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


class Pool:
    """One rank's part of all pages: one contiguous buffer `[num_pages, shares_here, layers, planes, page, head_dim]`.

    On the CPU the buffer is an anonymous shared file (memfd): other processes of this user open it under `path`, and it
    is gone with the last process that maps it, however that one dies. On CUDA it is device memory, `path` is empty.

    Raises:
        ValueError: impossible sizes.
        MemoryError, OSError: the buffer cannot be had.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        page_size: int,
        rank: int = 0,
        tp_size: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens")
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size
        self.rank = rank
        self.tp_size = tp_size
        self.device = torch.device(device)
        self.shares: tuple[int, ...] = tuple(deal(layout.kv_heads, tp_size, rank))
        """Share numbers held here, in memory order."""
        self.share_bytes = layout.share_bytes(page_size)
        self.page_bytes = self.share_bytes * len(self.shares)
        """Bytes of this rank's part of a page."""
        self.nbytes = self.page_bytes * num_pages
        self.stamp = os.urandom(16)
        """Lies behind the last byte: who opens `path` sees whether it is this pool (process numbers are reused)."""
        shape = (num_pages, len(self.shares), *layout.share_shape(page_size))
        if self.device.type == "cpu":
            self._fd = os.memfd_create(f"closeranks-pool-{rank}", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, self.nbytes + len(self.stamp))
            self._map = mmap.mmap(self._fd, self.nbytes + len(self.stamp))
            self._map[self.nbytes :] = self.stamp
            self.bytes: memoryview | None = memoryview(self._map)[: self.nbytes]
            """The whole buffer, on the CPU only."""
            count = self.nbytes // layout.dtype.itemsize
            self.tensor: torch.Tensor = torch.frombuffer(self._map, dtype=layout.dtype, count=count).view(shape)
        else:
            self._fd = -1
            self.bytes = None
            self.tensor = torch.zeros(shape, dtype=layout.dtype, device=self.device)

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return self.tensor.data_ptr()

    @property
    def path(self) -> str:
        """Where another process of this user on this host opens the buffer; empty where there is none."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""

    def memory(self, backend: str, address: bytes) -> Memory:
        """Description of this buffer for writers; `address` is what the transfer backend made of it."""
        return Memory(
            backend=backend,
            rank=self.rank,
            shares=list(self.shares),
            num_pages=self.num_pages,
            share_bytes=self.share_bytes,
            address=address,
        )

    def offset(self, page: int, index: int) -> int:
        """Byte offset of the `index`-th share held here of a page.

        Raises:
            IndexError: outside of the pool.
        """
        if not (0 <= page < self.num_pages and 0 <= index < len(self.shares)):
            raise IndexError(
                f"page {page}, share index {index}: the pool has {self.num_pages} pages, {len(self.shares)} shares"
            )
        return page * self.page_bytes + index * self.share_bytes

    def share_view(self, page: int, index: int) -> memoryview:
        """The bytes of a share: a view on the CPU, a copy of the device's memory elsewhere."""
        start = self.offset(page, index)
        if self.bytes is not None:
            return self.bytes[start : start + self.share_bytes]
        host: Any = self.tensor[page, index].cpu().contiguous().view(torch.uint8).numpy()
        return memoryview(host).cast("B")

    def copy(self, source: int, target: int) -> None:
        """Copy a page whole: all planes, all layers, all shares held here."""
        self.offset(source, 0), self.offset(target, 0)
        self.tensor[target].copy_(self.tensor[source])

    def tables_inside(self, pages: Sequence[int]) -> bool:
        """Whether every page number lies in the pool."""
        return all(0 <= page < self.num_pages for page in pages)
