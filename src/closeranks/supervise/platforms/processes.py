"""Processes by /proc: who belongs to a tree, and ending all of it by descriptors, so that no stranger is ever hit."""

import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from closeranks.supervise.platforms.base import PlatformError, Process, Seen, StillAlive

ROUND_S = 0.5
"""How long one round of kills waits before it looks for processes that were born meanwhile."""


class Line:
    """The fields of /proc/PID/stat that matter here."""

    __slots__ = ("pid", "ppid", "session", "start", "state")

    def __init__(self, pid: int, state: str, ppid: int, session: int, start: int) -> None:
        self.pid, self.state, self.ppid, self.session, self.start = pid, state, ppid, session, start

    @property
    def process(self) -> Process:
        return Process(self.pid, self.start, self.session == self.pid)


def line_of(pid: int) -> Line | None:
    """The process's line; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if len(fields) < 20:
        return None
    return Line(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def all_lines() -> dict[int, Line]:
    """Every process of this pid namespace."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (line := line_of(int(name))) is not None:
            found[line.pid] = line
    return found


def lives(process: Process) -> bool:
    """Whether exactly this process runs. A zombie does not: it holds no memory, port or device any more."""
    line = line_of(process.pid)
    return line is not None and line.start == process.start and line.state not in "ZX"


def ancestors(pid: int) -> set[int]:
    """The process's own number and those above it."""
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        line = line_of(pid)
        pid = line.ppid if line else 0
    return found


def known(pids: Iterable[int]) -> tuple[Process, ...]:
    """These processes as they are now; those that are gone are left out."""
    return tuple(line.process for pid in pids if (line := line_of(pid)) is not None)


def tree(roots: Iterable[Process]) -> list[Process]:
    """`roots` that are there, all their descendants, and the members of sessions that one of these leads or led.

    Ranks that lost their parent are found by the session, where the launcher made one: a rank that was reparented to
    process 1 keeps it. A session led by somebody else (a login shell) is left alone, and so is this process with all
    that is above it. Order: that of `roots`, then by start time.
    """
    roots, lines = list(roots), all_lines()
    spared = ancestors(os.getpid())
    there = [p for p in roots if p.pid in lines and lines[p.pid].start == p.start]
    # A leader that has ended still names its session: while a member lives, the kernel gives its number to nobody.
    leaders = {p.pid for p in roots if p.leads and (p.pid not in lines or lines[p.pid].start == p.start)}
    oldest = min((p.start for p in roots), default=0)
    members = {p.pid for p in there}
    while True:
        leaders |= {n for n in members if lines[n].session == n}
        joined = {
            n
            for n, line in lines.items()
            if n not in members and (line.ppid in members or (line.session in leaders and line.start >= oldest))
        }
        joined -= spared
        if not joined:
            break
        members |= joined
    members -= spared
    first = [lines[p.pid].process for p in there if p.pid in members]
    rest = sorted(members - {p.pid for p in first}, key=lambda n: (lines[n].start, n))
    return first + [lines[n].process for n in rest]


def life_of(seen: Seen) -> tuple[Process, ...]:
    """The engine's whole tree, with those of its processes that are gone: their sessions tell members. Raises
    PlatformError if none is left."""
    found = tree(seen.processes)
    if not found:
        raise PlatformError(f"{seen.name}: none of its processes is there any more")
    return tuple(dict.fromkeys([*seen.processes, *found]))


def end(roots: Iterable[Process], deadline_s: float) -> int:
    """SIGKILL to the whole tree of `roots`, again and again until nobody of it lives; how many were ended.

    Each is killed through a descriptor (pidfd) that was opened before its start time was compared: a number that was
    given to another process in between is not hit. Zombies count as ended. Raises StillAlive after `deadline_s`.
    """
    until = time.monotonic() + deadline_s
    family = list(roots)
    ended: set[Process] = set()
    while True:
        living = [p for p in tree(family) if lives(p)]
        if not living:
            return len(ended)
        family = list(dict.fromkeys([*family, *living]))  # a child of one that dies now must be known by itself
        descriptors: dict[int, Process] = {}
        try:
            for process in living:
                descriptor = _open(process)
                if descriptor is not None:
                    descriptors[descriptor] = process
                    try:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    except ProcessLookupError:
                        continue  # it ended by itself; the poll below sees it
            ended.update(_wait(descriptors, min(until, time.monotonic() + ROUND_S)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if time.monotonic() >= until and (left := [p.pid for p in tree(family) if lives(p)]):
            raise StillAlive(left, deadline_s)


def _open(process: Process) -> int | None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    line = line_of(process.pid)
    if line is None or line.start != process.start:
        os.close(descriptor)
        return None
    return descriptor


def _wait(descriptors: dict[int, Process], until: float) -> list[Process]:
    """Those that ended by then. A descriptor is readable as soon as its process is a zombie."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left, done = dict(descriptors), []
    while left and (rest := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(rest * 1000):
            poll.unregister(descriptor)
            done.append(left.pop(descriptor))
    return done
