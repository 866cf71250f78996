"""`ss -tnop`: TCP connections that repeat their data without an acknowledgement. Addresses are not kept."""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact
from closeranks.diagnose.lines import Line

OFTEN = 4  # times that the same data was sent again: by then several seconds have passed


class Sockets:
    """Rows with data that is not acknowledged and a retransmission timer that has run out several times."""

    NAME = "ss"
    ABOUT = "ss -tnop: connections whose data is sent again and again"
    TOKENS = ("timer:(on,",)
    open = False
    _ROW = re.compile(
        r"^\s*(?:ESTAB|FIN-WAIT-1|CLOSE-WAIT|LAST-ACK|CLOSING)\s+\d+\s+(?P<held>\d+)\s.{0,200}?pid=(?P<pid>\d+)"
        r".{0,400}?timer:\(on,[\w.]+,(?P<times>\d+)\)"
    )

    def line(self, line: Line) -> Iterable[Fact]:
        """One connection."""
        m = self._ROW.match(line.text[:1000])
        if m and int(m["held"]) and int(m["times"]) >= OFTEN:
            data = {name: int(m[name][:12]) for name in ("pid", "held", "times")}
            yield Event(src=line.src, kind="retransmits", data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (Sockets,)
