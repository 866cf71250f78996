"""Plain processes: started again as they were, once however often it is asked, with nothing of theirs left lying."""

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from closeranks.supervise.platforms import PlatformError, Process, Seen, Target, processes
from closeranks.supervise.platforms.plain import Plain, read_launch

# Writes what it inherited to the file in its first argument, then waits.
PROGRAM = """
import json, os, resource, sys, time
umask = os.umask(0)
os.umask(umask)
said = {
    "argv": sys.argv, "cwd": os.getcwd(), "secret": os.environ.get("HF_TOKEN"), "umask": umask,
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0), "pid": os.getpid(),
    "cpus": sorted(os.sched_getaffinity(0)), "stdin": os.readlink("/proc/self/fd/0"),
}
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(said, file)
print("up", flush=True)
os.rename(sys.argv[1] + ".part", sys.argv[1] + f".{os.getpid()}")
time.sleep(600)
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A first life, with things of its own; later ones that wrote into `tmp_path` are ended too."""
    script, work = tmp_path / "engine.py", tmp_path / "work folder"
    script.write_text(PROGRAM)
    work.mkdir()

    def dress() -> None:
        os.umask(0o037)
        os.nice(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (321, 4321))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    with (tmp_path / "engine.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "said"), "--port", "1", "a b"],
            cwd=work,
            env={**os.environ, "HF_TOKEN": "hf_abcdefghijklmnop"},
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=dress,
            start_new_session=True,
        )
    wait_for(tmp_path, 1)
    yield process
    for path in tmp_path.glob("said.*"):
        try:
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def wait_for(folder: Path, count: int) -> list[Path]:
    """Until so many lives have said what they are."""
    wait = threading.Event()
    for _ in range(300):
        found = [p for p in folder.glob("said.*") if p.suffix != ".part"]
        if len(found) >= count:
            return found
        wait.wait(0.05)
    raise AssertionError(f"{count} lives did not come")


def said(folder: Path, pid: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"said.{pid}").read_text())
    return found


def target_of(process: "subprocess.Popen[bytes]") -> Target:
    return Plain().find(Seen(name="decode-1", processes=processes.known([process.pid])))


def test_the_next_life_is_as_the_first_was(engine: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    plain, target = Plain(), target_of(engine)
    first = said(tmp_path, engine.pid)
    assert plain.end_tree(target, 10) == 1
    assert not plain.is_running(target)
    says = plain.start(target, "plan.decode-1", folder)
    (pid,) = (int(p.suffix[1:]) for p in wait_for(tmp_path, 2) if p.suffix != f".{engine.pid}")
    assert str(pid) in says
    second = said(tmp_path, pid)
    different = {key for key in first if first[key] != second[key]}
    assert different == {"pid"}
    assert second["umask"] == 0o037
    assert second["nofile"] == [321, 4321]
    assert (tmp_path / "engine.log").read_text() == "up\nup\n"
    assert os.getsid(pid) == pid
    assert not plain.has_ended(target, "plan.decode-1", folder)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert str(pid) in plain.has_ended(target, "plan.decode-1", folder)
    left = "".join(p.read_text() for p in folder.iterdir())
    assert "hf_abcdefghijklmnop" not in left, "the environment was left on disk"


def wait_gone(pid: int) -> None:
    wait = threading.Event()
    while (line := processes.line_of(pid)) is not None and line.state not in "ZX":
        wait.wait(0.02)


def test_one_start_comes_of_any_number_of_calls(engine: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    target = target_of(engine)
    calls = [threading.Thread(target=Plain().start, args=(target, "plan.decode-1", folder)) for _ in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert "not started again" in Plain().start(target, "plan.decode-1", folder)
    assert len(wait_for(tmp_path, 2)) == 2  # the first life, and one more


def test_a_start_whose_process_has_ended_may_be_made_again(engine: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    target = target_of(engine)
    Plain().start(target, "plan.decode-1", folder)
    (pid,) = (int(p.suffix[1:]) for p in wait_for(tmp_path, 2) if p.suffix != f".{engine.pid}")
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    assert "started as process" in Plain().start(target, "plan.decode-1", folder)
    assert len(wait_for(tmp_path, 3)) == 3
    assert not Plain().has_ended(target, "plan.decode-1", folder)


def test_a_start_that_left_processes_is_made_again_without_them(
    engine: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """A launcher that died before its ranks, or a start command that returns: they hold the GPU's memory."""
    folder = tmp_path / "state"
    folder.mkdir()
    target = target_of(engine)
    assert target.launch is not None
    returns = ("sh", "-c", f'{shlex.join(target.launch.argv)} & echo "$$" > {tmp_path}/shell; wait 600 2>/dev/null')
    launch = msgspec.structs.replace(target.launch, argv=returns, program=shutil.which("sh") or "")
    target = msgspec.structs.replace(target, launch=launch)
    seen = {engine.pid}
    for count in (2, 3, 4):
        Plain().start(target, "plan.decode-1", folder)
        (pid,) = {int(p.suffix[1:]) for p in wait_for(tmp_path, count)} - seen
        wait_gone(int((tmp_path / "shell").read_text()))
        assert Plain().has_ended(target, "plan.decode-1", folder)
        assert [p for p in seen - {engine.pid} if (line := processes.line_of(p)) and line.state not in "ZX"] == []
        seen.add(pid)


def test_what_cannot_be_executed_is_said(engine: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    target = target_of(engine)
    (tmp_path / "work folder").rmdir()
    with pytest.raises(PlatformError, match="work folder"):
        Plain().start(target, "plan.decode-1", folder)


def test_a_process_that_renamed_itself_needs_a_command(tmp_path: Path) -> None:
    program = (
        "import setproctitle, time; setproctitle.setproctitle('VLLM::APIServer'); print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = Seen(name="vllm-1", processes=processes.known([process.pid]))
        assert "renamed itself" in Plain().find(seen).detail
        with_command = Seen(name="vllm-1", processes=seen.processes, command=("sh", "-c", "exec sleep 600"))
        found = Plain().find(with_command)
        assert not found.detail
        assert found.launch is not None
        assert found.launch.program.endswith("/sh")
        process.kill()


def test_a_dead_launcher_is_started_again_from_memory(engine: "subprocess.Popen[bytes]") -> None:
    seen = Seen(name="decode-1", processes=processes.known([engine.pid]))
    remembered = read_launch(engine.pid)
    engine.kill()
    os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)  # a zombie: its command line reads as empty
    assert "nobody remembers" in Plain().find(seen).detail
    with subprocess.Popen(["sleep", "600"]) as rank:  # a rank whose command line would start something else
        left = Seen(name="decode-1", processes=processes.known([rank.pid]), orphaned=True)
        assert "nobody remembers" in Plain().find(left).detail
        rank.kill()
    again = Plain().find(Seen(name="decode-1", processes=seen.processes, remembered=remembered))
    assert again.launch == remembered
    assert not again.detail


def test_one_of_other_namespaces_needs_a_command(engine: "subprocess.Popen[bytes]") -> None:
    own = read_launch(engine.pid)
    assert own.foreign == ()
    far = msgspec.structs.replace(own, foreign=("net", "mnt"))
    engine.kill()
    os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
    life = (Process(engine.pid, 1),)
    found = Plain().find(Seen(name="far", processes=life, orphaned=True, remembered=far))
    assert found.launch is None
    assert "net, mnt" in found.detail
    assert "--start-command far=" in found.detail
    given = Plain().find(Seen(name="far", processes=life, orphaned=True, remembered=far, command=("/bin/true",)))
    assert given.launch is not None
    assert (given.launch.argv, given.detail) == (("/bin/true",), "")


def test_one_that_is_gone_is_not_found() -> None:
    with pytest.raises(PlatformError, match="none of its processes"):
        Plain().find(Seen(name="decode-1", processes=(Process(2**22 + 1, 5),)))


def test_its_command_line_is_shown_without_keys(engine: "subprocess.Popen[bytes]") -> None:
    target = target_of(engine)
    assert target.launch is not None
    launch = msgspec.structs.replace(target.launch, argv=(*target.launch.argv, "--api-key", "sk-verysecretkey1"))
    shown = Plain().describe(msgspec.structs.replace(target, launch=launch), "start")
    assert "sk-verysecretkey1" not in " ".join(shown)
    assert "--api-key" in shown
    assert Plain().describe(target, "end") == ("kill", "-KILL", str(engine.pid))
