"""What `transformers` says, greedily, in fp32, on the same weights; and the rule by which an answer equals it.

A token may differ only where the reference's two best logits are closer than `NEAR`, in at most 1 of 1,000 positions;
the run then goes on with the reference's token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

NEAR = 5e-4
ALLOWED = 1 / 1000


@dataclass
class Expected:
    """Greedy continuation of a prompt: tokens, and at each the distance of the two best logits."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


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
    def continue_(self, prompt: Sequence[int], count: int) -> Expected:
        out = self.model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        tokens: list[int] = []
        gaps: list[float] = []
        while True:
            best = out.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            if len(tokens) == count:
                return Expected(list(prompt), tokens, gaps)
            out = self.model(
                torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1
            )


def compare(expected: Expected, ask: Callable[[list[int], int], list[int]], got: list[int], tally: Tally) -> None:
    """Hold an answer against the reference; `ask(prompt, count)` continues after a near tie.

    Raises AssertionError at the first token that differs where the reference was sure.
    """
    done = 0
    while True:
        count = len(expected.tokens) - done
        assert len(got) == count, f"{len(got)} tokens instead of {count}"
        for i, token in enumerate(got):
            at = done + i
            tally.positions += 1
            if token != expected.tokens[at]:
                assert expected.gaps[at] < NEAR, (
                    f"token {at} after a prompt of {len(expected.prompt)}: {token} instead of {expected.tokens[at]}, "
                    f"where the two best logits are {expected.gaps[at]:.2e} apart"
                )
                tally.ties += 1
                done = at + 1
                break
        else:
            return
        if done == len(expected.tokens):
            return
        got = ask(expected.prompt + expected.tokens[:done], len(expected.tokens) - done)
