"""Versions as engines print them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.diagnose.audit.versions import key, within


@pytest.mark.parametrize(
    ("version", "ranges", "expected"),
    [
        ("0.5.13.post1", ">=0.5.13.post1,<0.5.16", True),
        ("0.5.13", ">=0.5.13.post1", False),
        ("v0.5.15.post1-cu126", "<0.5.16", True),
        ("0.5.16rc1", "<0.5.16", True),
        ("0.5.16", "<0.5.16", False),
        ("0.32.0+cpu", ">=0.30", True),
        ("0.5.24.dev12+gabc", "<0.5.24", True),
        ("1.0", "==1.0.0", True),
        ("1.0", "!=1.0.0", False),
        ("nightly", "<1", None),
        ("0.5.1", "", True),
    ],
)
def test_within(version: str, ranges: str, expected: bool | None) -> None:
    assert within(version, ranges) is expected


def test_a_wrong_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="no version range"):
        within("1.0", "about 1.0")


@given(st.text())
def test_any_text_has_a_key_or_none(text: str) -> None:
    key(text)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_order_is_that_of_the_numbers(a: list[int], b: list[int]) -> None:
    one, two = ".".join(map(str, a)), ".".join(map(str, b))
    assert within(one, f"<{two}") == (tuple(a + [0] * (4 - len(a))) < tuple(b + [0] * (4 - len(b))))
