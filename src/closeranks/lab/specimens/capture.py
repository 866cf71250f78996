"""Evidence of a running specimen, taken as by hand: py-spy twice, /proc around a quiet window, logs and HTTP answers.

Deliberately independent of the product's own capture: a diagnosis must work on what operators collect with a shell.
"""

import os
import select
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from closeranks.lab.specimens.run import Running

PYSPY_SECONDS = 20.0
HTTP_SECONDS = 4.0
WINDOW_SECONDS = 2.5
PROC_FILES = ("status", "stat", "wchan", "syscall")


def capture(running: "Running", folder: Path) -> Path:
    """Write into `folder` and return it:

    `round1/`, `round2/` (py-spy text of each process, and JSON of the ranks in the second), `proc_1.txt`,
    `proc_2.txt` (taken around a window of 2.5 s in which nothing else was done to the processes), `ps.txt`,
    `engine.log`, `metrics_1.txt`, `metrics_2.txt`, `loads.json`, `server_info.json`, `health.txt`, `flags.txt`, and
    flight-recorder files and `native/` (py-spy --native) where the specimen asks for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"TP{rank}": pid for rank, pid in sorted(running.pids.items())} | running.helpers
    _http(running, "/metrics", folder / "metrics_1.txt")
    _dump_all(named, folder / "round1")
    _proc(named, folder / "proc_1.txt")
    select.select([], [], [], WINDOW_SECONDS)
    _proc(named, folder / "proc_2.txt")
    _dump_all(named, folder / "round2")
    for label, pid in named.items():
        if label.startswith("TP"):
            _dump(pid, folder / "round2" / f"pyspy_{label}.json", "--json")
        if label.startswith("TP") and running.specimen.native:
            (folder / "native").mkdir(exist_ok=True)
            _dump(pid, folder / "native" / f"pyspy_{label}.txt", "--native")
    _http(running, "/metrics", folder / "metrics_2.txt")
    _http(running, "/health", folder / "health.txt", status=True)
    if running.specimen.engine == "sglang":
        _http(running, "/v1/loads", folder / "loads.json")
        _http(running, "/server_info", folder / "server_info.json")
    if running.specimen.flight_recorder:
        _flight_recorder(running, folder)
    pids = ",".join(str(pid) for pid in named.values())
    ps = subprocess.run(
        ["ps", "-o", "pid,ppid,stat,pcpu,wchan:30,args", "-p", pids], capture_output=True, text=True, check=False
    )
    (folder / "ps.txt").write_text(ps.stdout)
    (folder / "flags.txt").write_text(" ".join(running.flags()) + "\n")
    shutil.copy(running.log, folder / "engine.log")
    return folder


def _dump_all(named: dict[str, int], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for label, pid in named.items():
        _dump(pid, folder / f"pyspy_{label}.txt")


def _dump(pid: int, path: Path, *options: str) -> None:
    path.write_text(dump(pid, *options))


def dump(pid: int, *options: str) -> str:
    """One py-spy run; a stopped process can only be read with --nonblocking. What it said on failure is evidence."""
    pyspy = Path(sys.executable).with_name("py-spy")
    command = [str(pyspy) if pyspy.exists() else "py-spy", "dump", "--pid", str(pid), *options]
    if _state(pid) in "Tt":
        command.append("--nonblocking")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PYSPY_SECONDS, check=False)
        return ran.stdout or f"Pyspy failed to dump PID {pid}. Error: {ran.stderr}"
    except subprocess.TimeoutExpired:
        return f"Pyspy failed to dump PID {pid}. Error: no answer in {PYSPY_SECONDS:.0f} s\n"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _proc(named: dict[str, int], path: Path) -> None:
    """What `date; tail -n +1 /proc/PID/{status,stat,wchan,syscall}` prints, main threads only."""
    lines = [time.strftime("%Y-%m-%dT%H:%M:%S%z") + f" uptime {Path('/proc/uptime').read_text().split()[0]}"]
    for pid in named.values():
        for name in PROC_FILES:
            source = f"/proc/{pid}/{name}"
            try:
                text = Path(source).read_text()
            except OSError as error:
                text = f"{name}: {os.strerror(error.errno or 0)}\n"
            lines += [f"==> {source} <==", text.rstrip("\n"), ""]
        lines += [f"==> /proc/{pid}/task <==", " ".join(_threads(pid)), ""]
    path.write_text("\n".join(lines))


def _threads(pid: int) -> list[str]:
    try:
        return sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return []


def _http(running: "Running", path: str, target: Path, *, status: bool = False) -> None:
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{running.port}{path}", timeout=HTTP_SECONDS) as answer:
            code, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        code, body = error.code, error.read().decode()
    except OSError as error:  # refused, reset or timed out
        code, body = 0, f"curl: {error} after {time.monotonic() - began:.1f} s\n"
    if status:
        body = f"GET {path} -> {code or 'no answer'} in {time.monotonic() - began:.2f} s\n"
    target.write_text(body)


def _flight_recorder(running: "Running", folder: Path) -> None:
    _http(running, "/dump_flight_recorder", folder / "flight_recorder_asked.txt", status=True)
    running.wait_event("flight_recorder", running.world, timeout=20)
    for path in running.folder.glob("nccl_trace_rank_*.json"):
        shutil.copy(path, folder / path.name)
    (folder / "flight_recorder_asked.txt").unlink()
