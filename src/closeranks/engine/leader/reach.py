"""Hand-overs that all fail: an engine whose own connections lead nowhere any more ends its epoch and opens new ones.

A network device that goes away, or gets another address, takes the addresses with it under which an engine's ranks are
known and written to. A single failed write is mended by connecting anew (`fences.py`), this is not: every attempt fails
at once, beats go on, and no request moves. Only new processes look for their devices again.

Neither side can tell whose connections are to blame. Prefill is the first to go: nothing is lost by it but what waits
for it. If its successor fares no better, it is decode. An engine goes soon if hand-overs have worked in its epoch, and
only if none did with any peer since the failures began. Where none ever did, what is wrong is more likely to stay, but
may be of the same kind: such an engine waits longer, so long that its restarts are no storm, and then goes, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import Leader
    from .link import Link

TRANSFER = "transfer"
"""Reason of rooms that ended because a write failed or could not be begun."""
FAILURES = 3
"""Hand-overs in a row, and no fewer."""
LIMIT_S = 2.0
"""For how long they have to fail."""
PATIENCE_S = 5.0
"""The same for decode, while the prefill engine is one that could: it has time to go first."""
NEVER_S = {"decode": 30.0, "prefill": 45.0}
"""Where none ever worked: more than half of the supervisor's minute (`STORM_S`); decode serves nobody then."""


class Reach:
    """What hand-overs say of the own connections. Both sides; a hand-over counts where its end is known."""

    def __init__(self, leader: Leader) -> None:
        self.leader = leader
        self.worked_at = 0.0
        """When a hand-over last worked, with whatever peer; 0: never in this epoch."""

    def worked(self, link: Link) -> None:
        link.failures, link.worked = 0, True
        self.worked_at = self.leader.at

    def failed(self, link: Link, detail: str) -> None:
        leader, at = self.leader, self.leader.at
        if not link.failures:
            link.failing_since = at
        link.failures += 1
        role = leader.config.role
        limit = PATIENCE_S if role == "decode" and link.worked else LIMIT_S if self.worked_at else NEVER_S[role]
        if link.failures < FAILURES or at - link.failing_since < limit:
            return
        if self.worked_at < link.failing_since:
            said = (
                f"{link.failures} hand-overs with engine {link.engine} failed in a row, none worked since; the last: "
            )
            leader.fault("unreachable", said + detail)
