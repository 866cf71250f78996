"""Plain processes: started by a shell or a script, by nobody who would start them again."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import msgspec

from closeranks.evidence.redact import redact
from closeranks.supervise.platforms import processes
from closeranks.supervise.platforms.base import Launch, PlatformError, Process, Seen, Target

START_S = 30.0
"""How long the small program that becomes the engine may take to say that it did."""
LEFT_S = 15.0
"""How long what a start has left behind may take to be gone."""
_LIMITS = {
    "Max open files": "RLIMIT_NOFILE",
    "Max locked memory": "RLIMIT_MEMLOCK",
    "Max stack size": "RLIMIT_STACK",
    "Max core file size": "RLIMIT_CORE",
    "Max processes": "RLIMIT_NPROC",
    "Max address space": "RLIMIT_AS",
}


class Plain:
    """Reads how an engine was started from /proc while it still is there, and starts it again in the same way."""

    name: ClassVar[str] = "plain"
    tried: ClassVar[bool] = True

    def find(self, seen: Seen) -> Target:
        """The whole tree of the engine's processes and the launch of the first. Raises PlatformError if none lives and
        it is not known from elsewhere how it was started."""
        known = seen.remembered is not None or bool(seen.command)
        life = seen.processes if known and not processes.tree(seen.processes) else processes.life_of(seen)
        launch, detail = seen.remembered, ""
        try:
            if seen.orphaned or not processes.lives(seen.processes[0]):
                raise PlatformError("the process that started it has ended, and nobody remembers its command line")
            launch = read_launch(seen.processes[0].pid)
        except (OSError, PlatformError) as error:
            detail = "" if launch is not None else str(error)
        if seen.command:
            base = launch or Launch(argv=(), cwd=os.getcwd(), env=dict(os.environ), program="")
            launch = msgspec.structs.replace(base, argv=seen.command, program=_program(seen.command, base))
            detail = ""
        elif launch is not None and launch.foreign:
            detail = (
                f"it ran in namespaces of its own ({', '.join(launch.foreign)}), and from here it would start outside "
                f"of them; give --start-command {seen.name}=COMMAND, which enters them"
            )
            launch = None
        return Target(name=seen.name, platform=self.name, processes=life, launch=launch, detail=detail)

    def is_running(self, target: Target) -> bool:
        """Whether any process of that life lives."""
        return any(processes.lives(p) for p in processes.tree(target.processes))

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """SIGKILL to all of them, and to what they have started since."""
        return processes.end(target.processes, deadline_s)

    def start(self, target: Target, token: str, folder: Path) -> str:
        """Run `launch` in a session of its own. The token is taken by the new process itself, before it becomes the
        engine: however often an interrupted recovery asks, one engine comes of it. That of a process that has ended is
        free again, for whoever is first, once what it has left in its session is ended too: ranks of a launcher that
        died, or all of an engine whose start command has returned. Raises StillAlive where that does not end."""
        if target.launch is None:
            raise PlatformError(f"{target.name}: it is not known how it was started: {target.detail}")
        taken = folder / f"{token}.taken"
        if (holder := _holder(taken)) is not None and not processes.lives(holder):
            processes.end([holder], LEFT_S)
            taken.unlink(missing_ok=True)
        spec = {
            **msgspec.to_builtins(target.launch),
            "taken": str(taken),
            "log": str(_log_of(target, folder)),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(Path(__file__).with_name("become.py"))],
                input=json.dumps(spec),  # not by a file: it holds the engine's environment
                capture_output=True,
                text=True,
                timeout=START_S,
            )
        except subprocess.TimeoutExpired as error:
            raise PlatformError(f"{target.name}: nothing was started within {START_S:.0f} s") from error
        if done.returncode:
            raise PlatformError(f"{target.name} could not be started: {done.stderr.strip()[-500:]}")
        return done.stdout.strip()

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Its first process has gone; the token holds its number and start time."""
        holder = _holder(folder / f"{token}.taken")
        if holder is None or processes.lives(holder):
            return ""
        return f"process {holder.pid} is gone; its output: {_output_of(target, folder)}"

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """`kill -KILL PIDS`, or the engine's own command line, redacted."""
        if step == "end":
            return ("kill", "-KILL", *(str(p.pid) for p in target.processes))
        if target.launch is None:
            return ()
        return tuple(shlex.split(redact(shlex.join(target.launch.argv))))


def started(folder: Path) -> list[Process]:
    """What `start` has started with this folder and lives."""
    found = (_holder(taken) for taken in folder.glob("*.taken"))
    return [process for process in found if process is not None and processes.lives(process)]


def _holder(taken: Path) -> Process | None:
    """Who took the token; None: nobody yet, or it was cut short before its number was written."""
    try:
        pid, start = (int(word) for word in taken.read_text().split())
    except (OSError, ValueError):
        return None
    return Process(pid, start, leads=True)


def _log_of(target: Target, folder: Path) -> Path:
    return folder / f"{target.name.replace('/', '_')}.log"


def _output_of(target: Target, folder: Path) -> str:
    return (target.launch.stderr if target.launch else "") or str(_log_of(target, folder))


def read_launch(pid: int) -> Launch:
    """How a process was started. Raises OSError where /proc does not let itself be read, PlatformError where what it
    says would start nothing."""
    base = Path(f"/proc/{pid}")
    argv = tuple(_strings((base / "cmdline").read_bytes()))
    env = dict(part.split("=", 1) for part in _strings((base / "environ").read_bytes()) if "=" in part)
    cwd = os.readlink(base / "cwd")
    draft = Launch(argv=argv, cwd=cwd, env=env, program="")
    status = dict(
        line.split(":", 1) for line in (base / "status").read_text(errors="replace").splitlines() if ":" in line
    )
    return msgspec.structs.replace(
        draft,
        program=_program(argv, draft),
        stdout=_file_of(base / "fd/1"),
        stderr=_file_of(base / "fd/2"),
        uid=int(status["Uid"].split()[1]),
        gid=int(status["Gid"].split()[1]),
        groups=tuple(int(group) for group in status["Groups"].split()),
        umask=int(status.get("Umask", "0022"), 8),
        nice=os.getpriority(os.PRIO_PROCESS, pid),
        cpus=tuple(sorted(os.sched_getaffinity(pid))),
        limits=_limits(base / "limits"),
        foreign=_foreign(base / "ns"),
    )


def _foreign(spaces: Path) -> tuple[str, ...]:
    """Kinds of namespaces in which a process is and we are not. Raises OSError where they cannot be read."""
    return tuple(
        k for k in ("net", "mnt", "pid", "ipc") if os.readlink(spaces / k) != os.readlink(f"/proc/self/ns/{k}")
    )


def _strings(raw: bytes) -> list[str]:
    return [part.decode("utf-8", "surrogateescape") for part in raw.split(b"\0")[:-1]]


def _program(argv: tuple[str, ...], launch: Launch) -> str:
    """The file that argv[0] means, in the process's own folder and PATH. Raises PlatformError if it means none."""
    if not argv or not argv[0]:
        raise PlatformError("its command line is empty (a zombie, or a kernel thread)")
    if "/" in argv[0]:
        path = str(Path(launch.cwd, argv[0]))
        found = path if os.access(path, os.X_OK) and Path(path).is_file() else None
    else:
        found = shutil.which(argv[0], path=launch.env.get("PATH", os.defpath))
    if found is None:
        raise PlatformError(
            f"its command line begins with {argv[0]!r}, which is no program: the process has renamed itself; "
            "give the start command in the settings"
        )
    return found


def _file_of(descriptor: Path) -> str:
    """The regular file that a descriptor is open on; empty for pipes, terminals and sockets."""
    try:
        target = os.readlink(descriptor)
    except OSError:
        return ""
    return target if target.startswith("/") and (target == "/dev/null" or Path(target).is_file()) else ""


def _limits(path: Path) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for line in path.read_text().splitlines()[1:]:
        name = _LIMITS.get(line[:26].strip())
        if name is not None:
            soft, hard = (resource.RLIM_INFINITY if v == "unlimited" else int(v) for v in line[26:].split()[:2])
            found[name] = (soft, hard)
    return found
