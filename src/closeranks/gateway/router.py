"""Which engines a request goes to. Sans-IO: fed with `Status` and clock readings, asked for a `Pair`.

An engine is usable while its last Status is fresh, says `ready`, and came after the last reason to doubt it (a fault,
a lost link). Among usable pairs the least loaded one wins, unless the one that last served the same prompt head is
nearly as free: its prefix cache is worth a few places in the queue.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from closeranks.protocol import Status

HEAD_TOKENS = 64
"""Prompts that agree in this many tokens count as sharing a prefix."""
HEADS = 4096
"""Prompt heads remembered."""
AFFINITY = 4
"""Open requests by which the engine with the prefix may be busier than the freest one."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Where one attempt runs. `prefill == decode`: one engine does both."""

    prefill: str
    decode: str

    @property
    def endpoints(self) -> tuple[str, ...]:
        return (self.prefill,) if self.prefill == self.decode else (self.prefill, self.decode)

    def peer(self, endpoint: str) -> str:
        """The other endpoint, as `Submit.peer` has it (empty: none)."""
        if self.prefill == self.decode:
            return ""
        return self.decode if endpoint == self.prefill else self.prefill


@dataclass(slots=True)
class Engine:
    """What is known of one leader."""

    endpoint: str
    role: str
    status: Status | None = None
    heard: float = -math.inf
    """When the last Status came."""
    trusted: bool = False
    """No Status yet, or a fault since the last one: False."""
    open: int = 0
    """Attempts of this gateway that run there."""
    work: tuple[int, ...] = ()
    moved: float = -math.inf
    """When its work counters last changed."""


@dataclass(slots=True)
class Router:
    """The engines of a deployment and the choice among them. `silence_s`: age at which a Status stops counting."""

    prefill: Sequence[str]
    decode: Sequence[str]
    both: Sequence[str]
    silence_s: float
    tokenizer: str = ""
    """Hash of the gateway's own tokenizer: engines with another one would answer it garbage. Empty: not known."""
    engines: dict[str, Engine] = field(default_factory=dict)
    draining: bool = False
    known: list[Pair] = field(default_factory=list)
    _heads: OrderedDict[int, Pair] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        for role, endpoints in (("prefill", self.prefill), ("decode", self.decode), ("both", self.both)):
            for endpoint in endpoints:
                self.engines[endpoint] = Engine(endpoint, role)
        self.known = [Pair(p, d) for p in self.prefill for d in self.decode] + [Pair(b, b) for b in self.both]

    def on_status(self, endpoint: str, status: Status, now: float) -> bool:
        """Take a Status in. True: the engine is another instance than before, what ran there is gone."""
        engine = self.engines[endpoint]
        reborn = engine.status is not None and engine.status.instance != status.instance
        counters = status.counters
        work = tuple(counters.get(k, 0) for k in ("prefill_tokens", "decode_tokens", "transfers", "transfer_bytes"))
        if work != engine.work or reborn:
            engine.work = work
            engine.moved = now
        engine.status = status
        engine.heard = now
        engine.trusted = True
        return reborn

    def doubt(self, endpoint: str) -> None:
        """Do not use the engine before its next Status."""
        self.engines[endpoint].trusted = False

    def is_silent(self, endpoint: str, now: float) -> bool:
        return now - self.engines[endpoint].heard > self.silence_s

    def usable(self, endpoint: str, now: float) -> bool:
        engine = self.engines[endpoint]
        return (
            engine.trusted
            and engine.status is not None
            and engine.status.state == "ready"
            and now - engine.heard <= self.silence_s
        )

    def pairs(self, now: float) -> list[Pair]:
        """The pairs that can take a request now."""
        usable = {endpoint for endpoint in self.engines if self.usable(endpoint, now)}
        return [pair for pair in self.known if pair.prefill in usable and pair.decode in usable and self._match(pair)]

    def mismatch(self) -> str:
        """Why no pair matches, with both values; empty if one does or nothing is known."""
        said = ""
        for pair in self.known:
            if self._match(pair):
                return ""
            a, b = self.engines[pair.prefill].status, self.engines[pair.decode].status
            if a is not None and b is not None:
                said = self._apart(a, b)
        return said

    def choose(self, tokens: Sequence[int], now: float, avoid: Pair | None = None) -> Pair | None:
        """A pair for a request with this prompt, or None if no pair is usable. `avoid`: only if there is no other."""
        pairs = self.pairs(now)
        if avoid in pairs and len(pairs) > 1:
            pairs.remove(avoid)
        if not pairs:
            return None
        head = hash(tuple(tokens[:HEAD_TOKENS]))
        best = min(pairs, key=self._load)
        known = self._heads.get(head)
        if known in pairs and known is not None and self._load(known) <= self._load(best) + AFFINITY:
            best = known
        self._heads[head] = best
        self._heads.move_to_end(head)
        if len(self._heads) > HEADS:
            self._heads.popitem(last=False)
        return best

    def limit(self) -> int:
        """Longest prompt + output that every engine heard of can hold; 0: none has been heard of."""
        found = []
        for engine in self.engines.values():
            status = engine.status
            if status is not None and status.context_length > 0:
                found.append(status.context_length)
                if status.max_request_tokens > 0:
                    found.append(status.max_request_tokens)
        return min(found, default=0)

    def _match(self, pair: Pair) -> bool:
        a, b = self.engines[pair.prefill].status, self.engines[pair.decode].status
        if a is None or b is None or a.fingerprint is None or b.fingerprint is None:
            return True
        return a.fingerprint == b.fingerprint and self._reads(a)

    def _apart(self, a: Status, b: Status) -> str:
        """What keeps an engine from the gateway, or two from one another."""
        for engine in (a, b):
            if not self._reads(engine):
                said = f"the gateway's tokenizer {self.tokenizer} is not that of {engine.engine}, {engine.fingerprint}"
                return f"{said}: give the gateway the engines' --model-path"
        return f"{a.engine} and {b.engine} do not match: {a.fingerprint} against {b.fingerprint}"

    def _reads(self, status: Status) -> bool:
        """Whether the engine's tokens are the gateway's."""
        found = status.fingerprint
        return not self.tokenizer or found is None or found.tokenizer == self.tokenizer

    def _load(self, pair: Pair) -> float:
        """Open requests, our own and others'; between equals the emptier pool."""
        total = 0.0
        for endpoint in pair.endpoints:
            engine = self.engines[endpoint]
            assert engine.status is not None
            total += max(engine.open, engine.status.rooms_open)
            if engine.status.pages_total:
                total += (engine.status.pages_owned + engine.status.pages_quarantined) / engine.status.pages_total
        return total
