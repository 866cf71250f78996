"""Stop strings: the text before the first of them, however it is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from closeranks.gateway.stops import Stops

ALPHABET = "ab<é"


def reference(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The definition: the match that ends first; of those that end there, the longest."""
    found = []
    for string in strings:
        at = text.find(string)
        if at >= 0:
            found.append((at + len(string), -len(string), string))
    if not found:
        return text, None
    end, _, string = min(found)
    return text[: end - len(string)], string


@given(
    st.text(ALPHABET, max_size=60),
    st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 60), max_size=12),
)
def test_any_cutting_equals_one_shot(text: str, strings: list[str], cuts: list[int]) -> None:
    expected, matched = reference(text, strings)
    stops = Stops(strings)
    shown = ""
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        shown += stops.feed(text[at:cut])
        at = max(at, cut)
        # nothing that could still be cut off is out, and nothing else is held back
        assert expected.startswith(shown)
        if stops.matched is None:
            held = text[len(shown) : at]
            assert not held or any(string.startswith(held) for string in strings)
    if stops.matched is None:
        shown += stops.close()
    assert (shown, stops.matched) == (expected, matched)
    assert stops.feed("more") == ("" if matched else "more") or matched is None


def test_a_long_string_costs_its_length_once() -> None:
    stops = Stops(["a" * 1000 + "b"])
    assert stops.feed("a" * 50_000) == "a" * 49_000
    assert stops.close() == "a" * 1000
