"""`closeranks recover`: usage, the stop file, the journal; without an engine it does nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.cli._recover import choices_of
from closeranks.cli._settings import SettingsError
from closeranks.cli.main import main


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
    resumed = run("--resume", "--json", "--state-dir", str(state))
    assert resumed.returncode == 0
    assert json.loads(resumed.stdout)["status"] == "nothing"


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
