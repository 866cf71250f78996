"""The fuzzer's entry point, briefly in every run and for a minute under the slow mark."""

import random
import sys
import time
from pathlib import Path

import pytest

from closeranks.codec import Policy

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_decoder import mutate, one_input
from properties import check


def test_inputs_of_every_kind_pass() -> None:
    for kind in (b"\0", b"\1"):
        for fill in (b"\0", b"\x55", b"\xff"):
            one_input(kind + fill * 60)
    assert mutate(1.0, seed=7) > 0


FOUND = [
    # a quoted look-alike whose last bar is the first one of a real marker, under quoted="parse"
    "b2b0d58705c44ac73a95404154c1725dfdd78ff00494645e295f69304623a97715ada49446d696e4896e44371856de6e630865360878b269"
    "72322980e34ebb5228c4e8c0c7e631e413a6a3da2554292a869a8c46406883d73f7d00fcf1c9ca5137e04b7532870832d5a1308ceb75d7c8"
    "187accc9d77c52142bf136cb4f0c5ee352f02a026a397487d316cee385f87d0d2f8a6677b21041d50467b2e2c4b0eee78b95e6ef88",
]


@pytest.mark.parametrize("data", FOUND)
def test_inputs_that_once_failed_pass(data: str) -> None:
    one_input(bytes.fromhex(data))


@pytest.mark.parametrize("policy", [Policy(quoted="parse", spelled=spelled) for spelled in ("parse", "strip", "pass")])
@pytest.mark.parametrize("quote", ["```", "`", "```\n", "~~~\n", ""])
@pytest.mark.parametrize("alike", ["</|DSML|", "<|DSML|", "<||DSML||", "</｜DSML|", "<|DSML|DSML|", "<｜｜DSML|"])
def test_a_look_alike_hides_no_marker_that_shares_its_bars(policy: Policy, quote: str, alike: str) -> None:
    for real in ("｜DSML｜x", "｜DSML｜invoke", "</｜DSML｜invoke>", "｜｜DSML｜｜"):
        turn = check(f"{quote}{alike}{real}", random.Random(0), policy=policy)
        assert turn.content.startswith(quote.rstrip("\n"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_mutation() -> None:
    assert mutate(60.0, seed=time.time_ns()) > 0
