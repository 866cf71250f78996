"""Start a specimen, wait for its events, capture evidence of it, and end exactly its processes.

with start("different_collectives", world=4) as specimen:
    specimen.wait_onset()
    folder = specimen.capture()
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from closeranks.lab.specimens.directions import Directions
from closeranks.lab.specimens.specs import SPECIMENS, Specimen

PROGRAMS = Path(__file__).parent / "programs"
ENTRY = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
STANDING_SECONDS = 1.0


class SpecimenError(RuntimeError):
    """A specimen did not do what it declares; the message holds the end of its log."""


@dataclass
class Running:
    """A running specimen. `pids` are the ranks' by rank; `helpers` the other processes' by role."""

    specimen: Specimen
    world: int
    folder: Path
    launcher: "subprocess.Popen[bytes]"
    event_fd: int
    pids: dict[int, int] = field(default_factory=dict)
    helpers: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    _unread: bytes = b""

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    def times(self, event: str) -> list[float]:
        """Epoch seconds of each event of this name so far, in order."""
        return [e["t"] for e in self.events if e["event"] == event]

    def wait_event(self, event: str, count: int = 1, timeout: float = 60.0) -> dict[str, Any]:
        """Block until `count` events of this name have come; the last of them.

        Raises `SpecimenError` when the launcher ends or `timeout` seconds pass first.
        """
        deadline = time.monotonic() + timeout
        while True:
            found = [e for e in self.events if e["event"] == event]
            if len(found) >= count:
                return found[count - 1]
            left = deadline - time.monotonic()
            readable = left > 0 and select.select([self.event_fd], [], [], left)[0]
            if not readable or not self._read_events():
                why = f"within {timeout:g} s" if not readable else "before its launcher ended"
                came = ", ".join(f"{n} x {name}" for name, n in Counter(e["event"] for e in self.events).items())
                raise SpecimenError(
                    f"{self.specimen.name}: {count} x {event!r} did not come {why} (came: {came or 'nothing'}); a busy "
                    f"machine may need longer (--wait).\n{self.log_tail()}"
                )

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Block until the port is bound and every rank's loop has turned once."""
        self.wait_event("http", timeout=timeout)
        if self.specimen.engine == "vllm":
            self.wait_event("core_ready", timeout=timeout)
            self.wait_event("process", self.world + 1, timeout)
        elif self.specimen.reaches_ready:
            self.wait_event("ready", self.world, timeout)

    def wait_onset(self, timeout: float = 60.0) -> float:
        """Block until what the specimen shows has set in; the time of the first onset event, epoch seconds."""
        spec = self.specimen
        struck = max(1, len(spec.ranks(spec.strikes, self.world)))
        if spec.fault:
            self.wait_event("onset", struck, timeout)
        if spec.stands == "none" and spec.fault not in ("killed", "core_killed", "slow_load", "long_step"):
            self.wait_event("standing", 1, timeout)
        if "killed" in spec.fault:
            self.wait_event("child_died", 1, timeout)
        self._settle(timeout)
        return self.times("onset" if spec.fault else "standing")[0]

    def _settle(self, timeout: float) -> None:
        """Wait until the main threads that are to stand have made no context switch for a second.

        The kernel sends no event when a thread has blocked for good, so this reads /proc until it shows.
        """
        ranks = self.specimen.ranks(self.specimen.stands, self.world)
        deadline = time.monotonic() + timeout
        before, since = switches(self.pids[r] for r in ranks), time.monotonic()
        while time.monotonic() - since < STANDING_SECONDS and ranks:
            if time.monotonic() > deadline:
                raise SpecimenError(f"{self.specimen.name}: ranks {sorted(ranks)} did not come to stand")
            select.select([], [], [], 0.1)
            now = switches(self.pids[r] for r in ranks)
            if now != before:
                before, since = now, time.monotonic()

    def _read_events(self) -> bool:
        chunk = os.read(self.event_fd, 65536)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == "process" and event["rank"] is not None:
                self.pids[event["rank"]] = event["pid"]
            elif event["event"] == "process":
                self.helpers[event["role"]] = event["pid"]
            elif event["event"] == "http":
                self.port = event["port"]
                self.helpers["launcher"] = event["pid"]
        return bool(chunk)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the engine's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def flags(self) -> list[str]:
        """The command line as an operator would have written it."""
        return ["python3", "-m", ENTRY[self.specimen.engine], *command_line(self.specimen, self.world)]

    def capture(self, folder: Path | None = None) -> Path:
        """Evidence as an operator's hand commands would give it; see `closeranks.lab.specimens.capture`."""
        from closeranks.lab.specimens.capture import capture

        return capture(self, folder or self.folder / "capture")

    def stop(self) -> None:
        """End the specimen's process group, stopped and wedged members included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.wait()
        while self._read_events():  # to the end: every writer has closed its side, so every process has ended
            continue
        os.close(self.event_fd)


def switches(pids: "Iterator[int] | list[int]") -> list[str]:
    """The main thread's context-switch counters of each process, as /proc gives them; empty for one that is gone."""
    counters = []
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
        except OSError:
            status = ""
        counters.append("".join(line for line in status.splitlines() if "ctxt_switches" in line))
    return counters


def command_line(specimen: Specimen, world: int, port: int = 0) -> list[str]:
    """The engine's flags; they say nothing of a specimen, so that `ps` shows what an operator would see."""
    where = ["--host", "127.0.0.1", *(["--port", str(port)] if port else [])]
    line = ["--model-path", "tiny", *where, "--tp-size", str(world)]
    if specimen.engine == "vllm":
        return ["--model", "tiny", *where, "--tensor-parallel-size", str(world)]
    if specimen.mode != "null":
        line += ["--disaggregation-mode", specimen.mode, "--disaggregation-transfer-backend", "nixl"]
    if specimen.mode == "prefill":
        line += ["--enable-hierarchical-cache"]
    return [*line, "--enable-metrics"]


@contextlib.contextmanager
def start(
    name: str,
    *,
    world: int | None = None,
    folder: Path | None = None,
    port: int = 0,
    once: bool = False,
    fabric: Path | None = None,
    timeout: float = 60.0,
) -> Iterator[Running]:
    """Run the specimen `name` with `world` ranks (default: its own number) until the block ends; yields it when ready.

    `port` is that of its HTTP endpoints (0: one of the system's choice). `folder` keeps log and captures; without it a
    temporary one is used and removed. `once`: when its fault has struck before in this folder, it starts without it, as
    an engine that was restarted. `fabric`: the folder through which it hands over, the same for a prefill and a decode
    specimen that work together. Raises `KeyError` for an unknown name and `SpecimenError` when the specimen does
    not get ready within `timeout` seconds.
    """
    specimen = SPECIMENS[name]
    world = world or specimen.world
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specimen-")))
        folder.mkdir(parents=True, exist_ok=True)
        running = _launch(Directions(name, folder, -1, os.getpid(), port, once, str(fabric or folder)), world)
        stack.callback(running.stop)
        running.wait_ready(timeout)
        yield running


def become(name: str, folder: Path, port: int, once: bool, fabric: Path | None, world: int | None) -> NoReturn:
    """Replace this process by the engine's launcher, with a command line and an environment that start it again.

    Nobody is told of its events, and it does not end with whoever started it.
    """
    specimen = SPECIMENS[name]
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    directions = Directions(name, folder, -1, 0, port, once, str((fabric or folder).resolve()))
    command, environment = _command(specimen, world or specimen.world, directions)
    with (folder / "engine.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.execve(sys.executable, command, environment)


def _command(specimen: Specimen, world: int, directions: Directions) -> tuple[list[str], dict[str, str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), str(Path(__file__).parents[3])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", ENTRY[specimen.engine], *command_line(specimen, world, directions.port)]
    return command, environment | directions.environment()


def _launch(directions: Directions, world: int) -> Running:
    readable, writable = os.pipe()
    folder, specimen = directions.folder, directions.specimen()
    command, environment = _command(specimen, world, replace(directions, event_fd=writable))
    with (folder / "engine.log").open("ab") as log:
        launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[writable],
            start_new_session=True,
        )
    os.close(writable)
    return Running(specimen, world, folder, launcher, readable)
