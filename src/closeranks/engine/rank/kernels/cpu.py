"""Kernels for float32 on the CPU: packed linear weights, compiled loops over page tables for the rest.

Rows of one token attend in one compiled loop over their pages; longer rows (prefill chunks) have their pages laid end
to end and go through torch's flash attention, which is at its best there.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..models.batch import Batch
from . import jobs
from .plain import PackedKernels
from .team import Args, Job

Tensor = torch.Tensor

SHARED = 32768
"""Elementwise work below this many values is done by one thread: waking another takes longer."""


class CpuKernels(PackedKernels):
    """See `Kernels`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.attend_job = Job(jobs.attend, threads)
        self.gather_job = Job(jobs.gather, threads)
        self.norm_job = Job(jobs.norm, threads)
        self.silu_job = Job(jobs.silu_mul, threads)
        self.norm_args = np.zeros(len(jobs.NORM), np.int64)
        self.silu_args = np.zeros(len(jobs.SILU), np.int64)
        self.gather_args = np.zeros(len(jobs.GATHER), np.int64)
        self.eps: dict[float, Tensor] = {}
        self.scratch = torch.empty(0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, 0, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, delta.data_ptr(), weight, eps)

    def _norm(self, x: Tensor, delta: int, weight: Tensor, eps: float) -> Tensor:
        if eps not in self.eps:
            self.eps[eps] = torch.tensor([eps], dtype=torch.float32)
        out = torch.empty_like(x)
        rows, hidden = x.shape
        self.norm_args[:] = (
            0, x.data_ptr(), delta, weight.data_ptr(), self.eps[eps].data_ptr(), out.data_ptr(), rows, hidden,
        )  # fmt: skip
        self.norm_job(self.norm_args, rows > 1 and rows * hidden > SHARED)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self.silu_args[:] = (0, gate_up.data_ptr(), out.data_ptr(), rows, width)
        self.silu_job(self.silu_args, rows > 1 and rows * width > SHARED)
        return out

    def attend(self, qkv: Tensor, heads: int, pool: Tensor, layer: int, batch: Batch) -> Tensor:
        where = batch.on_device
        if "args" not in where:
            self._lay_out(qkv, heads, pool, batch)
        args: Args = where["args"]
        out = qkv.new_empty(len(qkv), heads * pool.shape[5])
        args[A["qkv"]], args[A["out"]] = qkv.data_ptr(), out.data_ptr()
        args[A["k_offset"]] = layer * pool.stride(2)
        args[A["v_offset"]] = layer * pool.stride(2) + pool.stride(3)
        self.attend_job(args, where["share"])
        for row, mask in where["chunks"]:
            self._chunk(qkv, out, heads, pool, args, batch, row, mask)
        return out

    def _lay_out(self, qkv: Tensor, heads: int, pool: Tensor, batch: Batch) -> None:
        """Everything that is the same in all layers of a pass."""
        where = batch.on_device
        kv, page_size, dim = pool.shape[1], pool.shape[4], pool.shape[5]
        if not (pool.stride(5) == 1 and pool.stride(4) == dim and qkv.is_contiguous()):
            raise ValueError("the CPU kernels need a page's rows to be contiguous")
        counts = np.diff(batch.offsets)
        singles = np.flatnonzero(counts == 1).astype(np.int32)
        lengths = batch.starts[singles] + 1
        longest = int(lengths.max(initial=0))
        # A page is read once for the heads of a unit; few rows give every thread something to do by smaller units.
        together = heads // kv if len(singles) * kv >= 2 * self.threads else 1
        work = np.cumsum(np.repeat(lengths.astype(np.int64) + 16, heads // together))
        whole = int(work[-1]) * together if len(work) else 0
        share = whole * dim > SHARED // 4 or qkv.numel() > SHARED
        members = self.threads if share else 1
        cuts = [int(np.searchsorted(work, int(work[-1]) * i / members)) if len(work) else 0 for i in range(members)]
        bounds = np.asarray([*cuts, len(work)], np.int32)
        if self.scratch.numel() < self.threads * together * longest:
            self.scratch = torch.empty(self.threads * together * (2 * longest + 64))
        table = np.ascontiguousarray(batch.table)
        values = dict(
            threads=0, qkv=0, tokens=len(qkv), heads=heads, kv=kv, dim=dim,
            cos=where["cos"].data_ptr(), sin=where["sin"].data_ptr(),
            pages=batch.pages.ctypes.data, places=batch.places.ctypes.data,
            pool=pool.data_ptr(), pool_size=pool.shape[0] * pool.stride(0),
            page_stride=pool.stride(0), share_stride=pool.stride(1), k_offset=0, v_offset=0, page_size=page_size,
            table=table.ctypes.data, table_rows=table.shape[0], table_width=table.shape[1],
            singles=singles.ctypes.data, singles_count=len(singles),
            starts=batch.starts.ctypes.data, offsets=batch.offsets.ctypes.data, out=0,
            scratch=self.scratch.data_ptr(), scratch_width=self.scratch.numel() // (self.threads * together),
            bounds=bounds.ctypes.data, together=together,
        )  # fmt: skip
        where["args"] = np.asarray([values[name] for name in jobs.ATTEND], np.int64)
        where["share"] = share
        where["alive"] = (table, singles, bounds)
        where["chunks"] = [(int(r), causal(batch, int(r), page_size)) for r in np.flatnonzero(counts > 1)]

    def _chunk(
        self,
        qkv: Tensor,
        out: Tensor,
        heads: int,
        pool: Tensor,
        args: Args,
        batch: Batch,
        row: int,
        mask: Tensor | None,
    ) -> None:
        """Attention of a row with several tokens; its q and k are rotated and stored already."""
        kv, page_size, dim = pool.shape[1], pool.shape[4], pool.shape[5]
        first, last = int(batch.offsets[row]), int(batch.offsets[row + 1])
        keys = int(batch.starts[row]) + last - first
        width = -(-keys // page_size)
        laid = qkv.new_empty(2, kv, width * page_size, dim)
        table: npt.NDArray[np.int32] = batch.on_device["alive"][0]
        self.gather_args[:] = (
            0, pool.data_ptr(), args[A["pool_size"]], pool.stride(0), pool.stride(1), args[A["k_offset"]],
            args[A["v_offset"]], page_size, kv, dim, table[row].ctypes.data, width, laid.data_ptr(),
        )  # fmt: skip
        self.gather_job(self.gather_args, laid.numel() > SHARED)
        q = qkv[first:last, : heads * dim].view(1, last - first, heads, dim).transpose(1, 2)
        k, v = laid[:1, :, :keys], laid[1:, :, :keys]
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv)
        out[first:last].view(last - first, heads, dim).copy_(part[0].transpose(0, 1))


A = {name: i for i, name in enumerate(jobs.ATTEND)}


def causal(batch: Batch, row: int, page_size: int) -> Tensor | None:
    """Additive mask [count, keys] of a row that does not begin at position 0; None: torch's own causal mask fits."""
    start = int(batch.starts[row])
    if start == 0:
        return None
    count = int(batch.offsets[row + 1] - batch.offsets[row])
    mask = torch.zeros(count, start + count)
    mask[:, start:].masked_fill_(torch.ones(count, count, dtype=torch.bool).triu_(1), float("-inf"))
    return mask
