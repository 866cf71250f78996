"""TCP connections of processes on which something waits, as `ss -tnop` shows them but read from /proc: no ss is needed.

Shown are those whose data is not acknowledged or not read, or that are still being made, most often repeated first. A
blocked link shows as `timer:(on,…,N)`: the same data was sent again N times. Addresses are replaced by names, for among
them are those of clients; ports stay.
"""

import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

ROWS = 300
LINES = 100_000
"""Rows of a table of the kernel that are read: it holds the connections of the whole machine."""
_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {"01": "ESTAB", "02": "SYN-SENT", "03": "SYN-RECV", "04": "FIN-WAIT-1", "05": "FIN-WAIT-2",
           "08": "CLOSE-WAIT", "09": "LAST-ACK", "0B": "CLOSING"}  # fmt: skip
_TIMERS = {"01": "on", "02": "keepalive", "03": "timewait", "04": "persist"}


@dataclass
class Names:
    """Addresses → `ip-1`, `ip-2`, …; the same one keeps its name. Loopback stays: it is nobody's."""

    given: dict[str, str] = field(default_factory=dict)

    def of(self, raw: str) -> str:
        """`ADDRESS:PORT` of the kernel's table (hexadecimal words in the machine's order) as name and port."""
        words, _, port = raw.partition(":")
        parts = (int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
        address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = ipaddress.ip_address(b"".join(parts))
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        assert address is not None
        name = str(address)
        if not address.is_loopback:
            name = self.given.setdefault(name, f"ip-{len(self.given) + 1}")
        return f"{name}:{int(port, 16)}"


def rows(table: Iterable[str], owners: dict[str, list[str]], names: Names) -> Iterator[tuple[int, str]]:
    """(times repeated, row as of `ss -tnop`) of the lines of a `/proc/PID/net/tcp` without its head. `owners`: inode →
    `"NAME",pid=N,fd=N` of each process that holds the socket; connections of others are left out."""
    for line in table:
        cells = line.split()
        if len(cells) < 10 or cells[9] not in owners or cells[3] not in _STATES:
            continue
        try:
            sent, unread = (int(number, 16) for number in cells[4].split(":"))
            timer, when = cells[5].split(":")
            again = int(cells[6], 16)
            ends = f"{names.of(cells[1]):>21} {names.of(cells[2]):>21}"
            left = int(when, 16) / _TICKS
        except ValueError:  # not a table that we know
            continue
        if not (sent or unread or again or cells[3] == "02"):
            continue
        users = ",".join(f"({who})" for who in owners[cells[9]][:4])
        shown = f"{_STATES[cells[3]]:10} {unread:<6} {sent:<6} {ends} users:({users})"
        if timer in _TIMERS:
            shown += f" timer:({_TIMERS[timer]},{left:.3f}sec,{again})"
        yield again, shown


def waiting(pids: Iterable[int], names: Names) -> str:
    """The connections of these processes, as text. Blocking; what cannot be read is said."""
    owners: dict[int, dict[str, list[str]]] = {}
    reader: dict[int, int] = {}
    notes = []
    for pid in pids:
        try:
            space = os.stat(f"/proc/{pid}/ns/net").st_ino
            for inode, who in _sockets(pid):
                owners.setdefault(space, {}).setdefault(inode, []).append(who)
        except OSError as error:
            notes.append(f"connections of {pid} are unreadable: {error.strerror}")
            continue
        reader.setdefault(space, pid)
    found: list[tuple[int, str]] = []
    for space, pid in reader.items():
        for name in ("tcp", "tcp6"):
            try:
                with open(f"/proc/{pid}/net/{name}") as file:
                    found += rows(islice(file, 1, LINES), owners.get(space, {}), names)
                    if next(file, ""):
                        notes.append(f"only the first {LINES} connections of the machine were read")
            except OSError as error:  # no IPv6 here, or the process ended meanwhile
                notes.append(f"/proc/{pid}/net/{name} is unreadable: {error.strerror}")
    found.sort(key=lambda row: -row[0])
    if len(found) > ROWS:
        notes.append(f"{len(found) - ROWS} more of them are left out")
    head = f"{'State':10} {'Recv-Q':6} {'Send-Q':6} {'Local':>21} {'Peer':>21} Process"
    return "\n".join([head, *(row for _, row in found[:ROWS]), *notes]) + "\n"


def _sockets(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, who holds it by which descriptor) of a process. Raises OSError when it may not be looked at."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            name = re.sub(r"[^\w:.@-]", "_", file.read().strip())
    except OSError:  # it ended: the list below says so
        name = "?"
    for fd, inode in held(pid):
        yield inode, f'"{name}",pid={pid},fd={fd}'


def held(pid: int) -> Iterator[tuple[str, str]]:
    """(descriptor, inode) of each socket of a process. Raises OSError when it may not be looked at."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            yield fd, target[8:-1]
