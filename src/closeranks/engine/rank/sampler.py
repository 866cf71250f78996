"""Draws tokens from logits: each row by its own `Sampling`, seed, position and token list, whatever else is batched.

Order: logits -> penalties (repetition over prompt and output; frequency and presence over the output) -> grammar ->
greedy, or: temperature -> top_k -> top_p -> min_p -> draw. The cuts are by value, so equal tokens stay or go together:
top_k keeps what is at least the k-th largest; top_p keeps a token if all more likely ones together hold less than
top_p; min_p keeps what has at least min_p times the largest probability. The drawn token is the first, by token id,
at which the cumulated probability (float64) exceeds u times the total.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from closeranks.protocol import Sampling, TopLogprobs

Tensor = torch.Tensor
MASK = (1 << 64) - 1
LARGEST = torch.finfo(torch.float32).max


class NotFinite(ArithmeticError):
    """Logits hold NaN or infinity where none may be: weights, KV or a kernel is broken."""


def mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) that belongs to a seed and the position of the token to be drawn."""
    golden = 0x9E3779B97F4A7C15
    return (mixed((mixed((seed + golden) & MASK) + (position + 1) * golden) & MASK) >> 11) * 2.0**-53


class History:
    """What penalties need of a token list. A function of the list; `add` takes the next token."""

    def __init__(self, tokens: Tensor, prompt_length: int, vocab: int) -> None:
        """`tokens` [n] integers on the device of the logits."""
        tokens = tokens.long()
        self.seen = torch.zeros(vocab, dtype=torch.bool, device=tokens.device)
        self.seen[tokens] = True
        self.counts = torch.bincount(tokens[prompt_length:], minlength=vocab).float()
        """[vocab]: how often each token is in the output."""

    def add(self, token: Tensor) -> None:
        """`token` [1] int64, on the device: nothing waits for its value."""
        self.seen[token] = True
        self.counts[token] += 1


def needs_history(sampling: Sampling) -> bool:
    """Whether any penalty is on."""
    return bool(
        sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty not in (0.0, 1.0)
    )


@dataclass
class Draw:
    """One row to draw for."""

    sampling: Sampling
    position: int
    """Of the token to be drawn, in prompt + output."""
    history: History | None = None
    """Given iff `needs_history`."""
    allowed: Tensor | None = None
    """[vocab] bool: what the grammar admits next; None: everything."""


@dataclass(frozen=True)
class Drawn:
    """What a batch of draws gave; on the device, so that the next pass can start before anyone looks."""

    tokens: Tensor
    """[S] int64."""
    peaks: Tensor
    """[S]: the largest logit of each row, NaN if any is."""
    draws: list[Draw]
    best: tuple[Tensor, Tensor, Tensor] | None
    """Log-probabilities of the chosen tokens [S], and the 20 best [S, 20] with their ids."""

    def on_host(self) -> "Drawn":
        """A copy in host memory; see the function of that name."""
        best = None if self.best is None else (on_host(self.best[0]), on_host(self.best[1]), on_host(self.best[2]))
        return replace(self, tokens=on_host(self.tokens), peaks=on_host(self.peaks), best=best)

    def check(self) -> None:
        """Wait for the values; raises `NotFinite`."""
        finite = torch.isfinite(self.peaks)
        if not bool(finite.all()):
            rows = [i for i, ok in enumerate(finite.tolist()) if not ok]
            raise NotFinite(f"logits of sampled rows {rows} are not finite")

    def logprobs(self) -> list[TopLogprobs | None]:
        """One per row, None where not asked for; empty if no row asked."""
        if self.best is None:
            return []
        chosen, values, ids = (t.tolist() for t in self.best)
        result: list[TopLogprobs | None] = []
        for i, draw in enumerate(self.draws):
            n = draw.sampling.logprobs
            ranked = sorted(zip(ids[i], values[i], strict=True), key=lambda e: (-e[1], e[0]))
            result.append(None if n < 0 else TopLogprobs(chosen[i], ranked[:n]))
        return result


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory. From CUDA the copy is only enqueued: it is there when an event recorded after it comes."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@torch.inference_mode()
def sample(logits: Tensor, draws: list[Draw]) -> Drawn:
    """Draw one token per row of `logits` [S, vocab] float32 (left as they are); histories are advanced."""
    shaped = logits
    if any(d.history is not None or d.allowed is not None for d in draws):
        shaped = logits.clone()
        for row, draw in zip(shaped, draws, strict=True):
            shape(row, draw)
    peaks, tokens = shaped.max(dim=-1)
    if logits.device.type != "cpu":
        tokens = shaped.argmax(dim=-1)
    random = [i for i, d in enumerate(draws) if d.sampling.temperature > 0]
    if random:
        picked = shaped if len(random) == len(draws) else shaped[random]
        tokens[random] = drawn(picked, peaks[random], [draws[i] for i in random])
    for i, draw in enumerate(draws):
        if draw.history is not None:
            draw.history.add(tokens[i : i + 1])
    best = None
    if any(d.sampling.logprobs >= 0 for d in draws):
        logs = logits.log_softmax(dim=-1)
        values, ids = logs.topk(min(20, logs.shape[-1]), dim=-1)
        best = (logs.gather(1, tokens[:, None])[:, 0], values, ids)
    return Drawn(tokens=tokens, peaks=peaks, draws=draws, best=best)


def shape(row: Tensor, draw: Draw) -> None:
    """Apply penalties and grammar to one row [vocab] in place."""
    s, history = draw.sampling, draw.history
    if history is not None:
        if s.repetition_penalty not in (0.0, 1.0):
            scaled = torch.where(row > 0, row / s.repetition_penalty, row * s.repetition_penalty)
            scaled.clamp_(-LARGEST, LARGEST)  # a penalty near 0 goes beyond; what was infinite stays and is found
            row.copy_(torch.where(history.seen & row.isfinite(), scaled, row))
        row -= s.frequency_penalty * history.counts + s.presence_penalty * (history.counts > 0)
    if draw.allowed is not None:
        row.masked_fill_(~draw.allowed, float("-inf"))


def drawn(logits: Tensor, peaks: Tensor, draws: list[Draw]) -> Tensor:
    """Seeded draws [S] int64 from logits [S, vocab] whose maxima are `peaks` [S]."""
    warmth = column([d.sampling.temperature for d in draws], logits)
    p = ((logits.double() - peaks.double()[:, None]) / warmth).exp_()  # the largest is 1
    cut = [i for i, d in enumerate(draws) if d.sampling.top_k > 0 or d.sampling.top_p < 1]
    floor = column([d.sampling.min_p for d in draws], logits)
    if cut:
        floor[cut] = torch.maximum(floor[cut], least_kept(p[cut], [draws[i] for i in cut]))
    p = torch.where(p >= floor, p, 0.0)
    cumulated = p.cumsum(dim=-1)
    total = cumulated[:, -1:].contiguous()
    u = column([uniform(d.sampling.seed, d.position) for d in draws], logits)
    token = torch.searchsorted(cumulated, u * total, right=True)
    # u * total may round up to the total: then the last token that adds to it.
    return torch.minimum(token, torch.searchsorted(cumulated, total))[:, 0]


def column(values: list[float], like: Tensor) -> Tensor:
    """[S, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def least_kept(p: Tensor, draws: list[Draw]) -> Tensor:
    """The smallest value [S, 1] that top_k and top_p keep of `p` [S, vocab] (unnormalised)."""
    ranked = descending(p)
    n = p.shape[-1]
    k = torch.tensor([min(d.sampling.top_k, n) if d.sampling.top_k > 0 else n for d in draws], device=p.device)
    least = ranked.gather(1, k[:, None] - 1)
    ranked = torch.where(ranked >= least, ranked, 0.0)
    cumulated = ranked.cumsum(dim=-1)
    before = cumulated - ranked
    kept = before < column([d.sampling.top_p for d in draws], p) * cumulated[:, -1:]
    count = kept.sum(dim=-1, keepdim=True).clamp_(min=1)
    return torch.maximum(least, ranked.gather(1, count - 1))


def descending(p: Tensor) -> Tensor:
    """Rows sorted from large to small. numpy sorts values alone many times faster than torch does on the CPU."""
    if p.device.type == "cpu":
        return torch.from_numpy(np.sort(p.numpy(), axis=-1)[:, ::-1].copy())
    return p.sort(dim=-1, descending=True).values
