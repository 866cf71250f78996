"""Open steps: what was issued and not yet reported by all ranks, agreement of digests, and the deadline on progress.

    issue(n) --> open --report of each rank--> all in, digests equal --> agreed (in order) --> rows are settled
                   |                              digests differ --> fault `digest`
                   +-- a rank makes no progress for `step_deadline_s` --> fault `stuck`

At most `depth` steps are open (overlap: 2). The deadline is on progress, not on duration: any report or growing tick
count of a rank pushes that rank's deadline out. While this process itself slept, nobody could have been heard, so a
gap in its own events is credited to all ranks (`forgive`).
"""

from collections import deque

from ...protocol import Row
from .rooms import Room


class OpenStep:
    """One issued step: its rows with their rooms, and the digests reported so far."""

    __slots__ = ("digest", "filled", "issued_at", "mismatch", "missing", "n", "rooms", "rows", "stops")

    def __init__(self, n: int, rows: list[Row], rooms: list[Room], missing: int, at: float) -> None:
        self.n = n
        self.rows = rows
        self.rooms = rooms
        self.missing = missing
        """Bit per rank that has not reported."""
        self.digest: int | None = None
        self.mismatch = ""
        self.stops: list[int] = []
        self.filled: list[tuple[int, bytes]] = []
        self.issued_at = at


class Steps:
    """The one step sequence of an epoch."""

    def __init__(self, tp_size: int, depth: int, deadline_s: float) -> None:
        self.tp_size = tp_size
        self.depth = depth
        self.deadline_s = deadline_s
        self.open: deque[OpenStep] = deque()
        self.last = 0
        """Number of the last issued step."""
        self.issued_at = 0.0
        self.agreed_at = 0.0
        self.expected = [1] * tp_size
        """Next step that each rank has to report."""
        self.ticks = [0] * tp_size
        self.heard_at = [0.0] * tp_size
        """When each rank last showed progress on an open step."""
        self.all_ranks = (1 << tp_size) - 1

    def issue(self, rows: list[Row], rooms: list[Room], at: float) -> OpenStep:
        self.last += 1
        step = OpenStep(self.last, rows, rooms, self.all_ranks, at)
        for rank in range(self.tp_size):
            if self.expected[rank] == self.last:  # it was idle: its clock starts now
                self.heard_at[rank] = at
        self.open.append(step)
        self.issued_at = at
        return step

    def report(self, rank: int, n: int, digest: int, at: float) -> OpenStep | str:
        """Take a rank's report. Returns the step, or what is wrong with the report."""
        if n != self.expected[rank] or n > self.last:
            return f"rank {rank} reported step {n} where {self.expected[rank]} was due (last issued {self.last})"
        self.expected[rank] = n + 1
        self.heard_at[rank] = at
        step = self.open[n - self.open[0].n]
        step.missing &= ~(1 << rank)
        if step.digest is None:
            step.digest = digest
        elif step.digest != digest:
            step.mismatch = f"step {n}: rank {rank} has digest {digest:016x}, another {step.digest:016x}"
        return step

    def progress(self, rank: int, ticks: int, at: float) -> None:
        if ticks > self.ticks[rank]:
            self.ticks[rank] = ticks
            self.heard_at[rank] = at

    def forgive(self, gap: float) -> None:
        self.heard_at = [heard + gap for heard in self.heard_at]

    def overdue(self, at: float) -> int:
        """The rank to blame when one that owes a report showed no progress beyond the deadline; -1: all is well."""
        if not self.open:
            return -1
        missing = self.open[0].missing
        for rank in range(self.tp_size):
            if missing >> rank & 1 and at - self.heard_at[rank] > self.deadline_s:
                return self.slowest()
        return -1

    def slowest(self) -> int:
        """The rank that the oldest open step waits for: fewest steps, then fewest ticks, then silent longest."""
        if not self.open:
            return -1
        missing = self.open[0].missing
        late = [rank for rank in range(self.tp_size) if missing >> rank & 1]
        return min(late, key=lambda rank: (self.expected[rank], self.ticks[rank], self.heard_at[rank]), default=-1)
