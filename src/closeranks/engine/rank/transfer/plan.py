"""Which bytes of which peer rank a page transfer writes: shares are matched by number, adjacent ones are joined.

Pure. The two sides may be split over different numbers of ranks; each own share is held by exactly one peer rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from closeranks.protocol import Memory, Peer


class PeerUnusable(Exception):
    """A peer cannot be written to; says why. Ends the transfers to it, not the engine."""


@dataclass(frozen=True)
class Run:
    """`count` own shares from index `own` lie in the same order in the peer's memory from index `theirs`."""

    own: int
    theirs: int
    count: int


@dataclass(frozen=True)
class Route:
    """One peer rank that holds shares of this rank."""

    memory: Memory
    runs: tuple[Run, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of the peer rank's part of a page."""
        return self.memory.share_bytes * len(self.memory.shares)


@dataclass(frozen=True)
class Piece:
    """Contiguous bytes: offset in the own buffer, offset in the peer rank's, length."""

    own: int
    theirs: int
    length: int


def routes(shares: Sequence[int], share_bytes: int, peer: Peer, backend: str) -> list[Route]:
    """The peer ranks that hold any of `shares`, each with its runs, in rank order.

    Raises:
        PeerUnusable: another backend or share size, a share held by no rank or by two.
    """
    found: list[Route] = []
    held: dict[int, int] = {}
    for memory in sorted(peer.memories, key=lambda m: m.rank):
        if memory.backend != backend:
            raise PeerUnusable(f"{peer.engine} rank {memory.rank} transfers by {memory.backend}, this engine {backend}")
        if memory.share_bytes != share_bytes:
            raise PeerUnusable(
                f"{peer.engine} rank {memory.rank} has shares of {memory.share_bytes} B, this engine of {share_bytes} B"
            )
        place = {share: index for index, share in enumerate(memory.shares)}
        runs: list[Run] = []
        for own, share in enumerate(shares):
            theirs = place.get(share)
            if theirs is None:
                continue
            if share in held:
                raise PeerUnusable(
                    f"{peer.engine}: share {share} is held by ranks {held[share]} and {memory.rank}, one is expected"
                )
            held[share] = memory.rank
            last = runs[-1] if runs else None
            if last and last.own + last.count == own and last.theirs + last.count == theirs:
                runs[-1] = Run(last.own, last.theirs, last.count + 1)
            else:
                runs.append(Run(own, theirs, 1))
        if runs:
            found.append(Route(memory, tuple(runs)))
    missing = [share for share in shares if share not in held]
    if missing:
        raise PeerUnusable(f"{peer.engine}: shares {missing} are held by none of its {len(peer.memories)} ranks")
    return found


def pieces(route: Route, own_page_bytes: int, pages: Iterable[tuple[int, int]]) -> list[Piece]:
    """The writes of `pages` (own page, peer's page) along a route, joined where both sides are adjacent.

    Raises:
        PeerUnusable: a page number outside of the peer's pool.
    """
    size = route.memory.share_bytes
    found: list[Piece] = []
    for own_page, their_page in pages:
        if not 0 <= their_page < route.memory.num_pages:
            raise PeerUnusable(f"page {their_page} is outside of the peer's pool of {route.memory.num_pages} pages")
        for run in route.runs:
            own = own_page * own_page_bytes + run.own * size
            theirs = their_page * route.page_bytes + run.theirs * size
            length = run.count * size
            last = found[-1] if found else None
            if last and last.own + last.length == own and last.theirs + last.length == theirs:
                found[-1] = Piece(last.own, last.theirs, last.length + length)
            else:
                found.append(Piece(own, theirs, length))
    return found
