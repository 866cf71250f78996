"""The digest: the same for the same history, another for any difference that matters."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from closeranks.engine.rank.digest import Digest
from closeranks.protocol import Row

BASE: dict[str, Any] = {
    "n": 2,
    "rows": [Row(3, 0, 16, sample=True), Row(1, 40, 1, sample=True)],
    "tables": [[5, 6], [9, 1, 2]],
    "tokens": [17, 4],
    "operations": 99,
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "number": {"n": 3},
    "slot": {"rows": [Row(2, 0, 16, sample=True), Row(1, 40, 1, sample=True)]},
    "start": {"rows": [Row(3, 1, 16, sample=True), Row(1, 40, 1, sample=True)]},
    "count": {"rows": [Row(3, 0, 15, sample=True), Row(1, 40, 1, sample=True)]},
    "sample": {"rows": [Row(3, 0, 16), Row(1, 40, 1, sample=True)]},
    "order of rows": {"rows": [Row(1, 40, 1, sample=True), Row(3, 0, 16, sample=True)]},
    "page": {"tables": [[5, 7], [9, 1, 2]]},
    "order of pages": {"tables": [[6, 5], [9, 1, 2]]},
    "page on another row": {"tables": [[5, 6, 9], [1, 2]]},
    "token": {"tokens": [17, 5]},
    "order of tokens": {"tokens": [4, 17]},
    "operations": {"operations": 98},
}


def after(first: int = 7, epoch: int = 1, **step: Any) -> int:
    digest = Digest(epoch)
    digest.add(1, [Row(0, 0, first)], [[0]], [], 1)
    return digest.add(**step)


def test_the_same_history_gives_the_same_value_whatever_the_tables_are_held_in() -> None:
    held = {"tables": [np.asarray([5, 6], np.int32), np.asarray([9, 0, 1, 0, 2])[::2]]}
    assert after(**BASE) == after(**BASE | held)


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_shows(what: str) -> None:
    assert after(**BASE) != after(**BASE | DIFFERENT[what])


def test_an_earlier_difference_stays() -> None:
    assert after(first=7, **BASE) != after(first=8, **BASE)
    assert after(epoch=1, **BASE) != after(epoch=2, **BASE)


@pytest.mark.slow
def test_it_does_not_depend_on_the_hash_seed() -> None:
    code = "from tests.engine.rank.test_digest import BASE, after; print(after(**BASE))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert found == {f"{after(**BASE)}\n"}
