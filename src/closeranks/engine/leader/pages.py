"""The page pool: which page is free, owned, cached or quarantined, and how often it is shared.

States of a page, one at a time:

    free ---take---> owned ---drop (last user)---> free          never in the cache
                       |  ^---drop (last user)---> cached        its hash is in the cache
                       |         cached ---share---> owned
                       |         cached ---evict---> free
                       +---quarantine---> quarantined ---lift---> free

`free + cached + owned + quarantined == total` after every call (`Pool.check`). A quarantined page may still be written
to by somebody; only proof that every writer is quiet lifts it, never time. Pages are taken last-freed-first, so the
order is a function of the calls alone.
"""

from collections.abc import Sequence

from .radix import Cache


class Pool:
    """`total` pages, numbered from 0, and the prefix cache over them. Every call costs O(pages named)."""

    __slots__ = ("cache", "free", "freed", "quarantined", "refs", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))
        self.refs = [0] * total
        """Users of each page; 0 for free, cached and quarantined pages."""
        self.quarantined: dict[int, None] = {}
        self.cache = Cache()
        self.freed = 0
        """Grows whenever pages become available: who failed to get pages need not try again before it does."""

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self.free) + len(self.cache.idle)

    @property
    def owned(self) -> int:
        return self.total - len(self.free) - len(self.cache.idle) - len(self.quarantined)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one user each, evicting cached ones if need be; None (and no change) if too few."""
        free = self.free
        missing = count - len(free)
        if missing > 0:
            if missing > len(self.cache.idle):
                return None
            free.extend(self.cache.evict(missing))
        pages = [free.pop() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
        return pages

    def take_one(self) -> int:
        """One page, or -1."""
        if not self.free:
            if not self.cache.idle:
                return -1
            self.free.extend(self.cache.evict(1))
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """One more user of each of these cached or owned pages."""
        refs, idle = self.refs, self.cache.idle
        for page in pages:
            if refs[page] == 0:
                del idle[page]
            refs[page] += 1

    def retire(self, pages: Sequence[int], hashes: Sequence[bytes], valid: int) -> None:
        """One user less of each page of a sequence; the first `valid` pages, whose KV is whole, enter the cache.

        `hashes[i]` is the chain hash of page i, for i < valid at least. Goes from the deepest page up, so that among
        idle pages a child is always older than its parent, and the oldest idle page always a leaf.
        """
        refs, cache = self.refs, self.cache
        if valid:
            cache.insert(hashes, pages, valid)
        for i in range(len(pages) - 1, -1, -1):
            page = pages[i]
            refs[page] -= 1
            if refs[page] == 0:
                if page in cache.hash_of:
                    cache.idle[page] = None
                else:
                    self.free.append(page)
            if i < valid:
                known = cache.page_of[hashes[i]]
                if known != page and refs[known] == 0:
                    del cache.idle[known]
                    cache.idle[known] = None
        self.freed += 1

    def publish(self, pages: Sequence[int], hashes: Sequence[bytes], valid: int) -> None:
        """Enter pages that are still in use into the cache, up to the first that is there as another page already.

        Beyond that one nothing may enter: its user does not hold the ancestor, which could be evicted before it.
        """
        cache = self.cache
        for i in range(valid):
            known = cache.page_of.get(hashes[i])
            if known is None:
                cache.add(hashes[i], pages[i])
            elif known != pages[i]:
                return

    def quarantine(self, pages: Sequence[int]) -> None:
        """Owned, unshared, uncached pages that somebody may still write to."""
        for page in pages:
            assert self.refs[page] == 1
            assert page not in self.cache.hash_of
            self.refs[page] = 0
            self.quarantined[page] = None

    def lift(self, pages: Sequence[int]) -> None:
        """Quarantined pages whose writers are proven quiet become free."""
        for page in pages:
            del self.quarantined[page]
            self.free.append(page)
        self.freed += 1

    def check(self) -> None:
        """Conservation and consistency, O(total). Raises AssertionError naming the page."""
        seen = [0] * self.total
        for page in self.free:
            seen[page] += 1
            assert self.refs[page] == 0, f"page {page} is free and in use"
            assert page not in self.cache.hash_of, f"page {page} is free and in the cache"
        for page in self.cache.idle:
            seen[page] += 1
            assert self.refs[page] == 0, f"page {page} is idle in the cache and in use"
            assert page in self.cache.hash_of, f"page {page} is idle but not in the cache"
        for page in self.quarantined:
            seen[page] += 1
            assert self.refs[page] == 0, f"page {page} is quarantined and in use"
            assert page not in self.cache.hash_of, f"page {page} is quarantined and in the cache"
        for page, refs in enumerate(self.refs):
            assert refs >= 0, f"page {page} has {refs} users"
            assert seen[page] + (refs > 0) == 1, f"page {page} is in {seen[page] + (refs > 0)} states"
        self.cache.check()
