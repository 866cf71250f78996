"""Recovery of a real `closeranks serve`: an engine without its gateway, a frozen supervisor, what it mends itself."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from closeranks.supervise.platforms import processes
from tests.e2e import tiny
from tests.e2e.service import Served, serve, title_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OUTPUT = 1500
FLAGS = ("--num-pages", 400, "--threads", 1, "--decode-tp-size", 2)
BODY = {"model": "default", "prompt": [7, 8, 9, 10] * 5, "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tiny.make(tmp_path / "tiny"), *FLAGS, "--port", free_port()) as found:
        yield found


def stream(served: Served, begun: Callable[[], None]) -> list[int]:
    """The tokens of a stream read to its end; `begun` is called at its first one."""
    body = {**BODY, "max_tokens": OUTPUT, "stream": True, "return_token_ids": True}
    request = urllib.request.Request(
        served.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    ids: list[int] = []
    with urllib.request.urlopen(request, timeout=240) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            if chunk["choices"]:
                ids = chunk["choices"][0].get("token_ids") or ids
                begun()
    return ids


def recover(served: Served, tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "closeranks.cli.main", "recover", *words, "--state-dir", str(tmp_path / "state")]
    command += ["--verdict", "MISSING_PARTICIPANT", "--verify-s", "60", "--ready-s", "120"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@contextmanager
def acting(tmp_path: Path, *which: str | int) -> Iterator["subprocess.Popen[str]"]:
    """An acting watch that has found both engines healthy; what it says is in `watch.log`. Ended at the end."""
    command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--act", "--json", "--probe", "never"]
    command += [*map(str, which), "--verify-s", "60", "--bundle-dir", str(tmp_path / "bundles")]
    command += ["--state-dir", str(tmp_path / "state")]
    log = tmp_path / "watch.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as watch,
    ):
        try:
            wait_said(log, '"phase": "healthy"', 2)
            yield watch
        finally:
            watch.send_signal(signal.SIGTERM)
            watch.communicate(timeout=90)


def until_recovered(watch: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What the watch reports, up to the end of a recovery."""
    assert watch.stdout is not None
    events: list[dict[str, Any]] = []
    for line in watch.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "recovery":
            break
    return events


def gateway_of(served: Served) -> int:
    pids = [p for p in served.descendants() if title_of(p).startswith("closeranks::gateway")]
    assert len(pids) == 1
    return pids[0]


def test_an_engine_is_replaced_under_a_stream_that_goes_on(served: Served, tmp_path: Path) -> None:
    expected = stream(served, lambda: None)
    assert len(expected) == OUTPUT
    decode = f"decode-{served.port}"
    before = {name: served.pid_of("decode", name) for name in ("leader", "rank0", "rank1")}
    others = {served.process.pid, gateway_of(served), served.pid_of("prefill", "leader")}

    shown = recover(served, tmp_path, "--engine", decode, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "platform supervised" in shown.stdout
    for pid in before.values():
        assert str(pid) in shown.stdout
    assert "closeranks::rank decode TP1" in shown.stdout
    first, _, later = shown.stdout.partition("peers, only if the check before it fails:")
    assert f" {served.pid_of('prefill', 'leader')} " in later
    for pid in others:
        assert f" {pid} " not in first, "it would take more with it"

    begun, got = threading.Event(), list[list[int]]()
    reading = threading.Thread(target=lambda: got.append(stream(served, begun.set)))
    reading.start()
    assert begun.wait(120)
    ran = recover(served, tmp_path, "--engine", decode, "--act", "--json")
    outcome = json.loads(ran.stdout)
    assert outcome["status"] == "recovered", (outcome, served.tail())
    assert [s["kind"] for s in outcome["steps"]][:2] == ["drain", "drain"]
    assert reading.is_alive() or got, "the stream ended by an error"
    reading.join(240)
    assert got == [expected]
    assert not any(Path(f"/proc/{pid}").exists() for pid in before.values())
    assert served.pid_of("decode", "leader") != before["leader"]
    assert others == {served.process.pid, gateway_of(served), served.pid_of("prefill", "leader")}
    served.assert_no_residue()


def test_a_frozen_gateway_is_replaced_and_no_engine(served: Served, tmp_path: Path) -> None:
    """By the service itself after 3 s, or by the watch, whoever comes first."""
    leaders = [served.pid_of(engine, "leader") for engine in ("prefill", "decode")]
    frozen, log = gateway_of(served), tmp_path / "watch.log"
    with acting(tmp_path, "--pid", served.process.pid):
        os.kill(frozen, signal.SIGSTOP)
        until = time.monotonic() + 120
        while Path(f"/proc/{frozen}").exists() or not answers(served):
            assert time.monotonic() < until, served.tail() + log.read_text()
            time.sleep(0.2)
    assert [served.pid_of(engine, "leader") for engine in ("prefill", "decode")] == leaders
    assert served.post("/v1/completions", {**BODY, "max_tokens": 5})["usage"]["completion_tokens"] == 5


def answers(served: Served) -> bool:
    try:
        return served.get("/ready")[0] == 200
    except OSError:
        return False


def test_a_service_that_was_killed_as_a_whole_is_started_by_the_watch(served: Served, tmp_path: Path) -> None:
    """With its supervisor all its processes end; nothing in its log says that this was wanted."""
    old, log = served.descendants(), tmp_path / "watch.log"
    try:
        with acting(tmp_path, "--url", served.url) as watch:
            wait_said(log, "how it is started is known", 1, f'"service-{served.port}"')
            served.process.kill()
            served.process.wait()
            events = until_recovered(watch)
        assert events[-1]["status"] == "recovered", events
        assert not any(Path(f"/proc/{pid}").exists() for pid in old)
        assert served.post("/v1/completions", {**BODY, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    finally:
        end_started(tmp_path / "state")


def end_started(state: Path) -> None:
    for taken in state.glob("*.taken"):
        processes.end(processes.known([int(taken.read_text().split()[0])]), 30)


def test_what_the_service_mends_by_itself_is_left_to_it(served: Served, tmp_path: Path) -> None:
    """A killed rank is a death, and the supervisor replaces the engine within seconds; an acting watch must not end
    the next life for what happened to the last one, nor the gateway."""
    gateway, log = gateway_of(served), tmp_path / "watch.log"
    with acting(tmp_path, "--pid", served.process.pid):
        before = len(log.read_text())
        os.kill(served.pid_of("decode", "rank1"), signal.SIGKILL)
        until = time.monotonic() + 120
        while (
            served.status().get("decode", {}).get("epoch") != 2 or served.get("/ready")[0] != 200 or busy(log, before)
        ):
            assert time.monotonic() < until, served.tail() + log.read_text()
            time.sleep(0.2)
    assert served.status()["decode"]["epoch"] == 2, log.read_text()
    assert gateway_of(served) == gateway
    assert served.post("/v1/completions", {**BODY, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    ended = [line for line in log.read_text().splitlines() if '"kind": "end"' in line]
    assert ended == []


def busy(log: Path, since: int) -> bool:
    """Whether the watch has not seen the new life of decode yet, or has a confirmation to think about."""
    lines = log.read_text()[since:].splitlines()
    seen = any('"decode-' in line and '"phase": "healthy"' in line for line in lines)
    begun = sum('"phase": "confirmed"' in line for line in lines)
    return not seen or begun > sum("engine is confirmed no longer" in line or "recovery over" in line for line in lines)


def wait_said(log: Path, text: str, times: int, beside: str = "") -> None:
    """Until so many lines of the log have both texts."""
    until = time.monotonic() + 120
    while sum(text in line and beside in line for line in log.read_text().splitlines()) < times:
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)


def test_a_service_whose_supervisor_is_frozen_is_started_anew(served: Served, tmp_path: Path) -> None:
    decode = f"decode-{served.port}"
    old = served.descendants()
    os.kill(served.process.pid, signal.SIGSTOP)
    shown = recover(served, tmp_path, "--engine", decode, "--dry-run")
    assert f"service-{served.port}: platform plain" in shown.stdout, shown
    assert "-m closeranks.cli.main serve" in shown.stdout
    assert all(str(pid) in shown.stdout for pid in old)
    try:
        ran = recover(served, tmp_path, "--engine", decode, "--act", "--json")
        outcome = json.loads(ran.stdout)
        assert outcome["status"] == "recovered", (outcome, served.tail())
        assert [s["engine"] for s in outcome["steps"] if s["kind"] == "end"] == [f"service-{served.port}"]
        served.process.wait(10)
        assert not any(Path(f"/proc/{pid}").exists() for pid in old)
        assert served.post("/v1/completions", {**BODY, "max_tokens": 5})["usage"]["completion_tokens"] == 5
    finally:
        end_started(tmp_path / "state")
