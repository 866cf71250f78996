"""A plain numpy sampler that follows the definition in `engine.rank.sampler` word by word."""

import numpy as np

from closeranks.engine.rank.sampler import uniform
from closeranks.protocol import Sampling


def oracle(logits: np.ndarray, s: Sampling, tokens: list[int], prompt: int, position: int) -> tuple[int, float]:
    """(token, distance in probability to the nearest other outcome).

    Another outcome lies beyond a boundary of the cumulated distribution, or beyond a cut that would let one token more
    or less in.
    """
    x = logits.astype(np.float32).copy()
    output = tokens[prompt:]
    for t in set(tokens):
        if s.repetition_penalty != 0:
            x[t] = x[t] / np.float32(s.repetition_penalty) if x[t] > 0 else x[t] * np.float32(s.repetition_penalty)
    for t in set(output):
        x[t] -= np.float32(s.frequency_penalty) * output.count(t) + np.float32(s.presence_penalty)
    if s.temperature == 0:
        return int(np.argmax(x)), 1.0
    p = np.exp((x.astype(np.float64) - x.max()) / s.temperature)
    cuts = [1.0]
    if s.top_k > 0:
        ranked = np.append(np.sort(p)[::-1], 0.0)
        last = min(s.top_k, len(p)) - 1
        cuts.append((ranked[last] - ranked[last + 1]) / p.sum())
        p[p < ranked[last]] = 0
    if s.top_p < 1:
        total = p.sum()
        value, place, counts = np.unique(p, return_inverse=True, return_counts=True)
        above = (total - np.cumsum(value * counts))[place]  # what all more likely ones hold together
        cuts.append(np.abs(above / total - s.top_p).min())
        p[(above >= s.top_p * total) & (p < p.max())] = 0
    if s.min_p > 0:
        cuts.append(np.abs(p[p > 0] / p.max() - s.min_p).min())
    p[p < s.min_p * p.max()] = 0
    c = np.cumsum(p)
    u = uniform(s.seed, position) * c[-1]
    return int(np.argmax(c > u)), float(min(np.abs(c - u).min() / c[-1], *cuts))
