"""What `serve` refuses before it starts anything, and what it would start."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from closeranks.cli import gateway, main, serve
from closeranks.cli._settings import SettingsError
from closeranks.supervise.engine import Epoch
from tests.e2e import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a tiny model, converted once."""
    folder = tmp_path_factory.mktemp("serve")
    return ["--model-path", str(tiny.make(folder / "model")), "--cache-dir", str(folder / "cache")]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """With a path that leaves room for sockets in it; `tmp_path` has the names of user, worker and test in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def test_a_port_that_is_taken_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Not after the engines have loaded, by a gateway that is started again and again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main.main(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert "--port" in said


@pytest.mark.parametrize("flags", [["--tool-call-parser", "foo"], ["--reasoning-parser", "foo"]])
def test_what_the_gateway_would_refuse_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "--dry-run", *flags]) == 2
    assert "unknown parser 'foo'; known are" in capsys.readouterr().err


def test_a_setting_of_few_values_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "--dry-run", "--collectives", "foo"]) == 2
    assert "one of shm, gloo, nccl" in capsys.readouterr().err


def test_more_ranks_than_the_model_can_be_dealt_to(
    model: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["serve", "--dry-run", "--tp-size", "9", *model, "--run-dir", str(run_dir)]) == 2
    assert "tp_size 9 is more than the model's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tp-size", "0"], "--tp-size: Expected `int` >= 1"),
        (["--decode-tp-size", "-1"], "--decode-tp-size: Expected `int` >= 1"),
        (["--drain-s", "nan"], "--drain-s"),
        (["--drain-s", "-5"], "--drain-s"),
        (["--lease-s", "-1"], "--lease-s"),
        (["--step-deadline-s", "nan"], "--step-deadline-s"),
        (["--request-timeout-s", "inf"], "--request-timeout-s"),
        (["--max-waiting", "0"], "--max-waiting"),
        (["--device", "tpu"], "--device"),
        (["--curve-key-file", "/nonexistent"], "/nonexistent"),
        (["--chat-template", "/nonexistent"], "/nonexistent"),
    ],
)
def test_what_every_process_would_end_with_is_refused(
    flags: list[str], text: str, model: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by processes that are started again and again."""
    assert main.main(["serve", "--dry-run", "--run-dir", str(run_dir), *model, *flags]) == 2
    assert text in capsys.readouterr().err


KEY = ["--curve-key-file", "KEY"]
PREFILL = ["serve", "--disaggregation-mode", "prefill", "--control"]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ([*PREFILL, "foo"], "--control foo: give tcp://HOST:PORT or ipc://PATH"),
        ([*PREFILL, "http://x"], "--control http://x: give tcp"),
        ([*PREFILL, "tcp://x", *KEY], "--control tcp://x: give tcp"),
        ([*PREFILL, "tcp://127.0.0.1:TAKEN", *KEY], "cannot listen on tcp://127.0.0.1:"),
        ([*PREFILL, "tcp://192.0.2.1:9000", *KEY], "cannot listen on tcp://192.0.2.1:9000"),
        ([*PREFILL, "ipc:///" + "x" * 200], "a path too long"),
        (["serve", "--port", "0", "--host", "nosuch.invalid"], "nosuch.invalid:0"),
        (["serve", "--port", "0", "--host", "x" * 70], "give another --port or --host"),
        (["gateway", "--both", "foo"], "--both foo: give tcp"),
        (["gateway", "--prefill", "ipc:///a", "--decode", "tcp://:1"], "--decode tcp://:1: give tcp"),
        (["gateway", "--both", "tcp://127.0.0.1:9000"], "needs --curve-key-file"),
        (["gateway", "--both", "ipc:///a", "--curve-key-file", "/nonexistent"], "/nonexistent"),
        (["gateway", "--both", "ipc:///a", "--port", "TAKEN"], "cannot bind 127.0.0.1:"),
    ],
    ids=lambda p: " ".join(p)[:60] if isinstance(p, list) else "",
)
def test_an_address_that_cannot_work_is_refused(
    command: list[str],
    text: str,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not by processes that end with a traceback, again and again."""
    monkeypatch.setattr(serve, "LEAVES_S", 0.3)
    assert main.main(["keygen", str(tmp_path / "key")]) == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [word.replace("TAKEN", port).replace("KEY", str(tmp_path / "key")) for word in command]
        assert main.main([*words, "--run-dir", str(run_dir)]) == 2
    assert text in capsys.readouterr().err


def test_a_leader_that_was_killed_a_moment_ago_may_still_have_its_address() -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    leaves = threading.Timer(0.5, taken.close)
    leaves.start()
    serve.check_bind(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert not leaves.is_alive()


def test_a_model_has_one_name_under_both_commands(model: list[str], run_dir: Path) -> None:
    values = {"model_path": model[1], "cache_dir": model[3], "both": ["ipc:///a"]}
    alone = json.loads(gateway._write(dict(values), run_dir).read_text())
    served = serve.gateway_program(run_dir, {"both": "ipc:///a"}, dict(values), 1.0).settings
    assert alone["served_model_name"] == served["served_model_name"] == Path(model[1]).name


@pytest.mark.parametrize(("stream", "code", "said"), [("1", 3, "standard output is closed"), ("2", 0, "")])
def test_closed_standard_streams(
    stream: str, code: int, said: str, model: list[str], run_dir: Path, tmp_path: Path
) -> None:
    """Nothing that is opened later takes their place: a lock file got what the processes print."""
    command = f"exec {sys.executable} -m closeranks.cli.main serve --dry-run --run-dir {run_dir} {' '.join(model)}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {stream}>&- 0<&-"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr
    assert (run_dir / "lock").read_text().strip().isdecimal()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_run_folder_that_cannot_be_written(place: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert main.main(["serve", "--dry-run", "--run-dir", str(tmp_path / place)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / place) in said
    assert "--run-dir" in said


@pytest.mark.parametrize("set_by_user", ["", "glibc.malloc.arena_max=2"])
def test_ranks_ask_for_huge_pages_unless_the_user_tunes_the_library(
    set_by_user: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if set_by_user:
        monkeypatch.setenv("GLIBC_TUNABLES", set_by_user)
    values = {"model_path": "model", "cache_dir": str(tmp_path)}
    leader, *ranks = serve.plan("both", tmp_path, "tcp://127.0.0.1:1", 2, values)(Epoch(1, 1, 1, 0), tmp_path)
    assert [r.env for r in ranks] == [{} if set_by_user else {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}] * 2
    assert leader.env == {}


def test_sigusr1_writes_the_stacks_of_a_supervisor_and_ends_nothing(run_dir: Path) -> None:
    program = "import os, sys, pathlib; from closeranks.cli import serve\n"
    program += "serve.stacks_on_signal(pathlib.Path(sys.argv[1]))\ndef here(): os.kill(os.getpid(), 10)\nhere()"
    run_dir.mkdir()
    path = run_dir / "supervisor.stacks"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
    assert "in here" in path.read_text()
    with pytest.raises(SettingsError, match="cannot be used as run folder"):
        serve.stacks_on_signal(run_dir / "none" / "supervisor.stacks")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer"),
        ("chat_template.jinja", "{% if %}", "chat template does not parse"),
    ],
)
def test_a_model_that_the_gateway_cannot_read_is_said_at_once(
    file: str, text: str, said: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by a service that loads its engines and is never ready."""
    folder = tiny.make(tmp_path / "model")
    (folder / file).write_text(text)
    flags = ["--model-path", str(folder), "--cache-dir", str(tmp_path / "cache"), "--run-dir", str(run_dir)]
    flags += ["--port", "0"]
    for command in (["serve", "--dry-run"], ["gateway", "--both", "ipc:///nowhere"]):
        assert main.main([*command, *flags]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert str(folder) in told


def test_a_converted_model_is_no_source(
    model: list[str], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder looks like a Hugging Face one. An engine served alone says so, too, before anything is started."""
    assert main.main(["serve", "--dry-run", "--port", "0", "--run-dir", str(run_dir), *model]) == 0
    cache = Path(model[3])
    made = next(path.parent for path in cache.glob("*/manifest.json"))
    capsys.readouterr()
    for mode in ("pair", "decode"):
        flags = ["--model-path", str(made), "--cache-dir", str(tmp_path), "--run-dir", str(run_dir), "--port", "0"]
        assert main.main(["serve", "--dry-run", "--disaggregation-mode", mode, *flags]) == 2
        told = capsys.readouterr().err
        assert str(made) in told
        assert "made from" in told


def test_nixl_that_is_not_installed_is_said_at_once(
    model: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", {}.get)
    flags = ["--disaggregation-transfer-backend", "nixl", "--port", "0", "--run-dir", str(run_dir), *model]
    assert main.main(["serve", "--dry-run", *flags]) == 2
    assert "closeranks[nixl]" in capsys.readouterr().err
