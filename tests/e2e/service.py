"""A real `closeranks serve` for tests: started as a person would, on ports of the system, ended without residue."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.link import Link

READY_S = 120.0


class Served:
    """A running service. `url` is the gateway's; `status()` what it says of its engines."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.log = log
        self.port = 0
        self.link: Link | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path: str, body: Any, timeout: float = 120.0) -> Any:
        """The answer's JSON. Raises AssertionError with the answer's text unless the status is 200."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error

    def status(self) -> dict[str, dict[str, Any]]:
        """Engine name -> its last Status, from /server_info."""
        info = json.loads(self.get("/server_info")[1])
        return {e["status"]["engine"]: e["status"] for e in info["engines"] if e["status"]}

    def assert_no_residue(self, patience: float = 30.0) -> dict[str, dict[str, Any]]:
        """No page owned or quarantined, no room open, every page free or cached; waits (bounded) for the last ends.

        A Status is up to a second old, so the first look may be too early. Returns the settled status.
        """
        until = time.monotonic() + patience
        while True:
            engines = self.status()
            left = {
                name: {key: e[key] for key in ("pages_owned", "pages_quarantined", "rooms_open") if e[key]}
                for name, e in engines.items()
            }
            if not any(left.values()):
                break
            assert time.monotonic() < until, f"residue: {left}\n{self.tail()}"
            time.sleep(0.2)
        for e in engines.values():
            assert e["pages_free"] + e["pages_cached"] == e["pages_total"], e
        return engines

    def assert_undisturbed(self) -> None:
        """No engine was replaced: every one is in its first epoch."""
        for manifest in self.run_dir.glob("*/incidents/*/manifest.json"):
            raise AssertionError(f"an engine was replaced: {manifest.read_text()[:2000]}")

    def descendants(self) -> list[int]:
        """Pids of all live processes of the service, itself included."""
        parents: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                try:
                    fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                parents[int(entry)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def pid_of(self, engine: str, name: str) -> int:
        """Pid of `leader` or `rankN` of an engine's current epoch."""
        for pid in self.descendants():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environment = b" ".join(words).decode(errors="replace")
            except OSError:
                continue
            if environment.startswith(f"closeranks::{title(engine, name)}"):
                return pid
        raise AssertionError(f"no process {engine} {name}")

    def await_spares(self, patience: float = 60.0) -> None:
        """Until each rank has a spare that has loaded its libraries, as in a service that has run for a while."""
        until = time.monotonic() + patience
        while True:
            titles = [title_of(pid) for pid in self.descendants()]
            ranks = sum(t.startswith("closeranks::rank") for t in titles)
            if ranks and titles.count("closeranks::spare loaded") >= ranks:
                return
            assert time.monotonic() < until, f"no spares: {titles}"
            time.sleep(0.2)

    def stop(self, patience: float = 60.0) -> int:
        """SIGTERM, and wait; its exit code. Everything it started must be gone."""
        pids = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not end {patience} s after SIGTERM:\n{self.tail()}") from None
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not left, f"processes left behind: {left}"
        return code

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def title_of(pid: int) -> str:
    """The name that a process gave itself; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def title(engine: str, name: str) -> str:
    return f"leader {engine}" if name == "leader" else f"rank {engine} TP{name.removeprefix('rank')}"


@contextmanager
def serve(model: Path | str, *flags: str | int, env: Sequence[tuple[str, str]] = ()) -> Iterator[Served]:
    """Start `closeranks serve` and wait until /ready says 200; end it at the end, and everything that it started."""
    run_dir = Path(tempfile.mkdtemp(prefix="cr-"))
    log = run_dir / "serve.log"
    argv = [sys.executable, "-m", "closeranks.cli.main", "serve", "--port", "0", "--run-dir", str(run_dir)]
    # a test's own model is converted into the run folder, the default one once into the user's cache
    argv += ["--model-path", str(model), "--cache-dir", str(run_dir / "cache")] if model else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, *map(str, flags)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(dict(env)),
        )
    served = Served(process, run_dir, log)
    try:
        _await_ready(served)
        yield served
        if process.poll() is None:
            assert served.stop() == 0
    finally:
        if process.poll() is None:
            pids = served.descendants()
            process.kill()
            process.wait()
            _await_gone(pids)
        shutil.rmtree(run_dir, ignore_errors=True)


def _environment(more: dict[str, str]) -> dict[str, str]:
    """One thread of OpenMP for each, random string hashes, and ranks with shifted clocks (`shifted/`)."""
    env = dict(os.environ, OMP_NUM_THREADS="1", **more)
    env.pop("PYTHONHASHSEED", None)
    path = [str(Path(__file__).parent / "shifted"), env.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(p for p in path if p)}


def _await_ready(served: Served) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if served.process.poll() is not None:
            raise AssertionError(f"serve ended with {served.process.returncode}:\n{served.tail()}")
        try:
            served.port = json.loads((served.run_dir / "gateway.json").read_text())["port"]
            if served.get("/ready", 2.0)[0] == 200:
                return
        except (OSError, ValueError):  # not yet
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready in {READY_S} s:\n{served.tail()}")


def _await_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
