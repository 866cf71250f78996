"""Pool and prefix cache under any sequence of calls, against a model that only knows whole sequences."""

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from closeranks.engine.leader.pages import Pool


def chains(pages: list[int]) -> list[bytes]:
    found, before = [], b""
    for page in pages:
        before = hashlib.blake2b(before + bytes([page]), digest_size=8).digest()
        found.append(before)
    return found


class Sequence:
    """A request as the pool sees it."""

    def __init__(self, hashes: list[bytes], pages: list[int]) -> None:
        self.hashes, self.pages = hashes, pages


class Machine(RuleBasedStateMachine):
    """Requests with prefixes from a small alphabet come, publish, end, are quarantined; pages are few."""

    users = Bundle("users")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(24)
        self.parents: dict[bytes, bytes] = {}
        self.live: list[Sequence] = []

    @rule(target=users, contents=st.lists(st.integers(0, 2), min_size=1, max_size=8), extra=st.integers(0, 2))
    def begin(self, contents: list[int], extra: int) -> Sequence:
        hashes = chains(contents)
        for before, after in zip([b"", *hashes], hashes):
            self.parents[after] = before
        found = self.pool.cache.match(hashes, len(hashes))
        for page, chain in zip(found, hashes):
            assert self.pool.cache.hash_of[page] == chain
        self.pool.share(found)
        fresh = self.pool.take(len(hashes) - len(found) + extra)
        if fresh is None:
            self.pool.retire(found, hashes, len(found))
            return Sequence([], [])
        sequence = Sequence(hashes, found + fresh)
        self.live.append(sequence)
        return sequence

    @rule(sequence=users, valid=st.integers(0, 8))
    def publish(self, sequence: Sequence, valid: int) -> None:
        if sequence in self.live:
            self.pool.publish(sequence.pages, sequence.hashes, min(valid, len(sequence.hashes)))

    @rule(sequence=consumes(users), valid=st.integers(0, 8))
    def end(self, sequence: Sequence, valid: int) -> None:
        if sequence not in self.live:
            return
        self.live.remove(sequence)
        held = sum(page in self.pool.cache.hash_of for page in sequence.pages)
        valid = max(min(valid, len(sequence.hashes)), held)
        self.pool.retire(sequence.pages, sequence.hashes, min(valid, len(sequence.hashes)))

    @rule(target=quarantined, count=st.integers(1, 4))
    def quarantine(self, count: int) -> list[int]:
        pages = self.pool.take(count) or []
        self.pool.quarantine(pages)
        return pages

    @rule(pages=consumes(quarantined))
    def lift(self, pages: list[int]) -> None:
        self.pool.lift(pages)

    @rule()
    def take_one_and_give_back(self) -> None:
        available = self.pool.available
        page = self.pool.take_one()
        assert (page >= 0) == (available > 0)
        if page >= 0:
            self.pool.retire([page], [], 0)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        users = [0] * self.pool.total
        for sequence in self.live:
            for page in sequence.pages:
                users[page] += 1
        assert users == self.pool.refs
        assert self.pool.owned == sum(count > 0 for count in users)

    @invariant()
    def ancestors_of_cached_pages_are_cached(self) -> None:
        for chain in self.pool.cache.page_of:
            parent = self.parents[chain]
            assert not parent or parent in self.pool.cache.page_of

    @invariant()
    def the_oldest_idle_page_is_a_leaf(self) -> None:
        cache = self.pool.cache
        order = {cache.hash_of[page]: place for place, page in enumerate(cache.idle)}
        for chain, place in order.items():
            parent = self.parents[chain]
            if parent in order:
                assert place < order[parent]


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Machine.TestCase


def test_least_recently_used_goes_first() -> None:
    pool = Pool(3)
    for content in (1, 2, 3):
        pages = pool.take(1)
        assert pages is not None
        pool.retire(pages, chains([content]), 1)
    again = pool.cache.match(chains([1]), 1)
    pool.share(again)
    pool.retire(again, chains([1]), 1)
    assert pool.take(1) is not None
    assert pool.cache.match(chains([2]), 1) == []
    assert pool.cache.match(chains([1]), 1) == again


def test_taking_too_many_changes_nothing() -> None:
    pool = Pool(2)
    assert pool.take(3) is None
    assert (len(pool.free), pool.owned) == (2, 0)


def test_shared_pages_cannot_be_quarantined() -> None:
    pool = Pool(2)
    pages = pool.take(1)
    assert pages is not None
    pool.publish(pages, chains([1]), 1)
    with pytest.raises(AssertionError):
        pool.quarantine(pages)
