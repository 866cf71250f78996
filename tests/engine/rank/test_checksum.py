"""Checksums of shares see every bit and its place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engine.rank.checksum import mix64, name, share_sum


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 511), st.integers(0, 31), st.sampled_from([share_sum, mix64]))
def test_a_flipped_bit_changes_the_sum(seed: int, word: int, bit: int, checksum: object) -> None:
    assert callable(checksum)
    share = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(seed))
    before = checksum(share)
    assert before == checksum(share.clone())
    assert 0 <= before < 2**64
    words = share.view(torch.int32).view(-1)
    words[word] ^= torch.tensor(1 << bit).to(torch.int32)
    assert checksum(share) != before


def test_swapped_and_zero_words_change_the_sum() -> None:
    share = torch.arange(64.0)
    swapped = share.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    assert mix64(share) != mix64(swapped)
    assert mix64(torch.zeros(8)) != mix64(torch.zeros(16))
    assert mix64(torch.randn(8).bfloat16()) != 0


def test_the_name_tells_the_kind() -> None:
    assert name(torch.device("cpu")) == "xxh3_64"
    assert name(torch.device("cuda", 1)) == "mix64"
