"""The event splitter: transparent for any bytes and any cut, linear, bounded."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from closeranks.gateway.guard.sse import EventSplitter, Fragment, data_of, with_data

PIECES = st.lists(
    st.sampled_from(
        [b"data: {}", b"data:x", b"\n", b"\r\n", b"\r", b": ping", b"event: e", b"id: 1", b"\xff", b"\n\n", b"y"]
    ),
    max_size=40,
)


def split(stream: bytes, cuts: list[int], limit: int = 1 << 20) -> list[bytes]:
    splitter = EventSplitter(limit)
    out: list[bytes] = []
    points = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    for a, b in itertools.pairwise(points):
        out += splitter.feed(stream[a:b])
    rest = splitter.close()
    return [*out, rest] if rest else out


@given(PIECES, st.lists(st.integers(0, 400)), st.sampled_from([4, 16, 1 << 20]))
def test_events_joined_are_the_stream_for_any_bytes_and_any_cut(
    pieces: list[bytes], cuts: list[int], limit: int
) -> None:
    stream = b"".join(pieces)
    assert b"".join(split(stream, cuts, limit)) == stream


@given(PIECES, st.lists(st.integers(0, 400)))
def test_the_data_read_does_not_depend_on_the_cut(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces) + b"\n\ndata: end\n\n"

    def datas(events: list[bytes]) -> list[bytes]:
        return [d for d in map(data_of, events) if d is not None]

    assert datas(split(stream, cuts)) == datas(split(stream, []))


def test_reads_every_spelling_of_the_data_field() -> None:
    assert data_of(b"data: a\n\n") == b"a"
    assert data_of(b"data:a\r\n\r\n") == b"a"
    assert data_of(b"event: x\ndata: a\ndata: b\n\n") == b"a\nb"
    assert data_of(b"\xef\xbb\xbfdata: a\n\n") == b"a"
    assert data_of(b": ping\n\n") is None
    assert data_of(b"data\n\n") == b""


def test_replacing_the_data_keeps_the_other_fields_and_the_line_ends() -> None:
    assert (
        with_data(b"event: x\r\nid: 7\r\ndata: a\r\ndata: b\r\n\r\n", b"c") == b"event: x\r\nid: 7\r\ndata: c\r\n\r\n"
    )
    assert with_data(b"data: a\n\n", b"c") == b"data: c\n\n"


def test_an_oversized_event_comes_out_in_fragments_and_the_next_is_whole_again() -> None:
    splitter = EventSplitter(limit=100)
    out = splitter.feed(b"data: " + b"x" * 500)
    out += splitter.feed(b"y" * 500)
    assert splitter.held <= 3
    out += splitter.feed(b"\n")
    out += splitter.feed(b"\ndata: next\n\n")
    assert b"".join(out) == b"data: " + b"x" * 500 + b"y" * 500 + b"\n\ndata: next\n\n"
    assert all(isinstance(piece, Fragment) for piece in out[:-1])
    assert out[-1] == b"data: next\n\n"
    assert not isinstance(out[-1], Fragment)
