"""Evidence of a process while it still is in its state: stacks by py-spy, /proc, the tail of its log.

Every function is bounded in time and size and returns what it could get: a process that does not let itself be read
is itself evidence, and must not hold recovery up.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

TAIL_BYTES = 256 * 1024
ENDS_S = 1.0
"""A process that SIGKILL has not ended by then waits inside the kernel, for as long as that likes."""
_left: dict[int, asyncio.subprocess.Process] = {}
"""Process → the py-spy at it that did not end. A second one would only hang beside it."""
_PROC_FILES = ("status", "stat", "wchan", "syscall", "cgroup", "limits", "io")


def py_spy() -> str | None:
    """Path of py-spy: beside this interpreter, else on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


async def stacks(pid: int, timeout_s: float = 2.5, native: bool = False) -> str:
    """`py-spy dump` of a process as text; a stopped process is read with --nonblocking. Never raises, says why not.

    At most two attempts of `timeout_s` seconds. `native`: one, with the frames below Python's; it takes seconds. A
    py-spy that cannot be ended is left, and while it is there no other one is started at the same process.
    """
    program = py_spy()
    if program is None:
        return "no stacks: py-spy is not installed\n"
    if _state(pid) == "Z":
        return "no stacks: the process is a zombie or gone\n"
    if (old := _left.pop(pid, None)) is not None and await stays(old):
        _left[pid] = old
        return f"no stacks: {_STUCK.format(old.pid)}\n"
    said: list[str] = []
    for extra in [["--native"]] if native else [[], ["--nonblocking"]]:
        if pid in _left:
            break
        if "--nonblocking" not in extra and _state(pid) in "Tt":  # ptrace waits for a stopped process
            continue
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                "dump",
                "--pid",
                str(pid),
                *extra,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # no process to be had, or py-spy cannot be run
            said.append(f"py-spy could not be started: {error.strerror}")
            continue
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            said.append(f"py-spy {' '.join(extra)} did not answer in {timeout_s} s")
            continue
        finally:
            if await stays(process):  # late, or this task was cancelled
                _left[pid] = process
                said.append(_STUCK.format(process.pid))
        if process.returncode == 0 and out.strip():
            return out.decode(errors="replace")
        said.append(f"py-spy {' '.join(extra)} exited {process.returncode}: {err.decode(errors='replace').strip()}")
    return "no stacks: " + "; ".join(said or ["the process is held by a debugger"]) + "\n"


_STUCK = "py-spy (pid {}) hangs inside the kernel, SIGKILL does not end it: it is left"


async def stays(process: asyncio.subprocess.Process) -> bool:
    """Kill a process that is there; whether it is there all the same. It must not stay attached, and nobody may wait
    for one that the kernel holds."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.kill()
            await asyncio.wait_for(process.wait(), ENDS_S)
    return process.returncode is None and _state(process.pid) != "Z"


def ask_for_stacks(pid: int) -> bool:
    """Send SIGUSR1 to a process that has a handler for it (faulthandler writes its stacks); whether it was sent."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
                os.kill(pid, signal.SIGUSR1)
                return True
    except (OSError, ValueError):  # it went meanwhile
        return False
    return False


def is_stopped(pid: int) -> bool:
    """Whether a signal stopped the process (a debugger's stop does not count)."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "Z"


def proc(pid: int) -> str:
    """What /proc says of a process and its threads: state, wait channel, context switches, CPU."""
    lines = []
    for name in _PROC_FILES:
        try:
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
        except OSError as error:
            text = f"unreadable: {error.strerror}\n"
        lines.append(f"== {name}\n{text.rstrip()}\n")
    try:
        tasks = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        tasks = []
    for task in tasks[:256]:
        try:
            base = Path(f"/proc/{pid}/task/{task}")
            status = dict(
                line.split(":", 1) for line in (base / "status").read_text(errors="replace").splitlines() if ":" in line
            )
            wchan = (base / "wchan").read_text(errors="replace")
        except OSError:  # the thread ended between listing and reading
            continue
        keep = ("Name", "State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        shown = ", ".join(f"{key} {status.get(key, '?').strip()}" for key in keep)
        lines.append(f"task {task}: {shown}, wchan {wchan}")
    return "\n".join(lines) + "\n"


def tail(path: Path, limit: int = TAIL_BYTES) -> bytes:
    """The last `limit` bytes of a file; a line that says why not, if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return file.read()
    except OSError as error:
        return f"unreadable: {error.strerror}\n".encode()


def head(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file; none of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def write_files(folder: Path, contents: Mapping[str, bytes | Callable[[], bytes]]) -> dict[str, str]:
    """Write each file, read where it is told how; the names of those that could not be read or that the disk did not
    take, with the reason."""
    missing = {}
    for name, data in contents.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data() if callable(data) else data)
        except OSError as error:
            missing[name] = error.strerror or str(error)
            with contextlib.suppress(OSError):  # said already; a part that stays is in the manifest with its size
                path.unlink(missing_ok=True)
    return missing


def write_manifest(folder: Path, facts: dict[str, object]) -> None:
    """`manifest.json`: the given facts, and size and SHA-256 of every other file in the folder.

    Whole or not at all: where the disk does not take it, OSError is raised and one that was there stays.
    """
    files = {}
    manifest, new = folder / "manifest.json", folder / "manifest.json.new"
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p not in (manifest, new)):
        data = path.read_bytes()
        files[str(path.relative_to(folder))] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    try:
        new.write_text(json.dumps({"schema": 1, **facts, "files": files}, indent=1) + "\n")
        new.replace(manifest)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def keep_newest(parent: Path, number: int) -> None:
    """Remove the oldest incident folders beyond `number`, by name (names begin with their time)."""
    folders = oldest_first(p for p in parent.iterdir() if p.is_dir())
    for folder in folders[: max(0, len(folders) - number)]:
        shutil.rmtree(folder)


def oldest_first(folders: Iterable[Path]) -> list[Path]:
    """By the time that their names begin with (UTC). One from the future was made before the clock was set back, so it
    is older than all others: what is written after that must not go first."""
    now = time.strftime("%Y%m%dT%H%M%S~", time.gmtime())
    return sorted(folders, key=lambda folder: (folder.name <= now, folder.name))
