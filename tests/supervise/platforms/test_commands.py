"""systemd, Docker and Kubernetes: argument lists and the reading of answers; where a tool is here, it judges too."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from closeranks.supervise.platforms import PlatformError, Seen, StillAlive, detect, platform_named, processes
from closeranks.supervise.platforms import systemd as systemd_module
from closeranks.supervise.platforms.base import Ran, run
from closeranks.supervise.platforms.detect import NAMES, ends_with_us, from_cgroup, platform_of
from closeranks.supervise.platforms.docker import Docker
from closeranks.supervise.platforms.kubernetes import Kubernetes
from closeranks.supervise.platforms.systemd import Systemd, verify_unit

NOWHERE = Path("/nonexistent")
MISSING = Ran(1, "", "no answer was recorded")


class Recorded:
    """Answers by the words that a command holds; each list of answers is used up to its last, which stays."""

    def __init__(self, **answers: Sequence[Ran]) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._answers = {name: list(given) for name, given in answers.items()}

    def __call__(self, argv: Sequence[str], timeout_s: float) -> Ran:
        assert timeout_s > 0
        self.calls.append(tuple(argv))
        for name, given in self._answers.items():
            if name in argv:
                return given.pop(0) if len(given) > 1 else given[0]
        return MISSING


def shown(invocation: str, state: str = "active", result: str = "success") -> Ran:
    lines = ("LoadState=loaded", f"ActiveState={state}", f"Result={result}", f"InvocationID={invocation}")
    return Ran(0, "\n".join([*lines, "ControlGroup=", "MainPID=0"]) + "\n", "")


OK = Ran(0, "", "")
UNIT = Seen(name="decode-31022", processes=(), unit="sglang-decode.service")


def test_systemd_stops_before_it_kills_so_that_nothing_comes_back_in_between() -> None:
    runner = Recorded(show=[shown("one"), shown("one"), shown("one", "inactive")], stop=[OK], kill=[OK])
    systemd = Systemd(runner=runner, sleep=lambda _: None)
    target = systemd.find(UNIT)
    systemd.end_tree(target, 5)
    words = [call[1:] for call in runner.calls if call[1] != "show"]
    assert words == [
        ("stop", "--no-block", "sglang-decode.service"),
        ("kill", "--signal=SIGKILL", "sglang-decode.service"),
    ]
    assert systemd.describe(target, "end") == runner.calls[-2]


def test_systemd_leaves_a_later_life_alone() -> None:
    runner = Recorded(show=[shown("one"), shown("two")])
    systemd = Systemd(runner=runner)
    assert systemd.end_tree(systemd.find(UNIT), 5) == 0
    assert all(call[1] == "show" for call in runner.calls)


def test_a_unit_that_holds_more_than_the_engine_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner's or a supervisor's own unit: stopping it would end the watch, or engines of others."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        seen = Seen(name="decode", processes=processes.known([process.pid]), unit="runner.service")
        runner = Recorded(show=[shown("one")])
        monkeypatch.setattr(systemd_module, "_members", lambda cgroup: [os.getpid(), process.pid, 1])
        assert "holds other processes" in Systemd(runner=runner).find(seen).detail
        monkeypatch.setattr(systemd_module, "_members", lambda cgroup: [process.pid])
        assert not Systemd(runner=runner).find(seen).detail
        process.kill()


@pytest.mark.parametrize(
    ("state", "result", "wanted"),
    [
        ("active", "success", False),
        ("deactivating", "success", True),
        ("inactive", "success", False),  # as a vLLM leaves it whose engine process died
        ("deactivating", "exit-code", False),
        ("failed", "signal", False),
        ("inactive", "oom-kill", False),
    ],
)
def test_a_unit_that_somebody_is_stopping_is_told_from_one_that_ended(state: str, result: str, wanted: bool) -> None:
    found = Systemd(runner=Recorded(show=[shown("one", state, result)])).find(UNIT)
    assert bool(found.wanted) == wanted
    assert not found.detail


def test_a_container_that_has_exited_can_be_started_again() -> None:
    """Its exit code is the same after a crash, after our own stop, and after somebody else's."""
    found = Docker(runner=Recorded(inspect=[container(False, "t1")])).find(
        Seen(name="decode", processes=(), unit="decode-0")
    )
    assert (found.detail, found.wanted) == ("", "")


def test_a_pod_that_is_being_deleted_is_left_to_who_did_that() -> None:
    going = json.loads(pod("u1").out)
    going["metadata"]["deletionTimestamp"] = "2026-11-29T18:47:00Z"
    kubernetes = Kubernetes(runner=Recorded(json=[Ran(0, json.dumps(going), "")]))
    target = kubernetes.find(POD)
    assert ("is deleting" in target.wanted, target.detail) == (True, "")


def test_systemd_starts_units_that_failed_too_often() -> None:
    runner = Recorded(show=[shown("one")], start=[OK], **{"reset-failed": [Ran(1, "", "Unit x not loaded.")]})
    systemd = Systemd(user=True, runner=runner)
    systemd.start(systemd.find(UNIT), "token", NOWHERE)
    assert runner.calls[-2:] == [
        ("systemctl", "--user", "reset-failed", "sglang-decode.service"),
        ("systemctl", "--user", "start", "--no-block", "sglang-decode.service"),
    ]


def test_systemd_says_what_it_was_told() -> None:
    with pytest.raises(PlatformError, match="not-found"):
        Systemd(runner=Recorded(show=[Ran(0, "LoadState=not-found\n", "")])).find(UNIT)
    denied = Recorded(show=[shown("one")], stop=[Ran(1, "", "Interactive authentication required.")])
    systemd = Systemd(runner=denied)
    with pytest.raises(PlatformError, match="authentication required"):
        systemd.end_tree(systemd.find(UNIT), 5)


def test_systemd_waits_for_the_group_to_be_empty() -> None:
    runner = Recorded(show=[shown("one", "deactivating")], stop=[OK], kill=[OK])
    systemd = Systemd(runner=runner, sleep=lambda _: None)
    with pytest.raises(StillAlive):
        systemd.end_tree(systemd.find(UNIT), 0.05)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_files_are_judged_by_what_is_printed_not_by_the_exit_code(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.service", tmp_path / "bad.service"
    good.write_text("[Service]\nExecStart=/bin/true\n")
    bad.write_text("[Service]\nExecStart=/bin/true\nRestrat=always\n")
    assert run(("systemd-analyze", "verify", str(bad)), 15).code == 0
    assert any("Restrat" in line for line in verify_unit(bad))
    assert not [line for line in verify_unit(good) if "good.service" in line]


def container(running: bool, started: str, removed: bool = False) -> Ran:
    words = [str(running).lower(), str(removed).lower(), started]
    return Ran(0, " ".join(words) + "\n", "")


def test_docker_stops_and_starts_the_same_container() -> None:
    runner = Recorded(
        inspect=[container(True, "t1"), container(True, "t1"), container(False, "t1")], stop=[OK], start=[OK]
    )
    docker = Docker(runner=runner, sleep=lambda _: None)
    target = docker.find(Seen(name="decode", processes=(), unit="decode-0"))
    docker.end_tree(target, 30)
    docker.start(target, "token", NOWHERE)
    assert [call for call in runner.calls if call[1] != "inspect"] == [
        ("docker", "stop", "-t", "1", "decode-0"),
        ("docker", "start", "decode-0"),
    ]
    assert docker.describe(target, "start") == ("docker", "start", "decode-0")


def test_a_container_that_is_removed_when_it_ends_is_none_to_start_again() -> None:
    """What could not be started is not ended: `detail` refuses the plan."""
    for removed in (True, False):
        runner = Recorded(inspect=[container(True, "2026-11-29 18:47:00 +0000 UTC", removed)])
        target = Docker("podman", runner).find(Seen(name="decode", processes=(), unit="decode-0"))
        assert ("--rm" in target.detail) == removed
        assert target.life == "2026-11-29 18:47:00 +0000 UTC"


def test_docker_leaves_a_later_life_alone() -> None:
    runner = Recorded(inspect=[container(True, "t1"), container(True, "t2")])
    docker = Docker(runner=runner)
    assert docker.end_tree(docker.find(Seen(name="decode", processes=(), unit="decode-0")), 5) == 0
    assert docker.has_ended(docker.find(Seen(name="decode", processes=(), unit="decode-0")), "t", NOWHERE) == ""


def pod(uid: str, owned: bool = True) -> Ran:
    owners = [{"kind": "ReplicaSet", "name": "decode-5d", "controller": True}] if owned else []
    return Ran(0, json.dumps({"metadata": {"uid": uid, "ownerReferences": owners}}), "")


POD = Seen(name="decode", processes=(), unit="serving/decode-0")
GONE = Ran(1, "", 'Error from server (NotFound): pods "decode-0" not found')


def test_kubernetes_deletes_a_pod_that_a_controller_makes_anew_and_waits() -> None:
    runner = Recorded(
        json=[pod("u1")], delete=[OK], **{"jsonpath={.metadata.uid}": [Ran(0, "u1", ""), Ran(0, "u2", "")]}
    )
    kubernetes = Kubernetes(runner=runner, sleep=lambda _: None)
    target = kubernetes.find(POD)
    kubernetes.end_tree(target, 30)
    deleted = next(call for call in runner.calls if "delete" in call)
    assert deleted == (
        "kubectl", "delete", "pod", "decode-0", "--namespace", "serving", "--grace-period=2", "--wait=false",
    )  # fmt: skip
    assert "--force" not in deleted
    assert kubernetes.describe(target, "end") == deleted


def test_kubernetes_leaves_a_later_pod_of_the_same_name_alone() -> None:
    runner = Recorded(json=[pod("u1")], **{"jsonpath={.metadata.uid}": [Ran(0, "u2", "")]})
    kubernetes = Kubernetes(runner=runner)
    assert kubernetes.end_tree(kubernetes.find(POD), 5) == 0
    gone = Kubernetes(runner=Recorded(json=[pod("u1")], **{"jsonpath={.metadata.uid}": [GONE]}))
    assert gone.end_tree(gone.find(POD), 5) == 0


def test_kubernetes_does_not_delete_what_would_not_come_back() -> None:
    kubernetes = Kubernetes(runner=Recorded(json=[pod("u1", owned=False)]))
    target = kubernetes.find(POD)
    assert "no controller" in target.detail
    with pytest.raises(PlatformError, match="no controller"):
        kubernetes.end_tree(target, 5)


@pytest.mark.parametrize("name", NAMES)
def test_every_platform_has_the_whole_protocol(name: str) -> None:
    platform = platform_named(name)
    assert platform.name == name  # a target carries it to whoever ends and starts it
    assert isinstance(platform.tried, bool)
    for method in ("find", "is_running", "end_tree", "start", "has_ended", "describe"):
        assert callable(getattr(platform, method))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/sglang-decode.service\n", ("systemd", "sglang-decode.service")),
        ("0::/system.slice/sglang@decode.service/payload\n", ("systemd", "sglang@decode.service")),
        ("0::/user.slice/user-0.slice/user@0.service/app.slice/decode.service\n", ("systemd-user", "decode.service")),
        ("0::/user.slice/user-0.slice/session-3.scope\n", ("plain", "")),
        ("0::/system.slice/ssh.service\n", ("plain", "")),
        (f"0::/system.slice/docker-{'ab' * 32}.scope\n", ("docker", "ab" * 32)),
        (f"12:cpu:/docker/{'ab' * 32}\n", ("docker", "ab" * 32)),
        (f"0::/machine.slice/libpod-{'ab' * 32}.scope/container\n", ("podman", "ab" * 32)),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'ab' * 32}.scope\n", ("supervised", "")),
        ("2:cpuacct:/\n0::/\n", ("plain", "")),
        ("", ("plain", "")),
    ],
)
def test_the_platform_stands_in_the_cgroup(text: str, expected: tuple[str, str]) -> None:
    assert from_cgroup(text) == expected


WATCH = "0::/system.slice/closeranks-watch.service\n"


@pytest.mark.parametrize(
    ("cgroup", "mode", "ends"),
    [
        (WATCH, "control-group", True),
        (WATCH, "mixed", True),
        (WATCH, "process", False),
        (WATCH, "", False),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "control-group", False),
    ],
)
def test_what_is_started_from_a_unit_may_end_with_it(
    monkeypatch: pytest.MonkeyPatch, cgroup: str, mode: str, ends: bool
) -> None:
    monkeypatch.setattr(detect, "_cgroup", lambda pid: cgroup)
    assert bool(ends_with_us(Recorded(show=[Ran(0, f"KillMode={mode}\n", "")]))) == ends


def test_an_engine_that_the_watch_started_in_its_own_unit_is_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That unit would be stopped for it, and with it the watch. Another one that shares it may be supervisord's, who
    starts it again: started by us, too, it would run twice."""
    other = "0::/system.slice/sglang-decode.service\n"
    monkeypatch.setattr(detect, "_cgroup", lambda pid: other if pid == 1 else WATCH)
    (line,) = processes.known([os.getppid()])
    (tmp_path / "plan.decode.taken").write_text(f"{line.pid} {line.start}\n")
    (tmp_path / "plan.gone.taken").write_text(f"{line.pid} {line.start - 1}\n")
    (tmp_path / "plan.torn.taken").write_text("")
    assert platform_of(os.getpid(), tmp_path) == ("plain", "")
    assert platform_of(4711, tmp_path) == ("systemd", "closeranks-watch.service")
    assert platform_of(os.getpid(), tmp_path / "other") == ("systemd", "closeranks-watch.service")
    assert platform_of(1, tmp_path) == ("systemd", "sglang-decode.service")


def test_a_process_that_is_gone_has_no_platform() -> None:
    assert platform_of(2**22 + 1) == ("plain", "")


def test_a_tool_that_is_missing_or_hangs_is_said() -> None:
    with pytest.raises(PlatformError, match="no such command"):
        run(("closeranks-no-such-tool",), 5)
    with pytest.raises(PlatformError, match="did not end within"):
        run(("sleep", "30"), 0.1)


def test_supervised_ends_and_does_not_start() -> None:
    supervised = platform_named("supervised")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        target = supervised.find(Seen(name="decode", processes=processes.known([process.pid])))
        assert supervised.end_tree(target, 10) == 1
        assert "supervisor" in supervised.start(target, "token", NOWHERE)
        assert supervised.describe(target, "start") == ()
    assert process.pid != os.getpid()
