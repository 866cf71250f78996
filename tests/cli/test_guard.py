"""`closeranks guard` as a process: starts, says where, ends at SIGTERM; refuses what makes no sense."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from closeranks.cli.main import main

GUARD = [sys.executable, "-m", "closeranks.cli.main", "guard"]


def test_starts_says_where_and_ends_at_sigterm() -> None:
    command = [*GUARD, "http://127.0.0.1:9/v1", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = json.loads(process.stdout.readline())
            assert line["schema"] == "closeranks.guard/1"
            assert line["upstream"] == "http://127.0.0.1:9"
            with urllib.request.urlopen(line["listening"] + "/metrics", timeout=20) as answer:
                assert b"closeranks_guard_open_streams 0.0" in answer.read()
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(line["listening"] + "/v1/models", timeout=20)
            assert caught.value.code == 502
            caught.value.close()
        finally:
            process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    "arguments", [["ftp://x"], ["nonsense"], ["http://x", "--tool-call-parser", "y"], ["http://x", "--policy", "z=1"]]
)
def test_arguments_that_make_no_sense_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["guard", *arguments]) == 2
    assert capsys.readouterr().err.startswith("closeranks guard: ")


def test_a_port_that_is_taken_is_not_a_verdict() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*GUARD, "http://127.0.0.1:9", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "cannot listen" in done.stderr
