"""`recover --stop` must not look as if it had stopped what acts for another user, in another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.cli import _others, recover
from closeranks.cli.main import main
from closeranks.watch.procfs import Row

OURS = Path("/ours")
SOMEBODY = os.geteuid() + 1


def row(*argv: str) -> Row:
    return Row(4711, 1, 1, 1, "S", "closeranks", argv)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (("/usr/bin/python3", "/opt/bin/closeranks", "watch", "--act"), True),
        (("python3.11", "-m", "closeranks.cli.main", "recover", "--engine", "d", "--act"), True),
        (("closeranks", "recover", "--resume", "--state-dir", "/theirs"), True),
        (("closeranks", "watch", "--act", "--state-dir=/ours"), False),
        (("closeranks", "watch"), False),
        (("closeranks", "recover", "--stop"), False),
        (("sudo", "closeranks", "watch", "--act"), False),
        (("bash", "-c", "closeranks watch --act"), False),
        ((), False),
    ],
)
def test_who_acts_for_another_user(argv: tuple[str, ...], found: bool) -> None:
    said = _others.out_of_reach([row(*argv)], OURS, lambda pid: SOMEBODY)
    assert bool(said) == found
    assert not _others.out_of_reach([row(*argv)], OURS, lambda pid: os.geteuid()), "ours heeds our folder"
    if found:
        assert "process 4711 of" in said[0]


def test_one_that_has_ended_meanwhile_is_nobody() -> None:
    def gone(pid: int) -> int:
        raise FileNotFoundError

    assert not _others.out_of_reach([row("closeranks", "watch", "--act")], OURS, gone)


@pytest.mark.parametrize("word", ["--stop", "--go-on"])
def test_a_stop_that_reaches_nobody_is_no_success(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CLOSERANKS_STATE_DIR", raising=False)
    monkeypatch.setattr("closeranks.cli._recover.default_folder", lambda: tmp_path)
    monkeypatch.setattr(recover.procfs, "scan", lambda known: {4711: row("closeranks", "watch", "--act")})
    monkeypatch.setattr(_others, "out_of_reach", lambda rows, folder: [f"process {r.pid} of root acts" for r in rows])
    assert main(["recover", word]) == 3
    assert "process 4711 of root acts: this does not concern it" in capsys.readouterr().err
    assert main(["recover", word, "--state-dir", str(tmp_path)]) == 0, "its folder was chosen"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")
def test_a_folder_of_another_user_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    code = (
        "import os, sys; import closeranks.cli.recover; from closeranks.cli.main import main; os.setuid(65534); "
        "sys.exit(main(['recover', '--stop', '--state-dir', sys.argv[1]]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 3, ran.stderr
    assert "Permission denied: run it as the user that acts" in ran.stderr
    assert "Traceback" not in ran.stderr
