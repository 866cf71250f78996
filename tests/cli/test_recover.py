"""`closeranks recover`: usage, the stop file, the journal; without an engine it does nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.cli._recover import choices_of
from closeranks.cli._settings import SettingsError
from closeranks.cli.main import main
from closeranks.cli.recover import _ending_well
from closeranks.watch import procfs
from closeranks.watch.recover_run import Outcome
from closeranks.watch.snapshot import EngineSeen, Proc


class Ran:
    """How a command ended."""

    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*words: str) -> Ran:
        try:
            code = main(["recover", *words])
        except SystemExit as left:  # argparse's way of saying usage
            code = int(left.code or 0)
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return call


def test_an_engine_that_is_not_there_is_said_and_nothing_is_made(tmp_path: Path, run: Callable[..., Ran]) -> None:
    ran = run("--engine", "decode-nowhere", "--act", "--state-dir", str(tmp_path / "state"))
    assert ran.returncode == 3
    assert "no such engine" in ran.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--act", "--dry-run", "--engine", "x"),
        ("--act",),
        ("--act", "--engine", "x", "--platform", "x"),
        ("--act", "--engine", "x", "--platform", "x=nowhere"),
        ("--act", "--engine", "x", "--unit", "x=u"),
        ("--act", "--engine", "x", "--start-command", "x=sh -c 'exec"),
        ("--act", "--engine", "x", "--cooldown-s", "soon"),
        ("--act", "--engine", "x", "--sides", "all"),
    ],
)
def test_usage(words: tuple[str, ...], tmp_path: Path, run: Callable[..., Ran]) -> None:
    ran = run(*words, "--state-dir", str(tmp_path))
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr


def test_stop_and_go_on_and_an_empty_journal(tmp_path: Path, run: Callable[..., Ran]) -> None:
    state = tmp_path / "state"
    assert run("--stop", "--state-dir", str(state)).returncode == 0
    assert (state / "STOP").read_text()
    assert state.stat().st_mode & 0o077 == 0
    assert run("--go-on", "--state-dir", str(state)).returncode == 0
    assert not (state / "STOP").exists()
    assert run("--journal", "--state-dir", str(state)).returncode == 0
    for what in ("--resume", "--give-up"):
        ran = run(what, "--json", "--state-dir", str(state))
        assert ran.returncode == 0
        assert json.loads(ran.stdout)["status"] == "nothing"


def test_a_dry_run_shows_platform_tree_and_start_and_no_key(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an operator must see before anything is ended: who goes, child by child, and what comes in their place."""
    code = "import os,sys; os.fork(); os.write(1, b'%d\\n' % os.getpid()); sys.stdin.read()"
    command = [sys.executable, "-c", code, "--api-key", "sk-verysecretkey1", "--port", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=tmp_path, text=True
    ) as child:
        assert child.stdout is not None
        pids = {int(child.stdout.readline()) for _ in range(2)}
        seen = procfs.row(child.pid)
        assert seen is not None
        head = Proc(child.pid, seen.start_time, seen.ppid, "launcher", "both-1", None, "python3")
        engine = EngineSeen("both-1", "sglang", "both", "http://127.0.0.1:1", (head,), seen.argv)
        monkeypatch.setattr("closeranks.cli.recover.Finder.find", lambda self: (engine,))
        words = ("--engine", "both", "--platform", "both-1=plain", "--state-dir", str(tmp_path / "state"), "--dry-run")
        text, as_json = run(*words), run(*words, "--json")
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        child.kill()
    assert text.returncode == 0, text.stderr
    assert "both-1: platform plain; its processes:" in text.stdout
    for pid in pids:
        assert f" {pid}  " in text.stdout
    assert f"started again by: {sys.executable} -c" in text.stdout
    assert f"in {tmp_path}, with its " in text.stdout
    assert "sk-verysecretkey1" not in text.stdout + as_json.stdout
    (ending,) = json.loads(as_json.stdout)["engines"]
    assert {row[0] for row in ending["processes"]} == pids
    assert ending["platform"] == "plain"
    assert not (tmp_path / "state").exists()


def test_a_signal_is_heeded_when_what_was_ended_is_started() -> None:
    order = list[str]()

    class Between:
        """A recovery that has ended an engine."""

        async def settled(self) -> bool:
            order.append("started")
            return True

        async def resume(self) -> Outcome | None:
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            finally:
                order.append("given up")
            return None

    recovery = Between()
    outcome = asyncio.run(_ending_well(recovery, recovery.resume()))  # type: ignore[arg-type]
    assert outcome is not None
    assert outcome.status == "stopped"
    assert "--resume" in outcome.says
    assert order == ["started", "given up"]


class Args:
    """Parsed options."""

    def __init__(self, **given: list[str]) -> None:
        self.platform = given.get("platform", [])
        self.unit = given.get("unit", [])
        self.start_command = given.get("start_command", [])


def test_choices_are_gathered_by_engine() -> None:
    given = Args(platform=["d=systemd"], unit=["d=a=b.service"], start_command=["p=sh -c 'exec x'"])
    found = choices_of(given)  # type: ignore[arg-type]
    assert (found["d"].platform, found["d"].unit) == ("systemd", "a=b.service")
    assert found["p"].command == ("sh", "-c", "exec x")
    with pytest.raises(SettingsError):
        choices_of(Args(unit=["d="]))  # type: ignore[arg-type]
