"""The restricted loader: plain data passes, anything that could run code does not, at no cost."""

import contextlib
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.evidence.safe_pickle import UnsafePickle, load_plain

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x) | st.tuples(x, x),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(3, 5))
def test_plain_data_survives(found: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(found, protocol)) == found


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused(protocol: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickle, match="refused"):
        load_plain(pickle.dumps({"entries": [Evil()]}, protocol))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04N",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x04" + b"(" * 50 + b".",
        b"cos\nsystem\n(S'id'\ntR.",
        b"\x80\x02ccopy_reg\n_reconstructor\n.",
    ],
)
def test_damage_is_named(data: bytes) -> None:
    with pytest.raises(UnsafePickle):
        load_plain(data)


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(data: bytes) -> None:
    with contextlib.suppress(UnsafePickle):
        load_plain(b"\x80\x04" + data)


def test_deep_nesting_is_bounded() -> None:
    with pytest.raises(UnsafePickle):
        load_plain(b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999)
