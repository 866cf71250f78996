"""The command itself: it lists what there is, refuses what there is not, and leaves quietly when its reader leaves."""

import subprocess
import sys

import pytest

from closeranks.cli import main


def test_every_command_has_help() -> None:
    assert {"serve", "gateway", "guard", "diagnose", "audit", "replay"} <= set(main.commands())
    for name in main.commands():
        with pytest.raises(SystemExit) as ended:
            main.main([name.replace("_", "-"), "--help"])
        assert ended.value.code == 0


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["juggle"])
    assert ended.value.code == 2


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m closeranks.cli.main diagnose --rules | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout
    assert "Traceback" not in done.stderr
