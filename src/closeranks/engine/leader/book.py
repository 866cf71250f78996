"""The shell's book: token ids, page hashes, log-probabilities and checksums, everything the core must not see."""

import hashlib
from array import array
from collections.abc import Sequence

from ...protocol import Arrived, Memory, Report, RoomId, Sampling, Sent, Submit, TopLogprobs
from .events import ArrivedNote, Plan, Reported
from .grammars import Grammar


def page_hashes(tokens: Sequence[int], page_size: int, salt: bytes, before: bytes = b"") -> list[bytes]:
    """Chain hash (16 bytes) of every whole page: h[i] = blake2b(h[i-1] + tokens of page i as u32, key=salt)."""
    chain, found = before, []
    data = array("I", tokens).tobytes()
    width = page_size * 4
    for start in range(0, len(data) - width + 1, width):
        chain = hashlib.blake2b(chain + data[start : start + width], digest_size=16, key=salt).digest()
        found.append(chain)
    return found


class Entry:
    """One room's tokens."""

    __slots__ = (
        "chain",
        "gateway",
        "grammar",
        "index",
        "prompt_length",
        "room",
        "sampling",
        "stops",
        "sums",
        "tokens",
        "top",
    )

    def __init__(self, submit: Submit, gateway: str, chain: bytes) -> None:
        self.room = submit.room
        self.gateway = gateway
        self.tokens = list(submit.tokens)
        self.prompt_length = submit.prompt_length
        self.sampling: Sampling = submit.sampling
        self.grammar: Grammar | None = None
        self.stops = frozenset(submit.stop_ids)
        self.chain = chain
        """Chain hash of the last whole page of `tokens`."""
        self.index = len(submit.tokens)
        """Position of the next token that leaves."""
        self.sums: dict[int, list[int]] = {}
        """Decode's page -> checksum of each share, by share number (prefill: settled ones; decode: as prefill said)."""
        self.top: TopLogprobs | None = None
        """Log-probabilities of the first token."""


class Open:
    """An issued step's sampling rows and what rank 0 said of them."""

    __slots__ = ("entries", "logprobs", "tokens")

    def __init__(self, entries: list[Entry | None]) -> None:
        self.entries = entries
        self.tokens: list[int] = []
        self.logprobs: list[TopLogprobs | None] = []


class Book:
    """All rooms' tokens at this leader."""

    def __init__(self, page_size: int, salt: bytes) -> None:
        self.page_size = page_size
        self.salt = salt
        self.entries: dict[RoomId, Entry] = {}
        self.open: dict[int, Open] = {}
        self.transfers: dict[int, tuple[RoomId, list[int]]] = {}
        """Transfer -> room and the peer's pages, in the order of its `Send`."""
        self.shares: list[list[int]] = []
        """Share numbers of each rank."""

    def join(self, memories: Sequence[Memory]) -> None:
        self.shares = [list(m.shares) for m in memories]

    @property
    def share_count(self) -> int:
        return sum(len(shares) for shares in self.shares)

    def submit(self, message: Submit, gateway: str) -> list[bytes]:
        """Enter a room; returns the hashes of its pages."""
        hashes = page_hashes(message.tokens, self.page_size, self.salt)
        if message.room not in self.entries:
            self.entries[message.room] = Entry(message, gateway, hashes[-1] if hashes else b"")
        return hashes

    def uses(self, room: RoomId, grammar: Grammar) -> None:
        """The room's rows begin with this grammar."""
        self.entries[room].grammar = grammar
        grammar.users += 1

    def issued(self, plan: Plan) -> None:
        """A step goes out: remember whose tokens its report will bring."""
        if plan.samplers:
            entries = self.entries
            self.open[plan.n] = Open([entries.get(room) for room in plan.samplers])
        for send in plan.sends:
            self.transfers[send.transfer] = (send.room, [target for _, target in send.pages])

    def append(self, entry: Entry, token: int) -> bytes:
        """One more token; returns the hash of the page that it completed, or b""."""
        tokens = entry.tokens
        tokens.append(token)
        size = self.page_size
        if len(tokens) % size:
            return b""
        entry.chain = page_hashes(tokens[-size:], size, self.salt, entry.chain)[0]
        return entry.chain

    def report(self, message: Report, at: float) -> Reported:
        """Enter rank 0's tokens; returns the event for the core."""
        stops: list[int] = []
        filled: list[tuple[int, bytes]] = []
        flaw = ""
        step = self.open.get(message.n)
        expected = len(step.entries) if step is not None else 0
        if len(message.tokens) != expected:
            flaw = f"{len(message.tokens)} tokens for {expected} sampling rows of step {message.n}"
        elif message.logprobs and len(message.logprobs) != expected:
            flaw = f"{len(message.logprobs)} log-probabilities for {expected} sampling rows of step {message.n}"
        elif step is not None and not step.tokens:
            step.tokens, step.logprobs = message.tokens, message.logprobs
            size = self.page_size
            number = -1
            for token, entry in zip(message.tokens, step.entries):
                number += 1
                if entry is None:
                    continue
                tokens = entry.tokens
                tokens.append(token)
                if not len(tokens) % size:
                    entry.chain = page_hashes(tokens[-size:], size, self.salt, entry.chain)[0]
                    filled.append((number, entry.chain))
                if token in entry.stops:
                    stops.append(number)
        return Reported(at, message.epoch, message.rank, message.n, message.digest, stops, filled, flaw)

    def sent(self, message: Sent) -> str:
        """Enter a rank's checksums of a transfer. Returns what is wrong with them, or an empty string."""
        known = self.transfers.get(message.transfer)
        if known is None or message.error:
            return message.error
        room, pages = known
        shares = self.shares[message.rank]
        if len(message.sums) != len(pages) or any(len(row) != len(shares) for row in message.sums):
            return f"checksums of {len(message.sums)} pages where {len(pages)} with {len(shares)} shares were sent"
        entry = self.entries.get(room)
        if entry is not None:
            for page, sums in zip(pages, message.sums):
                row = entry.sums.get(page)
                if row is None:
                    row = entry.sums[page] = [0] * self.share_count
                for share, value in zip(shares, sums):
                    row[share] = value
        return ""

    def settled(self, transfer: int) -> None:
        self.transfers.pop(transfer, None)

    def arrival(self, room: RoomId, instance: int, pages: Sequence[int], cached_tokens: int) -> Arrived:
        """Prefill: the message for decode, sums in the order of the granted `pages`."""
        entry = self.entries[room]
        sums = [entry.sums[page] for page in pages]
        return Arrived(room, instance, entry.tokens[-1], entry.top, sums, cached_tokens)

    def arrived(self, message: Arrived, pages: Sequence[int] | None) -> ArrivedNote:
        """Decode: enter first token and sums; `pages`: what was granted (None: the room is not waiting for it)."""
        entry = self.entries.get(message.room)
        note = ArrivedNote(message.room, message.instance, False, message.cached_tokens)
        if entry is None or pages is None:
            return note
        count = self.share_count
        if len(message.sums) != len(pages) or any(len(row) != count for row in message.sums):
            flaw = f"checksums of {len(message.sums)} pages where {len(pages)} with {count} shares were granted"
            return ArrivedNote(message.room, message.instance, False, message.cached_tokens, b"", flaw)
        entry.sums = dict(zip(pages, message.sums))
        entry.top = message.logprobs
        chain = self.append(entry, message.token)
        return ArrivedNote(message.room, message.instance, message.token in entry.stops, message.cached_tokens, chain)
