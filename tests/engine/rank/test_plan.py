"""Which bytes go where, for any two ways of dealing shares to ranks."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeranks.engine.rank.planes import PageLayout, Pool, deal
from closeranks.engine.rank.transfer.plan import PeerUnusable, pieces, routes
from closeranks.protocol import Memory, Peer


def memories(shares: int, tp_size: int, num_pages: int, share_bytes: int = 2) -> list[Memory]:
    return [
        Memory("shm", rank, list(deal(shares, tp_size, rank)), num_pages, share_bytes, b"") for rank in range(tp_size)
    ]


@given(shares=st.integers(1, 12), data=st.data())
def test_every_share_is_held_once_and_the_deal_is_even(shares: int, data: st.DataObject) -> None:
    tp_size = data.draw(st.integers(1, shares))
    parts = [deal(shares, tp_size, rank) for rank in range(tp_size)]
    assert [share for part in parts for share in part] == list(range(shares))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_more_ranks_than_heads_is_said_clearly() -> None:
    with pytest.raises(ValueError, match=r"tp_size 4 is more than the model's 3 KV heads"):
        deal(3, 4, 0)


@given(shares=st.integers(1, 8), data=st.data())
def test_every_share_of_every_page_arrives_in_its_place_and_nothing_else_is_touched(
    shares: int, data: st.DataObject
) -> None:
    own_tp, their_tp = data.draw(st.integers(1, shares)), data.draw(st.integers(1, shares))
    own_pages, their_pages = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    count = data.draw(st.integers(0, min(own_pages, their_pages)))
    sources = data.draw(st.permutations(range(own_pages)))[:count]
    targets = data.draw(st.permutations(range(their_pages)))[:count]
    pages = list(zip(sources, targets, strict=True))
    size = 2
    peer = Peer("peer", 1, memories(shares, their_tp, their_pages))
    theirs = {m.rank: bytearray(their_pages * len(m.shares) * size) for m in peer.memories}
    for rank in range(own_tp):
        held = deal(shares, own_tp, rank)
        own = b"".join(bytes([1 + page, 1 + share]) for page in range(own_pages) for share in held)
        for route in routes(held, size, peer, "shm"):
            for piece in pieces(route, len(held) * size, pages):
                target = theirs[route.memory.rank]
                target[piece.theirs : piece.theirs + piece.length] = own[piece.own : piece.own + piece.length]
    came = {target: source for source, target in pages}
    for memory in peer.memories:
        for page in range(their_pages):
            for index, share in enumerate(memory.shares):
                at = (page * len(memory.shares) + index) * size
                wanted = bytes([1 + came[page], 1 + share]) if page in came else bytes(size)
                assert theirs[memory.rank][at : at + size] == wanted


def test_adjacent_pages_of_equal_ranks_are_one_piece() -> None:
    peer = Peer("peer", 1, memories(4, 2, 100))
    (route,) = routes(deal(4, 2, 1), 2, peer, "shm")
    assert len(pieces(route, 4, [(p, p + 10) for p in range(50)])) == 1
    assert len(pieces(route, 4, [(p, p + 10) for p in range(0, 50, 2)])) == 25


BROKEN: dict[str, tuple[Callable[[list[Memory]], list[Memory]], str]] = {
    "nobody": (lambda m: m[:1], "are held by none of its 1 ranks"),
    "twice": (lambda m: [m[0], *memories(4, 1, 5)], "held by ranks"),
    "size": (lambda m: memories(4, 2, 5, share_bytes=4), "shares of 4 B"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_peer_that_does_not_fit_is_refused(how: str) -> None:
    change, told = BROKEN[how]
    with pytest.raises(PeerUnusable, match=told):
        routes(range(4), 2, Peer("peer", 1, change(memories(4, 2, 5))), "shm")


def test_another_backend_and_a_page_outside_are_refused() -> None:
    peer = Peer("peer", 1, memories(4, 2, 5))
    with pytest.raises(PeerUnusable, match="transfers by shm, this engine nixl"):
        routes(range(4), 2, peer, "nixl")
    for page in (-1, 5):
        with pytest.raises(PeerUnusable, match="outside of the peer's pool of 5 pages"):
            pieces(routes(range(4), 2, peer, "shm")[0], 8, [(0, page)])


def test_a_pool_lays_out_shares_contiguously() -> None:
    layout = PageLayout(("k", "v", "index_k"), 3, 5, 4, torch.bfloat16)
    pool = Pool(layout, 6, 2, rank=1, tp_size=2)
    assert pool.shares == (3, 4)
    assert pool.tensor.shape == (6, 2, 3, 3, 2, 4)
    assert pool.share_bytes == layout.share_bytes(2) == 3 * 3 * 2 * 4 * 2
    pool.tensor[4, 1] = 1.0
    ones = torch.ones(3 * 3 * 2 * 4, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert bytes(pool.share_view(4, 1)) == ones
    assert not any(pool.share_view(4, 0))
    assert not any(pool.share_view(5, 0))
    pool.copy(4, 0)
    assert bytes(pool.share_view(0, 1)) == ones
    with open(pool.path, "rb") as file:
        assert file.read()[: pool.nbytes] == bytes(pool.bytes or b"")
    for page, index in ((6, 0), (-1, 0), (0, 2)):
        with pytest.raises(IndexError):
            pool.share_view(page, index)


def test_a_budget_holds_the_same_pages_on_every_rank() -> None:
    layout = PageLayout(("k", "v"), 30, 3, 64, torch.float32)
    assert layout.pages_in(1 << 30, 16) == (1 << 30) // (3 * layout.share_bytes(16))
    with pytest.raises(ValueError, match="holds no page"):
        layout.pages_in(1000, 16)
    assert layout.describe(16) == "16 tokens x 3 shares x 245760 B: k,v [30 x 2 x 16 x 64] float32"
