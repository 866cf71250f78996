"""A pairwise cover of the product of roles, ranks, backends, overlap, radix, chunks and retraction, tiny model."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e import exactness
from tests.e2e.reference import Expected, Reference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Sequence[Expected]:
    reference = Reference(tiny_model)
    return [reference.continue_(prompt, exactness.OUTPUT) for prompt in exactness.prompts()]


@pytest.mark.parametrize("combination", exactness.cover(), ids="|".join)
def test_equals_transformers(
    combination: exactness.Combination, tiny_model: Path, expected: Sequence[Expected]
) -> None:
    exactness.check(combination, tiny_model, expected)


def test_draws_equal_the_reference_s(tiny_model: Path) -> None:
    """Draws are functions of seed and position: uneven ranks, hand-over, retraction and company change none of them."""
    reference = Reference(tiny_model)
    drawn = [reference.continue_(p, exactness.OUTPUT, exactness.seeded(i)) for i, p in enumerate(exactness.prompts())]
    exactness.check(("pair 2+1", "nixl", "on", "on", "64", "forced"), tiny_model, drawn)
