"""What `transformers` says, in fp32, on the same weights; and the rule by which an answer equals it.

Greedy: a token may differ only where the reference's two best logits are closer than `NEAR`, in at most 1 of 1,000
positions. Seeded: only where the reference's draw lies within `NEAR_DRAW` of another outcome, counted. The run then
goes on with the reference's token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from closeranks.protocol import Sampling
from tests.engine.rank.oracle import oracle

NEAR = 5e-4
NEAR_DRAW = 1e-5
ALLOWED = 1 / 1000


@dataclass
class Expected:
    """Continuation of a prompt: tokens, and with each how far the next outcome is (logits; or probability)."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    asked: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of the request; none: greedy."""

    @property
    def near(self) -> float:
        return NEAR_DRAW if self.asked else NEAR

    def rest(self, done: int) -> "Expected":
        """What is expected after the first `done` tokens, which count as prompt."""
        return Expected(self.prompt + self.tokens[:done], self.tokens[done:], self.gaps[done:], self.asked)

    def first(self, count: int) -> "Expected":
        return Expected(self.prompt, self.tokens[:count], self.gaps[:count], self.asked)


@dataclass
class Tally:
    """Positions compared and near ties taken, over a whole run."""

    positions: int = 0
    ties: int = 0

    def check(self) -> None:
        """Raises AssertionError if more positions differed than the rule allows (one tie is always allowed)."""
        assert self.ties <= max(1, ALLOWED * self.positions), f"{self.ties} ties in {self.positions} positions"


class Reference:
    def __init__(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def continue_(self, prompt: Sequence[int], count: int, asked: dict[str, Any] | None = None) -> Expected:
        """`asked`: sampling parameters with a seed, no penalties that tell prompt from output; left out: greedy."""
        given = list(prompt)
        expected = Expected(given, [], [], asked or {})
        sampling = Sampling(**asked) if asked else None
        out = self.model(torch.tensor([given]), use_cache=True, logits_to_keep=1)
        while True:
            logits = out.logits[0, -1]
            if sampling is None:
                best = logits.topk(2)
                token, gap = int(best.indices[0]), float(best.values[0] - best.values[1])
            else:
                known = given + expected.tokens
                token, gap = oracle(logits.numpy(), sampling, known, len(given), len(known))
            expected.tokens.append(token)
            expected.gaps.append(gap)
            if len(expected.tokens) == count:
                return expected
            out = self.model(
                torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
            )


def compare(expected: Expected, got: list[int], tally: Tally) -> int:
    """Hold an answer against the reference; how many tokens are settled.

    All, or up to a near tie that went the other way: what follows it is a different text, and has to be asked for again
    after the reference's token. Raises AssertionError at the first token that differs where the reference was sure.
    """
    assert len(got) == len(expected.tokens), f"{len(got)} tokens instead of {len(expected.tokens)}"
    for at, (token, right, gap) in enumerate(zip(got, expected.tokens, expected.gaps, strict=True)):
        tally.positions += 1
        if token != right:
            assert gap < expected.near, (
                f"token {at} after a prompt of {len(expected.prompt)}: {token} instead of {right}, "
                f"where the next outcome is {gap:.2e} away"
            )
            tally.ties += 1
            return at + 1
    return len(got)
