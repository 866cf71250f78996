"""A gateway process on a really bound port before stand-in leaders."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from closeranks.lifeline import PARENT

from . import tiny
from .double import Leader


@dataclass
class Running:
    """A gateway and its leaders."""

    url: str
    process: "subprocess.Popen[bytes]"
    leaders: list[Leader]
    log: Path

    @property
    def leader(self) -> Leader:
        """The one that sends tokens."""
        return self.leaders[-1]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true value of `what`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := what():
            return value
        time.sleep(0.01)
    raise AssertionError("it did not come true in time")


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except OSError:
        return 0


@contextmanager
def gateway(
    folder: Path,
    roles: tuple[str, ...] = ("both",),
    ready: bool = True,
    silent: bool = False,
    tcp: bool = False,
    stderr: int | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Start leaders and a gateway; both are gone afterwards. `stderr`: a descriptor in place of its log file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny.write(folder / "model")
    leaders = [Leader(f"ipc://{folder}/{role}{i}.sock", role, silent=silent) for i, role in enumerate(roles)]
    ends: dict[str, list[str]] = {}
    for leader in leaders:
        if tcp:
            leader.endpoint, leader.curve_key_file = "tcp://127.0.0.1:*", settings["curve_key_file"]
        leader.__enter__()
        ends.setdefault(leader.role, []).append(leader.endpoint)
    given = {"run_dir": str(folder), "model_dir": str(model), "port": 0, **ends, "log_format": "json", **settings}
    path = folder / "settings.json"
    path.write_text(json.dumps(given))
    log = folder / "gateway.log"
    said = folder / "gateway.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", PARENT: str(os.getpid())}
    with log.open("wb") as output:
        argv = [sys.executable, "-m", "closeranks.gateway", str(path)]
        process = subprocess.Popen(argv, stdout=output, stderr=output if stderr is None else stderr, env=env)
    try:
        own = f'"pid":{process.pid}}}'  # one that was killed leaves its file
        wait_for(lambda: (said.exists() and own in said.read_text()) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        url = f"http://127.0.0.1:{json.loads(said.read_text())['port']}"
        if ready:
            wait_for(lambda: status_of(url + "/ready") == 200)
        yield Running(url, process, leaders, log)
    finally:
        process.kill()
        process.wait()
        for leader in leaders:
            leader.__exit__()


@pytest.fixture(scope="session")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("gw")
    with gateway(
        folder,
        served_model_name="tiny",
        max_body_bytes=200_000,
        max_open_requests=40,
        header_timeout_s=1.0,
        body_timeout_s=1.0,
        comment_interval_s=0.5,
        engine_silence_s=3.0,
    ) as running:
        yield running


@pytest.fixture
def service(_shared: Running) -> Running:
    """One gateway for all quick tests, its leader as new."""
    _shared.leader.reset()
    wait_for(lambda: status_of(_shared.url + "/ready") == 200)
    return _shared
