"""A pair whose engines are served apart over TCP, as on two hosts; with a `Link`, really in two networks."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.link import HERE, THERE, Link
from tests.e2e.service import READY_S, Served


class Apart(Served):
    """Three commands in place of one: `prefill`, `decode`, `gateway`. `process` is the gateway."""

    def __init__(self, run_dir: Path, engine: Sequence[str], models: dict[str, Path], link: Link | None) -> None:
        self.run_dir = run_dir
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        self.log = run_dir / "gateway.out"
        self.port = 0
        self._engine = list(engine)
        self._models = models
        self.link = link
        self._control = {
            "prefill": f"tcp://{THERE if link else '127.0.0.1'}:{free_port()}",
            "decode": f"tcp://{HERE if link else '127.0.0.1'}:{free_port()}",
        }
        closeranks = [sys.executable, "-m", "closeranks.cli.main"]
        subprocess.run([*closeranks, "keygen", str(run_dir / "key")], check=True, capture_output=True)
        for role in self._control:
            self.start(role)
        pair = [word for role in self._control for word in (f"--{role}", self._control[role])]
        self._start("gateway", ["gateway", *pair, "--port", "0"], models["decode"])
        self.process = self.commands["gateway"]

    def start(self, role: str) -> None:
        """Start an engine, or start it again, at its address."""
        argv = ["serve", "--disaggregation-mode", role, "--control", self._control[role], *self._engine]
        self._start(role, argv, self._models[role])

    def _start(self, name: str, words: list[str], model: Path) -> None:
        place = self.run_dir / name
        argv = [sys.executable, "-m", "closeranks.cli.main", *words, "--curve-key-file", str(self.run_dir / "key")]
        argv += ["--run-dir", str(place), "--model-path", str(model), "--cache-dir", str(place / "cache")]
        if self.link and name == "prefill":
            argv = ["ip", "netns", "exec", self.link.namespace, *argv]
        env = dict(os.environ, OMP_NUM_THREADS="1")
        if self.link and name == "decode":
            env["UCX_NET_DEVICES"] = self.link.device  # NIXL would offer addresses that the other side cannot reach
        with (self.run_dir / f"{name}.out").open("ab") as out:
            self.commands[name] = subprocess.Popen(argv, stdout=out, stderr=out, env=env)

    def descendants(self) -> list[int]:
        found = []
        for process in self.commands.values():
            self.process = process
            found += super().descendants()
        self.process = self.commands["gateway"]
        return found

    def stop(self, patience: float = 60.0) -> int:
        for name in ("gateway", "prefill", "decode"):
            self.commands[name].send_signal(signal.SIGTERM)
        return max(self.commands[name].wait(patience) for name in self.commands)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(p.read_text(errors="replace")[-2000:] for p in self.run_dir.glob("*.out"))

    def await_ready(self, matching: bool = True) -> None:
        """Until /ready says 200; not `matching`: until the gateway knows both engines to be ready."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            ended = [name for name, process in self.commands.items() if process.poll() is not None]
            assert not ended, f"{ended} ended:\n{self.tail()}"
            try:
                self.port = json.loads((self.run_dir / "gateway" / "gateway.json").read_text())["port"]
                if matching and self.get("/ready", 2.0)[0] == 200:
                    return
                if not matching and [e["state"] for e in self.status().values()] == ["ready", "ready"]:
                    return
            except (OSError, ValueError):  # not yet
                pass
            time.sleep(0.2)
        raise AssertionError(f"not ready in {READY_S} s:\n{self.tail()}")


@contextmanager
def apart(
    models: dict[str, Path], *flags: str | int, link: Link | None = None, matching: bool = True
) -> Iterator[Apart]:
    """Both engines and a gateway, ended at the end."""
    run_dir = Path(tempfile.mkdtemp(prefix="cra-"))
    served = Apart(run_dir, [str(flag) for flag in flags], models, link)
    try:
        served.await_ready(matching)
        yield served
    finally:
        for process in served.commands.values():
            if process.poll() is None:
                process.terminate()
        for process in served.commands.values():
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()  # what it started dies with it
                process.wait()
        shutil.rmtree(run_dir, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
