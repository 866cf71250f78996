"""Trees of real processes: all of a tree ends, reparented members too, and nobody else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from closeranks.supervise.platforms import Process, processes
from closeranks.supervise.platforms.base import StillAlive

# A launcher in a session of its own, with a child, a grandchild whose parent has ended, and one in another session.
FAMILY = """
import os, sys, time
def say(): os.write(1, f"{os.getpid()}\\n".encode())
def spawn(action):
    if os.fork() == 0:
        action()
        say()
        time.sleep(600)
def orphan():
    if os.fork():
        os._exit(0)
say()
spawn(lambda: None)
spawn(orphan)
spawn(os.setsid)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts processes, and ends what a test left of them."""
    made: list[subprocess.Popen[bytes]] = []

    def start(program: str, **options: object) -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **options))  # type: ignore[call-overload]
        return made[-1]

    yield start
    for process in made:
        for member in processes.tree(processes.known([process.pid])):
            os.kill(member.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def numbers(process: "subprocess.Popen[bytes]", count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def identity(pid: int) -> Process:
    (found,) = processes.known([pid])
    return found


def test_all_of_a_tree_ends_with_its_orphans_and_their_neighbours_do_not(
    started: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    family, neighbour = started(FAMILY, start_new_session=True), started("import time; time.sleep(600)")
    members = [identity(pid) for pid in numbers(family, 4)]
    known = [identity(family.pid)]
    assert {p.pid for p in processes.tree(known)} >= {p.pid for p in members}
    assert processes.end(known, 10) >= 4
    assert not [p for p in members if processes.lives(p)]
    assert neighbour.poll() is None


def test_orphans_are_found_by_the_session_of_a_launcher_that_is_gone(
    started: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    family = started(FAMILY, start_new_session=True)
    members = [identity(pid) for pid in numbers(family, 4)]
    known = [identity(family.pid)]
    family.kill()
    family.wait()
    found = {p.pid for p in processes.tree(known) if processes.lives(p)}
    sessions = {os.getsid(p.pid) for p in members if processes.lives(p)}
    assert found == {p.pid for p in members if processes.lives(p) and os.getsid(p.pid) == family.pid}, sessions
    processes.end([*known, *members], 10)
    assert not [p for p in members if processes.lives(p)]


def test_a_stopped_process_ends_too(started: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    process = started("import time; time.sleep(600)")
    process.send_signal(signal.SIGSTOP)
    assert processes.end([identity(process.pid)], 10) == 1


def test_a_zombie_counts_as_ended(started: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    process = started("pass")
    known = identity(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie until it is reaped
    assert not processes.lives(known)
    assert processes.end([known], 10) == 0


def test_a_number_that_another_process_has_now_is_not_hit(started: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    process = started("import time; time.sleep(600)", start_new_session=True)
    stranger = identity(process.pid)
    old = Process(stranger.pid, stranger.start - 1, leads=True)
    assert processes.tree([old]) == []
    assert processes.end([old], 5) == 0
    assert process.poll() is None


def test_one_that_goes_on_forking_while_it_is_ended_leaves_nothing(
    started: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    program = (
        "import os, time\nos.setsid()\nprint(os.getpid(), flush=True)\n"
        "while True:\n    if os.fork() == 0:\n        time.sleep(600)\n    time.sleep(0.01)\n"
    )
    process = started(program)
    numbers(process, 1)
    known = [identity(process.pid)]
    processes.end(known, 20)
    assert not [p for p in processes.tree(known) if processes.lives(p)]


def test_this_process_and_those_above_it_are_spared() -> None:
    mine = identity(os.getpid())
    assert mine.pid not in {p.pid for p in processes.tree([mine])}
    assert processes.ancestors(os.getpid()) >= {os.getpid(), os.getppid()}


def test_one_that_does_not_end_is_named(
    started: Callable[..., "subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started("import time; time.sleep(600)")
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as if it waited in the kernel
    with pytest.raises(StillAlive, match=str(process.pid)):
        processes.end([identity(process.pid)], 0.2)


def test_a_line_of_stat_survives_any_name(tmp_path: Path, started: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    program = "import time; open('/proc/self/comm', 'w').write('a) R 1 (b'); print(1, flush=True); time.sleep(600)"
    process = started(program)
    numbers(process, 1)
    line = processes.line_of(process.pid)
    assert line is not None
    assert line.ppid == os.getpid()
    assert line.start <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
