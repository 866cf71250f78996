"""Stand-in ranks: execute steps on a model of KV pages that notices any use of a page with other content.

The "KV" of a position is a chain hash of all tokens up to it, so a row that reads a wrong, stale or half-written page
is caught where it happens, and the next token is a pure function of the token list: outputs can be compared with
`continuation`, whatever batching, caching, hand-over or retraction took place.
"""

from closeranks.protocol import Checked, Memory, Report, Send, Sent, Step

MASK = (1 << 61) - 1
VOCABULARY = 97


def chain(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + 0x9E3779B97F4A7C15) & MASK


def next_token(kv: int) -> int:
    return (kv >> 17) % VOCABULARY


def continuation(tokens: list[int], count: int) -> list[int]:
    """The only right output."""
    kv = 0
    for token in tokens:
        kv = chain(kv, token)
    found = []
    for _ in range(count):
        token = next_token(kv)
        found.append(token)
        kv = chain(kv, token)
    return found


class WrongContent(AssertionError):
    """A row read a page that does not hold what it must."""


class Slot:
    __slots__ = ("kvs", "pages", "tokens")

    def __init__(self, tokens: list[int], pages: list[int]) -> None:
        self.tokens = tokens
        self.pages = pages
        self.kvs: list[int] = []  # chain of the tokens, extended as needed
        for token in tokens:
            self.kvs.append(chain(self.kvs[-1] if self.kvs else 0, token))


class StandIn:
    """One rank: pool content, slots, digest. `execute` returns the report; sends are for the caller to carry out."""

    def __init__(self, epoch: int, rank: int, num_pages: int, page_size: int) -> None:
        self.epoch, self.rank, self.page_size = epoch, rank, page_size
        self.pool: list[list[int]] = [[-1] * page_size for _ in range(num_pages)]
        self.slots: dict[int, Slot] = {}
        self.n = 0
        self.digest = 0

    def execute(self, step: Step) -> Report:
        if step.n != self.n + 1 or step.epoch != self.epoch:
            raise WrongContent(f"step {step.epoch}.{step.n} after {self.epoch}.{self.n}")
        self.n = step.n
        size, tokens = self.page_size, []
        for row in step.rows:
            if row.begin is not None:
                self.slots[row.slot] = Slot(list(row.begin.tokens), list(row.begin.pages))
            slot = self.slots[row.slot]
            slot.pages += row.pages
            end = row.start + row.count
            if row.count < 1:
                raise WrongContent(f"step {step.n} slot {row.slot}: a row of {row.count} positions")
            if end > len(slot.kvs):
                raise WrongContent(f"step {step.n} slot {row.slot}: computes to {end} of {len(slot.kvs)} known tokens")
            if (end + size - 1) // size > len(slot.pages):
                raise WrongContent(f"step {step.n} slot {row.slot}: {len(slot.pages)} pages for {end} positions")
            for place in [*range(size - 1, row.start, size), row.start - 1]:
                if 0 <= place < row.start:
                    page = slot.pages[place // size]
                    if self.pool[page][place % size] != slot.kvs[place]:
                        raise WrongContent(
                            f"rank {self.rank} step {step.n} slot {row.slot}: position {place} in page {page}"
                        )
            for place in range(row.start, end):
                self.pool[slot.pages[place // size]][place % size] = slot.kvs[place]
            if row.sample:
                token = next_token(slot.kvs[end - 1])
                tokens.append(token)
                slot.tokens.append(token)
                slot.kvs.append(chain(slot.kvs[-1], token))
            self.digest = hash((self.digest, row.slot, row.start, row.count, row.sample, tuple(slot.pages))) & MASK
        self.digest = hash((self.digest, step.n, *tokens)) & MASK
        return Report(self.epoch, self.rank, step.n, self.digest, tokens if self.rank == 0 else [])

    def sums(self, pages: list[int]) -> list[list[int]]:
        return [[hash(tuple(self.pool[page])) & MASK] for page in pages]

    def memory(self) -> Memory:
        return Memory("shm", self.rank, [self.rank], len(self.pool), 64, b"")

    def send(self, send: Send, target: "StandIn", error: str = "") -> Sent:
        """Write the pages into the peer's rank of the same number."""
        sums = self.sums([source for source, _ in send.pages])
        for source, page in send.pages:
            target.pool[page][:] = self.pool[source]
        return Sent(self.epoch, self.rank, send.transfer, error, [] if error else sums)

    def check(self, room: object, pages: list[int], sums: list[list[int]]) -> Checked:
        bad = [
            (page, self.rank) for page, row in zip(pages, sums) if hash(tuple(self.pool[page])) & MASK != row[self.rank]
        ]
        return Checked(self.epoch, self.rank, room, bad)  # type: ignore[arg-type]
