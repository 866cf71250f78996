"""Which grammars the sampling rank has, and who uses them. Sans-IO, part of the desk: the core knows numbers only.

A grammar is compiled once, beside the steps; what nobody uses is kept up to a size, oldest use first to go. A failed
one is remembered like any other, so that asking again costs nothing.

    unknown --ask--> pending --Compiled--> ready | failed --unused, and the room is needed--> unknown
                        |--nobody waits for it any more--> unknown
                        | longer than PATIENCE_S: its requests end, and so does the epoch: a compiler cannot be stopped
"""

from collections.abc import Callable

from ...protocol import Compile, Compiled

PATIENCE_S = 60.0
"""Compiling one grammar may take this long; schemas are bounded so that it takes a few seconds at most."""
KEPT_BYTES = 256 * 2**20
"""Of compiled grammars that nobody uses."""
GAP_S = 1.0
"""A longer gap between two ticks means that this process did not run: no compiler is blamed for it."""


class Grammar:
    """One grammar of this epoch."""

    __slots__ = ("error", "number", "pending", "size", "text", "users")

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.pending = True
        self.error = ""
        self.size = len(text)
        self.users = 0
        """Entries of the book that were submitted with it."""


class Grammars:
    """All grammars of an epoch. `send` takes what the ranks must be told."""

    def __init__(self, epoch: int, send: Callable[[Compile], None]) -> None:
        self.epoch = epoch
        self.send = send
        self.known: dict[str, Grammar] = {}
        """By text, least recently used first."""
        self.numbers: dict[int, Grammar] = {}
        self.last = 0
        self.since = self.seen = 0.0
        """When the oldest pending one had its turn; the last tick."""

    def ask(self, text: str, now: float) -> Grammar:
        """The grammar of a request, sent to be compiled if it is new."""
        grammar = self.known.pop(text, None)
        if grammar is None:
            if not any(x.pending for x in self.known.values()):
                self.since = now
            self.last += 1
            grammar = self.numbers[self.last] = Grammar(self.last, text)
            self.send(Compile(self.epoch, grammar.number, text))
        self.known[text] = grammar
        return grammar

    def leave(self, grammar: Grammar) -> None:
        """An entry of the book that had it is gone."""
        grammar.users -= 1
        if grammar.pending and not grammar.users:
            self.drop([grammar])
        self.trim()

    def compiled(self, message: Compiled, now: float) -> None:
        """The sampling rank's answer."""
        grammar = self.numbers.get(message.number)
        self.since = now  # also after one that nobody waits for any more: the next has its turn
        if grammar is not None and grammar.pending:
            grammar.pending, grammar.error = False, message.error
            grammar.size = max(message.size, len(grammar.text))
            self.trim()

    def overdue(self, now: float) -> Grammar | None:
        """The grammar that is being compiled for too long."""
        if now - self.seen > GAP_S:
            self.since += now - self.seen
        self.seen = now
        if now - self.since <= PATIENCE_S:
            return None
        return next((x for x in self.numbers.values() if x.pending), None)

    def trim(self) -> None:
        """Give up what nobody uses beyond `KEPT_BYTES`."""
        idle = [x for x in self.known.values() if not x.users and not x.pending]
        total = sum(x.size for x in idle)
        dropped = []
        for grammar in idle:
            if total <= KEPT_BYTES:
                break
            total -= grammar.size
            dropped.append(grammar)
        if dropped:
            self.drop(dropped)

    def drop(self, dropped: list[Grammar]) -> None:
        """The ranks need not have them."""
        for grammar in dropped:
            del self.known[grammar.text], self.numbers[grammar.number]
        self.send(Compile(self.epoch, 0, "", [x.number for x in dropped]))
