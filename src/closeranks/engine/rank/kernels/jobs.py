"""The compiled loops of the CPU kernels, float32. Each takes the address of its int64 arguments: see the tuples below.

Written for LLVM's vectoriser: inner loops over contiguous slices, several sums at a time. Array arguments are
addresses, sizes are in elements. Argument 0 is always the number of threads.
"""

from typing import Any

import numpy as np
from numba import njit

from .team import FAST, barrier, carray, pointer, thread_num

F32 = np.float32
I32 = np.int32


ATTEND = ["threads", "qkv", "tokens", "heads", "kv", "dim", "cos", "sin", "pages", "places", "pool", "pool_size", "page_stride", "share_stride", "k_offset", "v_offset", "page_size", "table", "table_rows", "table_width", "singles", "singles_count", "starts", "offsets", "out", "scratch", "scratch_width", "bounds"]
"""`attend`: qkv [tokens, heads + 2 kv, dim]; cos, sin [tokens, dim / 2]; pages, places [tokens] int32; table
[table_rows, table_width] int32; singles [singles_count] int32: the rows of one token, for which attention is computed;
starts, offsets: see `Batch`; out [tokens, heads, dim]; scratch [threads, scratch_width]; bounds [threads + 1] int32:
the units (single, head), head fastest, of each thread."""

GATHER = ["threads", "pool", "pool_size", "page_stride", "share_stride", "k_offset", "v_offset", "page_size", "kv", "dim", "row", "width", "out"]
"""`gather`: row [width] int32 page numbers; out [2, kv, width * page_size, dim]."""

NORM = ["threads", "x", "delta", "weight", "eps", "out", "rows", "hidden"]
"""`norm`: x, delta, out [rows, hidden]; delta 0: none; eps: address of a float32."""

SILU = ["threads", "gate_up", "out", "rows", "width"]
"""`silu_mul`: gate_up [rows, 2 width], out [rows, width]."""


@njit(cache=True, fastmath=FAST, error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """e ** x in float32 within 3e-7 relative; below -87 as at -87. In a form that vectorises."""
    x = min(max(x, F32(-87.0)), F32(88.0))
    n = np.floor(x * F32(1.44269504) + F32(0.5))
    r = x - n * F32(0.693359375)
    r = r - n * F32(-2.12194440e-4)
    p = F32(1.9875691500e-4)
    p = p * r + F32(1.3981999507e-3)
    p = p * r + F32(8.3334519073e-3)
    p = p * r + F32(4.1665795894e-2)
    p = p * r + F32(1.6666665459e-1)
    p = p * r + F32(5.0000001201e-1)
    p = p * r * r + r + F32(1.0)
    return p * I32((I32(n) + I32(127)) << I32(23)).view(F32)


@njit(cache=True, fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def rotate(x: Any, cos: Any, sin: Any, out: Any) -> None:
    """Rotary embedding of one head, halves apart; `x` and `out` may be the same."""
    half = cos.shape[0]
    for i in range(half):
        first, second = x[i], x[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = second * cos[i] + first * sin[i]


@njit(cache=True, fastmath=FAST, error_model="numpy")  # type: ignore[untyped-decorator]
def one_head(
    q: Any, pool: Any, base: Any, page_stride: Any, k_offset: Any, v_offset: Any, page_size: Any, pages: Any, n: Any,
    scores: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of one query head over the first `n` positions of a page table; `scores` [>= n] is scratch."""
    dim = q.shape[0]
    scale = F32(1.0) / np.sqrt(F32(dim))
    most = F32(-np.inf)
    for p in range((n + page_size - 1) // page_size):
        at = pages[p] * page_stride + base + k_offset
        first = p * page_size
        count = min(page_size, n - first)
        j = 0
        while j + 4 <= count:
            k0 = pool[at + j * dim : at + (j + 1) * dim]
            k1 = pool[at + (j + 1) * dim : at + (j + 2) * dim]
            k2 = pool[at + (j + 2) * dim : at + (j + 3) * dim]
            k3 = pool[at + (j + 3) * dim : at + (j + 4) * dim]
            s0 = s1 = s2 = s3 = F32(0.0)
            for d in range(dim):
                x = q[d]
                s0 += x * k0[d]
                s1 += x * k1[d]
                s2 += x * k2[d]
                s3 += x * k3[d]
            scores[first + j] = s0 * scale
            scores[first + j + 1] = s1 * scale
            scores[first + j + 2] = s2 * scale
            scores[first + j + 3] = s3 * scale
            j += 4
        while j < count:
            k0 = pool[at + j * dim : at + (j + 1) * dim]
            s0 = F32(0.0)
            for d in range(dim):
                s0 += q[d] * k0[d]
            scores[first + j] = s0 * scale
            j += 1
    for i in range(n):
        most = max(most, scores[i])
    total = F32(0.0)
    for i in range(n):
        weight = exp(scores[i] - most)
        scores[i] = weight
        total += weight
    for d in range(dim):
        out[d] = F32(0.0)
    for p in range((n + page_size - 1) // page_size):
        at = pages[p] * page_stride + base + v_offset
        first = p * page_size
        count = min(page_size, n - first)
        j = 0
        while j + 4 <= count:
            v0 = pool[at + j * dim : at + (j + 1) * dim]
            v1 = pool[at + (j + 1) * dim : at + (j + 2) * dim]
            v2 = pool[at + (j + 2) * dim : at + (j + 3) * dim]
            v3 = pool[at + (j + 3) * dim : at + (j + 4) * dim]
            w0, w1, w2, w3 = scores[first + j], scores[first + j + 1], scores[first + j + 2], scores[first + j + 3]
            for d in range(dim):
                out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
            j += 4
        while j < count:
            v0 = pool[at + j * dim : at + (j + 1) * dim]
            w0 = scores[first + j]
            for d in range(dim):
                out[d] += w0 * v0[d]
            j += 1
    share = F32(1.0) / total
    for d in range(dim):
        out[d] *= share


def attend(address: int) -> None:
    """Rotate q in place, rotate k and store k and v in the pool, then attend for rows of one token."""
    a = carray(pointer(address), (28,), np.int64)
    threads, tokens, heads, kv, dim = a[0], a[2], a[3], a[4], a[5]
    qkv = carray(pointer(a[1]), (tokens, heads + 2 * kv, dim), F32)
    cos = carray(pointer(a[6]), (tokens, dim // 2), F32)
    sin = carray(pointer(a[7]), (tokens, dim // 2), F32)
    pages = carray(pointer(a[8]), (tokens,), I32)
    places = carray(pointer(a[9]), (tokens,), I32)
    pool = carray(pointer(a[10]), (a[11],), F32)
    page_stride, share_stride, k_offset, v_offset, page_size = a[12], a[13], a[14], a[15], a[16]
    table = carray(pointer(a[17]), (a[18], a[19]), I32)
    singles = carray(pointer(a[20]), (a[21],), I32)
    starts = carray(pointer(a[22]), (a[18],), I32)
    offsets = carray(pointer(a[23]), (a[18] + 1,), I32)
    out = carray(pointer(a[24]), (tokens, heads, dim), F32)
    scratch = carray(pointer(a[25]), (threads, a[26]), F32)
    bounds = carray(pointer(a[27]), (threads + 1,), I32)
    me = np.int64(thread_num()) if threads > 1 else np.int64(0)

    for t in range(me * tokens // threads, (me + 1) * tokens // threads):
        for h in range(heads):
            rotate(qkv[t, h], cos[t], sin[t], qkv[t, h])
        for g in range(kv):
            at = pages[t] * page_stride + g * share_stride + places[t] * dim
            rotate(qkv[t, heads + g], cos[t], sin[t], pool[at + k_offset : at + k_offset + dim])
            v = qkv[t, heads + kv + g]
            target = pool[at + v_offset : at + v_offset + dim]
            for d in range(dim):
                target[d] = v[d]
    if threads > 1:
        barrier()
    group = heads // kv
    for unit in range(bounds[me], bounds[me + 1]):
        row, h = singles[unit // heads], unit % heads
        t = offsets[row]
        one_head(
            qkv[t, h], pool, (h // group) * share_stride, page_stride, k_offset, v_offset, page_size, table[row],
            starts[row] + 1, scratch[me], out[t, h],
        )  # fmt: skip


def gather(address: int) -> None:
    """Lay the k and v of one row's pages end to end."""
    a = carray(pointer(address), (13,), np.int64)
    threads, page_stride, share_stride, page_size, kv, dim, width = a[0], a[3], a[4], a[7], a[8], a[9], a[11]
    pool = carray(pointer(a[1]), (a[2],), F32)
    row = carray(pointer(a[10]), (width,), I32)
    block = page_size * dim
    out = carray(pointer(a[12]), (2, kv, width, block), F32)
    me = np.int64(thread_num()) if threads > 1 else np.int64(0)
    for p in range(me * width // threads, (me + 1) * width // threads):
        for plane in range(2):
            offset = a[6] if plane else a[5]
            for g in range(kv):
                at = row[p] * page_stride + g * share_stride + offset
                source, target = pool[at : at + block], out[plane, g, p]
                for d in range(block):
                    target[d] = source[d]


def norm(address: int) -> None:
    """`x += delta` (if there is one), out = rms-normalised `x` times weight."""
    a = carray(pointer(address), (8,), np.int64)
    threads, rows, hidden = a[0], a[6], a[7]
    x = carray(pointer(a[1]), (rows, hidden), F32)
    weight = carray(pointer(a[3]), (hidden,), F32)
    eps = carray(pointer(a[4]), (1,), F32)[0]
    out = carray(pointer(a[5]), (rows, hidden), F32)
    me = np.int64(thread_num()) if threads > 1 else np.int64(0)
    for r in range(me * rows // threads, (me + 1) * rows // threads):
        xr, target = x[r], out[r]
        squares = F32(0.0)
        if a[2] != 0:
            delta = carray(pointer(a[2]), (rows, hidden), F32)[r]
            for i in range(hidden):
                value = xr[i] + delta[i]
                xr[i] = value
                squares += value * value
        else:
            for i in range(hidden):
                squares += xr[i] * xr[i]
        scale = F32(1.0) / np.sqrt(squares / F32(hidden) + eps)
        for i in range(hidden):
            target[i] = weight[i] * (xr[i] * scale)


def silu_mul(address: int) -> None:
    """out = silu(gate) * up."""
    a = carray(pointer(address), (5,), np.int64)
    threads, rows, width = a[0], a[3], a[4]
    both = carray(pointer(a[1]), (rows, 2 * width), F32)
    out = carray(pointer(a[2]), (rows, width), F32)
    me = np.int64(thread_num()) if threads > 1 else np.int64(0)
    for r in range(me * rows // threads, (me + 1) * rows // threads):
        gate, up, target = both[r, :width], both[r, width:], out[r]
        for i in range(width):
            target[i] = gate[i] / (F32(1.0) + exp(-gate[i])) * up[i]
