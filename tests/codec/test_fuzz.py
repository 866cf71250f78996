"""The fuzzer's entry point, briefly in every run and for a minute under the slow mark."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_decoder import mutate, one_input


def test_inputs_of_every_kind_pass() -> None:
    for kind in (b"\0", b"\1"):
        for fill in (b"\0", b"\x55", b"\xff"):
            one_input(kind + fill * 60)
    assert mutate(1.0, seed=7) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_mutation() -> None:
    assert mutate(60.0, seed=time.time_ns()) > 0
