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


def shared(depth: int, make) -> object:
    found: object = make(1, 2)
    for _ in range(depth):
        found = make(found, found)
    return found


@pytest.mark.parametrize("depth", [40, 90])
@pytest.mark.parametrize("make", [lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, "b": b}])
def test_what_is_shared_is_counted_at_every_place(depth: int, make) -> None:
    with pytest.raises(UnsafePickle, match="refused: more than"):
        load_plain(pickle.dumps({"entries": shared(depth, make)}))


def test_sharing_within_bounds_is_loaded() -> None:
    frames = [{"name": "f", "filename": "x.py", "line": n} for n in range(20)]
    found = {"entries": [{"frames": frames, "state": "started"} for _ in range(50)]}
    assert load_plain(pickle.dumps(found)) == found


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsafePickle, match="holds itself"):
        load_plain(pickle.dumps(loop))


def test_a_key_whose_hash_takes_for_ever_is_refused() -> None:
    doubled = b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x940" for n in range(60))
    with pytest.raises(UnsafePickle, match="refused: a key"):
        load_plain(b"\x80\x04}K\x01\x940" + doubled + b"h\x3cNs.")


def test_an_encoded_pickle_of_torch_is_read() -> None:
    """Protocol 2, as torch writes it: BINPUT and no frames."""
    found = {
        "version": "2.10",
        "entries": [{"process_group": ("0", "default_pg"), "timeout_ms": 600000, "retired": True}],
    }
    assert load_plain(pickle.dumps(found, 2)) == found
