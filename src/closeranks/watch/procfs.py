"""/proc, read as cheaply as possible: what processes there are, and what their main threads do.

Only `stat`, `status` and `wchan` are read again and again. `cmdline` takes the memory lock of a process and can hang
with it, so it is read once per process, and again while a process is young, because titles are set late, or watched;
whoever calls `scan` does so in a thread.
"""

import os
import re
from collections.abc import Iterable, Mapping

import msgspec

from closeranks.evidence.sockets import held

YOUNG_S = 120.0
"""A process younger than this may still set its title."""
TICKS = os.sysconf("SC_CLK_TCK")
_SWITCHES = re.compile(rb"^voluntary_ctxt_switches:\s*(\d+)\s*^nonvoluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_FROZEN = ("refrigerator", "freezer", "freeze")


class Row(msgspec.Struct, frozen=True):
    """One process of the table. `start_time` in clock ticks since boot."""

    pid: int
    start_time: int
    ppid: int
    session: int
    state: str
    comm: str
    argv: tuple[str, ...]
    """Empty for a zombie and a kernel thread."""

    @property
    def title(self) -> str:
        return " ".join(self.argv) or self.comm


class MainThread(msgspec.Struct, frozen=True):
    """What the main thread of a process did so far. Ticks of 1/`TICKS` s."""

    pid: int
    start_time: int
    state: str
    switches: int
    ticks: int
    """CPU of the main thread."""
    all_ticks: int
    """CPU of all threads."""
    threads: int
    wchan: str

    @property
    def frozen(self) -> bool:
        """Held by a cgroup's freezer."""
        return any(word in self.wchan for word in _FROZEN)


def read(path: str) -> bytes:
    """The content of a small file of /proc; empty when it or its process is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:  # ESRCH: it ended between opening and reading
        return b""
    finally:
        os.close(fd)


def stat_fields(text: bytes) -> tuple[str, list[str]] | None:
    """(comm, fields from `state` on) of a stat line; the name in parentheses may hold anything, also parentheses."""
    head, _, rest = text.rpartition(b")")
    fields = rest.decode("ascii", "replace").split()
    if len(fields) < 20:
        return None
    return head.partition(b"(")[2].decode(errors="replace"), fields


def row(pid: int) -> Row | None:
    """One process, with its command line; None when it is gone."""
    found = stat_fields(read(f"/proc/{pid}/stat"))
    if found is None:
        return None
    comm, fields = found
    argv = () if fields[0] == "Z" else split_argv(read(f"/proc/{pid}/cmdline"))
    return Row(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0], comm, argv)


def split_argv(raw: bytes) -> tuple[str, ...]:
    """`cmdline` → arguments; a title set by setproctitle is one argument with padding behind it."""
    return tuple(part.decode(errors="replace") for part in raw.rstrip(b"\0 ").split(b"\0") if part)


def uptime_ticks() -> float:
    """Now, in the unit of `start_time`."""
    first = read("/proc/uptime").split(b" ")[0]
    return float(first or 0) * TICKS


def scan(known: Mapping[int, Row], again: Iterable[int] = ()) -> dict[int, Row]:
    """All processes. Rows of `known` are taken over unless they are young, listed in `again`, or of another start."""
    now, table, fresh = uptime_ticks(), {}, set(again)
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        pid = int(name)
        old = known.get(pid)
        if old is not None and pid not in fresh and now - old.start_time > YOUNG_S * TICKS:
            table[pid] = old
            continue
        new = row(pid)
        if new is not None:
            if old is not None and old.start_time == new.start_time and not new.argv:
                new = msgspec.structs.replace(new, argv=old.argv)  # a zombie was somebody
            table[pid] = old if old is not None and _alike(old, new) else new
    return table


def _alike(old: Row, new: Row) -> bool:
    """Whether nothing has changed but whether it runs at the moment: then the old row stays, and tables that are alike
    are told so quickly."""
    ended = {old.state, new.state} & {"Z", "X"}
    return old == (new if ended else msgspec.structs.replace(new, state=old.state))


def main_thread(pid: int) -> MainThread | None:
    """The main thread of a process and the CPU of the whole; None when it is gone."""
    whole = stat_fields(read(f"/proc/{pid}/stat"))
    if whole is None:
        return None
    fields = whole[1]
    own = stat_fields(read(f"/proc/{pid}/task/{pid}/stat"))
    mine = own[1] if own is not None else fields
    counts = _SWITCHES.search(read(f"/proc/{pid}/task/{pid}/status"))
    switches = int(counts[1]) + int(counts[2]) if counts else 0
    return MainThread(
        pid=pid,
        start_time=int(fields[19]),
        state=mine[0],
        switches=switches,
        ticks=int(mine[11]) + int(mine[12]),
        all_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        wchan=read(f"/proc/{pid}/wchan").decode("ascii", "replace"),
    )


def reused(pid: int, start_time: int) -> bool:
    """Whether the pid is of another process than the one that began then: whoever that is, it is none of ours."""
    now = main_thread(pid)
    return now is not None and now.start_time != start_time


def listening(pid: int) -> dict[int, str]:
    """Ports on which a process listens (TCP), each with an address that reaches it. Needs its /proc/PID/fd."""
    try:
        inodes = {inode for _, inode in held(pid)}
    except OSError:
        return {}
    found: dict[int, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}") as file:
                lines = file.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if len(words) > 9 and words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].rpartition(":")
                found.setdefault(int(port, 16), _address(address))
    return found


def loopback_of(pid: int) -> str:
    """The address that reaches what a process listens on at any: 127.0.0.1, or its own where it is in another network
    namespace (a container with a network of its own), and our loopback is not its."""
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return "127.0.0.1"
        with open(f"/proc/{pid}/net/fib_trie") as file:
            return own_address(file.read()) or "127.0.0.1"
    except OSError:  # not ours to look at
        return "127.0.0.1"


def own_address(fib_trie: str) -> str:
    """The first address of a host, besides its loopback, in /proc/net/fib_trie; "" where it has none."""
    found = re.findall(r"\|-- ([\d.]{7,15})\n\s+/32 host LOCAL", fib_trie)
    return next((address for address in found if not address.startswith("127.")), "")


def _address(raw: str) -> str:
    """A listening address of /proc/net/tcp as one to connect to: any → loopback."""
    if len(raw) == 8:
        parts = [str(int(raw[i : i + 2], 16)) for i in (6, 4, 2, 0)]
        return "127.0.0.1" if parts == ["0"] * 4 else ".".join(parts)
    return "127.0.0.1" if set(raw) == {"0"} else "[::1]"
