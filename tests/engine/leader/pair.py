"""A prefill and a decode leader with stand-in ranks, and what becomes of the writes between them."""

from typing import Any

from closeranks.protocol import Attach, Dropped, RoomId, Sent, Step
from tests.engine.leader.drive import Driven

RANKS = 2
ATTACH = Attach("g")


class Pair:
    """A prefill and a decode leader; `play` delivers everything that is under way. Writes end as `outcome` says."""

    def __init__(self, **config: Any) -> None:
        more = {"tp_size": RANKS, "radix": False, "overlap": False, **config}
        self.prefill = Driven(engine="p", role="prefill", instance=7, **more)
        self.decode = Driven(engine="d", role="decode", instance=8, **more)
        self.engines = (self.prefill, self.decode)
        self.fails: set[tuple[int, int]] = set()
        """(rank, transfer) that fail, unsure."""
        self.holds: set[tuple[int, int]] = set()
        """(rank, transfer) that do not end."""
        self.refused = False
        """Whether every write fails before it begins."""
        self.silent: set[int] = set()
        """Ranks whose checks do not end."""
        self.closes = {"p": True, "d": True}
        """Whether an engine's ranks close connections when they are told to."""
        self.dropped: list[tuple[str, int]] = []

    def submit(self, room: int, length: int = 9, new: int = 3) -> RoomId:
        for engine, peer in ((self.decode, "to p"), (self.prefill, "to d")):
            engine.submit(room, length, new, peer=peer)
        return RoomId(room, 1)

    def play(self, seconds: float = 2.0) -> None:
        for _ in range(int(seconds / 0.1)):
            for _ in range(20):
                if not self.turn():
                    break
            for engine in self.engines:
                engine.now += 0.1
                engine.gateway(ATTACH)
                engine.desk.tick(engine.now)

    def turn(self) -> bool:
        """Deliver what is under way; whether there was anything."""
        busy = False
        for engine, other, link in ((self.prefill, self.decode, "to p"), (self.decode, self.prefill, "peer:d")):
            said, engine.peer = engine.peer, []
            for _, message in said:
                other.desk.from_peer(link, message, other.now)
            busy = busy or bool(said)
        for engine, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            for step in engine.answer(len(engine.steps)):
                busy = True
                self.transfers(engine, other, step)
        return busy

    def transfers(self, engine: Driven, other: Driven, step: Step) -> None:
        for rank in engine.ranks:
            for send in step.sends:
                key = (rank.rank, send.transfer)
                if key in self.holds:
                    continue
                if self.refused:
                    engine.rank(Sent(1, rank.rank, send.transfer, "nobody is there", [], False))
                    continue
                sent = rank.send(send, other.ranks[rank.rank])
                engine.rank(Sent(1, rank.rank, send.transfer, "broken", [], True) if key in self.fails else sent)
            for check in step.checks:
                if rank.rank not in self.silent:
                    engine.rank(rank.check(check.room, check.pages, check.sums))
            for instance in step.drop:
                self.dropped.append((engine.config.engine, rank.rank))
                if self.closes[engine.config.engine]:
                    engine.rank(Dropped(1, rank.rank, instance))

    def quarantined(self) -> int:
        return len(self.decode.leader.pool.quarantined)
