"""The prefix cache: a radix tree over whole pages, kept as two dicts.

A page's chain hash names its tokens *and* all tokens before it, so the path from the root is implied by the hash and
the tree needs no pointers: walking a prefix is one look-up per page. The order of `idle` (cached pages without a user)
replaces child counts: users hold a whole prefix and let go of it from the deepest page up, hence a child is always
idle before its parent and the oldest idle page is always a leaf. Evicting it is exact LRU in O(1) per page.
"""

from collections.abc import Sequence


class Cache:
    """Chain hash <-> page. The pool counts users; this part knows only which pages are idle."""

    __slots__ = ("evicted", "hash_of", "idle", "page_of")

    def __init__(self) -> None:
        self.page_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}
        """Cached pages without a user, least recently used first."""
        self.evicted = 0

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Pages of the longest cached prefix, at most `limit` of them."""
        found: list[int] = []
        page_of = self.page_of
        for h in hashes[:limit]:
            page = page_of.get(h)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, chain: bytes, page: int) -> None:
        """A page in use becomes a cached page in use."""
        self.page_of[chain] = page
        self.hash_of[page] = chain

    def insert(self, hashes: Sequence[bytes], pages: Sequence[int], valid: int) -> None:
        """Add the first `valid` pages, but for those whose hash is there already."""
        page_of = self.page_of
        for i in range(valid):
            if hashes[i] not in page_of:
                self.add(hashes[i], pages[i])

    def evict(self, count: int) -> list[int]:
        """Remove the `count` least recently used idle pages (there must be as many) and return them."""
        pages = []
        for page in self.idle:
            pages.append(page)
            if len(pages) == count:
                break
        for page in pages:
            del self.idle[page]
            del self.page_of[self.hash_of.pop(page)]
        self.evicted += len(pages)
        return pages

    def check(self) -> None:
        """The two dicts mirror each other. Raises AssertionError."""
        assert len(self.page_of) == len(self.hash_of)
        for page, chain in self.hash_of.items():
            assert self.page_of[chain] == page, f"page {page} is not the one of its hash"
