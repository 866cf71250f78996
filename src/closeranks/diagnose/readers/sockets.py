"""`ss -tlnop`: TCP connections that repeat their data without an acknowledgement, and sockets that nobody reads.

Addresses are not kept.
"""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact, Src
from closeranks.diagnose.lines import Line

OFTEN = 4  # times that the same data was sent again: by then several seconds have passed
MANY_UNREAD = 8  # connections of one process with unread data at one moment: one or two are on their way


class Sockets:
    """Rows with data that is not acknowledged and a retransmission timer that has run out several times; sockets that
    listen with as many connections waiting as may; connections whose data their process has not read."""

    NAME = "ss"
    ABOUT = "ss -tlnop: data that is sent again and again, full accept queues, many connections with unread data"
    TOKENS = ("timer:(on,", "LISTEN ", "ESTAB ")
    open = False
    _ROW = re.compile(
        r"^\s*(?:ESTAB|FIN-WAIT-1|CLOSE-WAIT|LAST-ACK|CLOSING)\s+\d+\s+(?P<held>\d+)\s.{0,200}?pid=(?P<pid>\d+)"
        r".{0,400}?timer:\(on,[\w.]+,(?P<times>\d+)\)"
    )
    _QUEUE = re.compile(r"^\s*(?:tcp\s+)?(LISTEN|ESTAB)\s+(\d{1,12})\s+(\d{1,12})\s.{0,400}$")
    _PID = re.compile(r"pid=(\d{1,12})")

    def __init__(self) -> None:
        self.unread: dict[int, tuple[int, Src]] = {}  # process → connections, and where the first was read

    def line(self, line: Line) -> Iterable[Fact]:
        """One connection, or one socket that listens."""
        m = self._ROW.match(line.text[:1000])
        if m and int(m["held"]) and int(m["times"]) >= OFTEN:
            data = {name: int(m[name][:12]) for name in ("pid", "held", "times")}
            yield Event(src=line.src, kind="retransmits", data=data)
        q = self._QUEUE.match(line.text[:600])
        if q is None or not int(q[2]):
            return
        owner = self._PID.search(line.text[:600])
        pid = int(owner[1]) if owner else 0
        if q[1] == "ESTAB":
            n, src = self.unread.get(pid, (0, line.src))
            self.unread[pid] = n + 1, src
        elif int(q[2]) >= int(q[3]) > 0:  # of one that listens: connections that wait, and how many may
            data = {"pid": pid, "waiting": int(q[2]), "limit": int(q[3])}
            yield Event(src=line.src, kind="accept_queue_full", data=data)

    def end(self) -> Iterable[Fact]:
        """Processes that leave many connections unread."""
        for pid, (n, src) in self.unread.items():
            if n >= MANY_UNREAD:
                yield Event(src=src, kind="unread_connections", data={"pid": pid, "n": n})
        self.unread = {}


LINE_READERS = (Sockets,)
