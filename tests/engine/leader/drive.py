"""A leader without sockets: stand-in ranks that answer when told to, a clock that tests move."""

from typing import Any

from closeranks.engine.leader.book import Book
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.desk import Desk
from closeranks.engine.leader.events import Config, Fault
from closeranks.protocol import (
    Attach,
    Compile,
    Ended,
    Fingerprint,
    Joined,
    Output,
    RoomId,
    Sampling,
    Step,
    Submit,
    Tokens,
)
from tests.engine.leader.stand_in import StandIn

FINGERPRINT = Fingerprint(1, "weights", "float32", "4 tokens", "tokenizer", "xxh3_64")


class Driven:
    """One engine. `steps` are issued and not yet answered ones."""

    def __init__(self, num_pages: int = 32, context: int = 256, ready: bool = True, **config: Any) -> None:
        settings: dict[str, Any] = {"engine": "e", "role": "both", "epoch": 1, "instance": 7, "page_size": 4, **config}
        self.config = Config(**settings)
        self.leader = Leader(self.config)
        self.desk = Desk(self.leader, Book(self.config.page_size, b"salt"), self, None, False)
        self.ranks = [StandIn(1, rank, num_pages, 4) for rank in range(self.config.tp_size)]
        self.now = 1.0
        self.steps: list[Step] = []
        self.tokens: list[Tokens] = []
        self.ended: dict[RoomId, Ended] = {}
        self.peer: list[tuple[str, Any]] = []
        self.faults: list[Fault] = []
        self.orders: list[Compile] = []
        self.context = context
        if ready:
            self.join()
            self.gateway(Attach("g"))

    def join(self, **other: Any) -> None:
        for rank in self.ranks:
            joined = Joined(1, rank.rank, 1, FINGERPRINT, rank.memory(), len(rank.pool), 4, self.context)
            self.rank(joined)

    def gateway(self, message: Any, name: str = "g") -> None:
        self.desk.from_gateway(name, message, self.now)

    def rank(self, message: Any) -> None:
        self.desk.from_rank(message, self.now)

    def submit(self, room: int, length: int, new: int, generation: int = 1, **more: Any) -> RoomId:
        values: dict[str, Any] = {"stop_ids": [], "deadline_s": 60.0, "peer": "", "alone": False, "grammar": "", **more}
        tokens = [(room * 5 + k * (1 + room % 3)) % 89 for k in range(length)]
        self.gateway(
            Submit(
                RoomId(room, generation),
                f"r{room}",
                tokens,
                length,
                new,
                Sampling(grammar=values["grammar"]),
                values["stop_ids"],
                values["deadline_s"],
                values["peer"],
                values["alone"],
            )
        )
        return RoomId(room, generation)

    def prompt(self, room: int, length: int) -> list[int]:
        return [(room * 5 + k * (1 + room % 3)) % 89 for k in range(length)]

    def said(self, room: RoomId) -> list[int]:
        return [token for x in self.tokens if x.room == room for token in x.tokens]

    def answer(self, steps: int = 1) -> list[Step]:
        """Ranks execute the oldest steps; returns them."""
        done = []
        for _ in range(steps):
            if not self.steps:
                break
            step = self.steps.pop(0)
            done.append(step)
            self.now += 0.01
            for rank in self.ranks:
                self.rank(rank.execute(step))
            self.leader.pool.check()
        return done

    def run(self, most: int = 1000) -> int:
        count = 0
        while self.steps and count < most:
            self.answer()
            count += 1
        return count

    def tick(self, seconds: float, every: float = 0.1) -> None:
        """Time passes; ranks do nothing, gateways only what the test says."""
        end = self.now + seconds
        while self.now < end:
            self.now += every
            self.desk.tick(self.now)

    # wire

    def to_ranks(self, message: Any) -> None:
        if isinstance(message, Step):
            self.steps.append(message)
        elif isinstance(message, Compile):
            self.orders.append(message)

    def to_gateway(self, gateway: str, message: Output) -> None:
        self.tokens += message.tokens
        for ended in message.ended:
            assert ended.room not in self.ended, f"ended twice: {ended}"
            self.ended[ended.room] = ended

    def to_peer(self, link: str, message: Any) -> None:
        self.peer.append((link, message))

    def say_status(self, gateway: str) -> None: ...

    def dial(self, endpoint: str) -> None: ...

    def hang_up(self, endpoint: str) -> None: ...

    def fault(self, fault: Fault) -> None:
        self.faults.append(fault)
