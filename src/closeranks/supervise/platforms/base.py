"""The protocol of a platform, and the frozen facts that it works on."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec


class PlatformError(RuntimeError):
    """A platform could not do what was asked. The text says what was tried and what came back.

    PlatformError
    └── StillAlive      processes that did not end
    """


class StillAlive(PlatformError):
    """Processes of a life that was to be ended still run: nothing may be started in their place."""

    def __init__(self, pids: Sequence[int], waited_s: float) -> None:
        self.pids = tuple(pids)
        shown = ", ".join(str(pid) for pid in self.pids)
        super().__init__(
            f"after SIGKILL and {waited_s:.0f} s these processes still run: {shown} (state D: they wait in the kernel, "
            "often for a device; a second engine beside them would meet their memory and ports)"
        )


class Process(msgspec.Struct, frozen=True):
    """One process, told from a later one with its number by its start time (clock ticks since boot)."""

    pid: int
    start: int
    leads: bool = False
    """Whether it leads a session: what was started below it is found by that, even when it has ended."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How a process was started, as /proc tells: enough to start it again. Holds its environment, so its secrets."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    program: str
    """Path of the file to execute: argv[0] as the shell would have found it, not the resolved /proc/PID/exe, because
    a virtual environment is told by the path through which its interpreter was called."""
    stdout: str = ""
    stderr: str = ""
    """Files that its output goes to; empty: it was no regular file, the platform chooses one."""
    uid: int = -1
    gid: int = -1
    groups: tuple[int, ...] = ()
    umask: int = 0o022
    nice: int = 0
    cpus: tuple[int, ...] = ()
    limits: dict[str, tuple[int, int]] = {}
    """Resource limits by the name of their constant (`RLIMIT_MEMLOCK`): soft, hard; -1 is unlimited."""
    foreign: tuple[str, ...] = ()
    """Kinds of namespaces (`net`, `mnt`) that it ran in and its reader did not: started from here it would be another
    engine, with other addresses or files."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery knows of an engine: all that a platform needs to find out the rest."""

    name: str
    processes: tuple[Process, ...]
    """Its processes, the launcher first."""
    orphaned: bool = False
    """Its launcher has ended: the first of its processes is not what started the others."""
    unit: str = ""
    """Name of its unit, container or NAMESPACE/POD, where the operator gave it; else read from the cgroup."""
    command: tuple[str, ...] = ()
    """An operator's own start command, in place of what /proc says."""
    remembered: Launch | None = None
    """How it was started, read when its launcher still lived; used when that has ended."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One life of an engine, as it was found before anything was done to it."""

    name: str
    platform: str
    processes: tuple[Process, ...] = ()
    """Every process of it; the one that started the others comes first."""
    unit: str = ""
    life: str = ""
    """What tells this life of a unit, container or pod from its next one."""
    launch: Launch | None = None
    detail: str = ""
    """What stands in the way of starting it again; empty: nothing known."""
    wanted: str = ""
    """That somebody else is ending it just now; empty: nobody is seen to."""


class Ran(msgspec.Struct, frozen=True):
    """The end of a command: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


Runner = Callable[[Sequence[str], float], Ran]
"""Runs an argument list with a time limit in seconds."""


def run(argv: Sequence[str], timeout_s: float) -> Ran:
    """Run a command without a shell. Raises PlatformError if it is not there or does not end in time."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise PlatformError(f"{argv[0]}: no such command on this host") from error
    except subprocess.TimeoutExpired as error:
        raise PlatformError(f"`{' '.join(argv)}` did not end within {timeout_s:.0f} s") from error
    except OSError as error:
        raise PlatformError(f"`{' '.join(argv)}`: {error}") from error
    return Ran(done.returncode, done.stdout, done.stderr)


class Platform(Protocol):
    """What recovery needs of whoever runs an engine. Calls block; each ends by its deadline."""

    tried: ClassVar[bool]
    """Whether this project's own tests ran it for real; otherwise its commands follow the documentation."""

    @property
    def name(self) -> str:
        """One of `NAMES`: a target carries it to whoever ends and starts it."""

    def find(self, seen: Seen) -> Target:
        """The life that is to be ended, and how to start the next. Raises PlatformError when it is not to be found."""

    def is_running(self, target: Target) -> bool:
        """Whether any part of that life still runs. A later life under the same name does not count."""

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """End every process of that life, reparented ones too; how many were ended. Raises StillAlive at the deadline.

        A life that is gone already is no error, so a second call after an interruption harms nothing.
        """

    def start(self, target: Target, token: str, folder: Path) -> str:
        """Start the next life; what was done, in words. While what was started with this `token` lives, nothing is.

        `folder` is recovery's own (mode 0700); it remembers tokens there. Raises PlatformError.
        """

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Why the life that `start` began is over already; empty while it is not, or nobody can tell."""

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """The command line of `end` or `start`, for an operator to read; secrets do not appear."""
