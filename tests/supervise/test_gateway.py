"""The gateway under supervision: one that stands still is replaced, evidence first; one that ends has its last word."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from closeranks.supervise import gateway as gateway_module
from closeranks.supervise import standing
from closeranks.supervise.engine import Program
from closeranks.supervise.gateway import Gateway

# Beats as the real one does; what it does besides is in its settings. It writes each signal that it was sent.
PROGRAM = """
import json, os, signal, sys, time
from closeranks.lifeline import Heart
settings, heart, sent = json.load(open(sys.argv[1])), Heart(), []
assert "CLOSERANKS_HEART" not in os.environ
def on(number, frame):
    sent.append(number)
    print("signal", number, flush=True)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on)
print("up", os.getpid(), flush=True)
while len(sent) < settings["deaf"]:
    heart.beat()
    if os.path.exists(settings["now"]):
        os.unlink(settings["now"])
        while settings["then"] == "loops":
            pass
        time.sleep(1000)
    time.sleep(0.05)
print("last word", flush=True)
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "beats.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for name, seconds in (("HEARTBEAT_S", 1.0), ("STILL_S", 0.4), ("LOOP_S", 1.5), ("STOPPED_S", 0.8)):
        monkeypatch.setattr(standing, name, seconds)


class Kept:
    """A gateway that is kept up while `steps` run."""

    def __init__(self, tmp_path: Path, then: str = "", deaf: int = 1, drain_s: float = 20.0) -> None:
        self.now = tmp_path / "now"
        settings: dict[str, object] = {"now": str(self.now), "then": then, "deaf": deaf}
        self.gateway = Gateway(Program("gateway", "beats", settings), sys.executable, tmp_path / "run", drain_s)
        self.running: asyncio.Task[None] | None = None

    def text(self) -> str:
        return self.gateway.log.read_text() if self.gateway.log.exists() else ""

    async def until(self, holds: Callable[[], bool], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert self.running is not None
            assert not self.running.done()
            assert time.monotonic() < end, self.text()
            await asyncio.sleep(0.05)

    def drive(self, steps: Callable[[], Awaitable[None]]) -> float:
        """Seconds that its end took after the steps."""

        async def main() -> float:
            self.running = asyncio.create_task(self.gateway.run())
            try:
                await steps()
                begun = time.monotonic()
                self.gateway.stop()
                await asyncio.wait_for(self.running, 30)
                return time.monotonic() - begun
            finally:
                for _ in range(3):
                    self.gateway.stop()
                await asyncio.gather(self.running, return_exceptions=True)

        return asyncio.run(main())

    def manifests(self) -> list[dict[str, object]]:
        found = sorted((self.gateway.log.parent / "gateway" / "incidents").glob("*/manifest.json"))
        return [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize("how", ["stopped", "sticks", "loops"])
def test_one_that_stands_still_is_replaced_with_evidence(tmp_path: Path, how: str) -> None:
    kept = Kept(tmp_path, how)

    async def steps() -> None:
        await kept.until(lambda: "up" in kept.text())
        first = kept.gateway.child
        assert first is not None
        if how == "stopped":
            os.kill(first.pid, signal.SIGSTOP)
        else:
            kept.now.touch()
        await kept.until(lambda: kept.text().count("up") == 2)
        assert first.exit_code == -signal.SIGKILL

    kept.drive(steps)
    said = {"stopped": "has been stopped by a signal", "sticks": "and does not run", "loops": "s of CPU"}[how]
    (manifest,) = kept.manifests()
    assert said in str(manifest["reason"])
    assert manifest["engine"] == "gateway"
    assert {"gateway.log", "gateway.proc.txt", "gateway.stacks.txt"} <= set(manifest["files"])  # type: ignore[call-overload]
    assert kept.text().endswith(f"signal {signal.SIGTERM:d}\nlast word\n")


def test_one_that_is_stopped_for_a_moment_or_cannot_beat_is_left_alone(tmp_path: Path) -> None:
    kept = Kept(tmp_path)

    async def steps() -> None:
        await kept.until(lambda: "up" in kept.text())
        assert kept.gateway.child is not None
        os.kill(kept.gateway.child.pid, signal.SIGSTOP)
        await asyncio.sleep(0.3)
        os.kill(kept.gateway.child.pid, signal.SIGCONT)
        await asyncio.sleep(2.0)
        assert kept.text().count("up") == 1

    kept.drive(steps)
    assert not kept.manifests()


def test_asked_again_it_is_asked_to_hurry_and_only_killed_if_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "HURRY_S", 1.0)
    for deaf, word in ((2, True), (9, False)):  # the second ends at the second signal, the third at none
        kept = Kept(tmp_path / str(deaf), deaf=deaf)

        async def steps(kept: Kept = kept) -> None:
            await kept.until(lambda: "up" in kept.text())
            kept.gateway.stop()  # and once more when it is ended

        assert kept.drive(steps) < 15, "not as long as it would drain"
        assert kept.text().endswith("last word\n") is word
        assert {f"signal {n:d}" for n in (signal.SIGTERM, signal.SIGINT)} <= set(kept.text().splitlines())


def test_one_that_stands_still_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    kept = Kept(tmp_path, deaf=9)

    async def steps() -> None:
        await kept.until(lambda: "up" in kept.text())
        assert kept.gateway.child is not None
        os.kill(kept.gateway.child.pid, signal.SIGSTOP)

    assert kept.drive(steps) < 15


def test_an_incident_that_cannot_be_written_holds_nothing_up(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "loops")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "gateway").touch()  # in the place of the folder

    async def steps() -> None:
        await kept.until(lambda: "up" in kept.text())
        kept.now.touch()
        await kept.until(lambda: kept.text().count("up") == 2)

    kept.drive(steps)
