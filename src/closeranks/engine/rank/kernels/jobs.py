"""The compiled loops of the CPU kernels, float32. Each takes the address of its int64 arguments: see the tuples below.

Written for LLVM's vectoriser: inner loops over contiguous slices, several sums at a time. Array arguments are
addresses, sizes are in elements. Argument 0 is always the number of threads.
"""

from typing import Any

import numpy as np
from numba import njit

from .team import FAST, barrier, carray, pointer, prefetch, thread_num

F32 = np.float32
I32 = np.int32


def named(text: str) -> tuple[str, ...]:
    """The arguments of a job, in order."""
    return tuple(text.split())


ATTEND = named(
    "threads qkv tokens heads kv dim cos sin pages places pool pool_size page_stride share_stride k_offset v_offset "
    "page_size table table_rows table_width singles singles_count starts offsets out scratch scratch_width bounds "
    "together"
)
"""`attend`: qkv [tokens, heads + 2 kv, dim]; cos, sin [tokens, dim / 2]; pages, places [tokens] int32; table
[table_rows, table_width] int32; singles [singles_count] int32: the rows of one token, for which attention is computed;
starts, offsets: see `Batch`; out [tokens, heads, dim]; scratch [threads, together, scratch_width]; bounds
[threads + 1] int32: each thread's units; a unit is `together` query heads (of one KV head) of a single, heads
fastest."""

GATHER = named("threads pool pool_size page_stride share_stride k_offset v_offset page_size kv dim row width out")
"""`gather`: row [width] int32 page numbers; out [2, kv, width * page_size, dim]."""

NORM = named("threads x delta weight eps out rows hidden")
"""`norm`: x, delta, out [rows, hidden]; delta 0: none; eps: address of a float32."""

SILU = named("threads gate_up out rows width")
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
def some_heads(
    q: Any, pool: Any, base: Any, page_stride: Any, k_offset: Any, v_offset: Any, page_size: Any, pages: Any, n: Any,
    scores: Any, out: Any,
) -> None:  # fmt: skip
    """Attention of query heads q [h, dim] of one KV head over the first `n` positions of a page table, into out
    [h, dim]; scores [h, >= n] is scratch. A page is read once for all heads."""
    heads, dim = q.shape
    scale = F32(1.0) / np.sqrt(F32(dim))
    last = (n + page_size - 1) // page_size
    for p in range(last):
        at = pages[p] * page_stride + base + k_offset
        first = p * page_size
        # The next page lies anywhere: without this the hardware notices it only at the first miss.
        ahead = pages[min(p + 1, last - 1)] * page_stride + base
        for line in range(0, page_size * dim, 16):
            prefetch(pool, ahead + k_offset + line)
            prefetch(pool, ahead + v_offset + line)
        count = min(page_size, n - first)
        for h in range(heads):
            qh, sh = q[h], scores[h]
            j = 0
            while j + 4 <= count:
                k0 = pool[at + j * dim : at + (j + 1) * dim]
                k1 = pool[at + (j + 1) * dim : at + (j + 2) * dim]
                k2 = pool[at + (j + 2) * dim : at + (j + 3) * dim]
                k3 = pool[at + (j + 3) * dim : at + (j + 4) * dim]
                s0 = s1 = s2 = s3 = F32(0.0)
                for d in range(dim):
                    x = qh[d]
                    s0 += x * k0[d]
                    s1 += x * k1[d]
                    s2 += x * k2[d]
                    s3 += x * k3[d]
                sh[first + j] = s0 * scale
                sh[first + j + 1] = s1 * scale
                sh[first + j + 2] = s2 * scale
                sh[first + j + 3] = s3 * scale
                j += 4
            while j < count:
                k0 = pool[at + j * dim : at + (j + 1) * dim]
                s0 = F32(0.0)
                for d in range(dim):
                    s0 += qh[d] * k0[d]
                sh[first + j] = s0 * scale
                j += 1
    for h in range(heads):
        sh, oh = scores[h], out[h]
        most = F32(-np.inf)
        for i in range(n):
            most = max(most, sh[i])
        total = F32(0.0)
        for i in range(n):
            weight = exp(sh[i] - most)
            sh[i] = weight
            total += weight
        share = F32(1.0) / total
        for i in range(n):
            sh[i] *= share
        for d in range(dim):
            oh[d] = F32(0.0)
    for p in range(last):
        at = pages[p] * page_stride + base + v_offset
        first = p * page_size
        count = min(page_size, n - first)
        for h in range(heads):
            sh, oh = scores[h], out[h]
            j = 0
            while j + 8 <= count:
                v0 = pool[at + j * dim : at + (j + 1) * dim]
                v1 = pool[at + (j + 1) * dim : at + (j + 2) * dim]
                v2 = pool[at + (j + 2) * dim : at + (j + 3) * dim]
                v3 = pool[at + (j + 3) * dim : at + (j + 4) * dim]
                v4 = pool[at + (j + 4) * dim : at + (j + 5) * dim]
                v5 = pool[at + (j + 5) * dim : at + (j + 6) * dim]
                v6 = pool[at + (j + 6) * dim : at + (j + 7) * dim]
                v7 = pool[at + (j + 7) * dim : at + (j + 8) * dim]
                w0, w1, w2, w3 = sh[first + j], sh[first + j + 1], sh[first + j + 2], sh[first + j + 3]
                w4, w5, w6, w7 = sh[first + j + 4], sh[first + j + 5], sh[first + j + 6], sh[first + j + 7]
                for d in range(dim):
                    oh[d] += (
                        (w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d])
                        + (w4 * v4[d] + w5 * v5[d] + w6 * v6[d] + w7 * v7[d])
                    )  # fmt: skip
                j += 8
            while j < count:
                v0 = pool[at + j * dim : at + (j + 1) * dim]
                w0 = sh[first + j]
                for d in range(dim):
                    oh[d] += w0 * v0[d]
                j += 1


def attend(address: int) -> None:
    """Rotate q in place, rotate k and store k and v in the pool, then attend for rows of one token."""
    a = carray(pointer(address), (29,), np.int64)
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
    together = a[28]
    scratch = carray(pointer(a[25]), (threads, together, a[26]), F32)
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
    units = heads // together
    for unit in range(bounds[me], bounds[me + 1]):
        row, h = singles[unit // units], (unit % units) * together
        t = offsets[row]
        some_heads(
            qkv[t, h : h + together], pool, (h // group) * share_stride, page_stride, k_offset, v_offset, page_size,
            table[row], starts[row] + 1, scratch[me], out[t, h : h + together],
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
