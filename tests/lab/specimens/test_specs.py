"""The declarations: complete, consistent, and in the words that verdicts use."""

import json
import subprocess
import sys

import pytest

from closeranks.lab.specimens import SPECIMENS
from closeranks.lab.specimens.directions import Directions

VERDICT_CLASSES = {
    "DESYNC_DIFFERENT_COLLECTIVE",
    "DESYNC_SAME_OP_SHAPE_OR_SEQ",
    "MISSING_PARTICIPANT",
    "UNMATCHED_COLLECTIVE_OR_P2P",
    "PP_STALL",
    "SYMMETRIC_WAIT",
    "DEVICE_HANG",
    "RUNTIME_LIBRARY_DEADLOCK",
    "HOST_DEVICE_INTERLOCK",
    "KV_TRANSFER",
    "STALE_PEER",
    "DEAD_PEER",
    "CRASH_LOOKS_LIKE_HANG",
    "HEALTH_FALSE_OK_ENGINE_DEAD",
    "FRONTEND_OR_CPU_BOUND",
    "GIL_DEADLOCK",
    "IPC_OR_EXTERNAL_LOST",
    "REQUEST_LEAK",
    "SCHEDULER_LIVELOCK",
    "UNSCHEDULABLE_REQUEST",
    "NOT_HUNG_SLOW_OR_CAPACITY",
    "HEALTHY_IDLE",
    "HEALTHY_WATCHDOG_FALSE_POSITIVE",
    "STARTUP",
    "ROUTER",
    "NETWORK_OR_TRANSPORT",
    "UNDETERMINED",
}
NOT_A_FAULT = {"HEALTHY_IDLE", "NOT_HUNG_SLOW_OR_CAPACITY", "STARTUP", "HEALTHY_WATCHDOG_FALSE_POSITIVE"}


@pytest.mark.parametrize("name", SPECIMENS)
def test_declares_a_known_verdict(name: str) -> None:
    specimen = SPECIMENS[name]
    assert {specimen.verdict_class, *specimen.also} <= VERDICT_CLASSES
    assert specimen.healthy == (specimen.verdict_class in NOT_A_FAULT)
    assert specimen.title
    assert specimen.picture


def test_ranks_are_named_for_every_world() -> None:
    specimen = SPECIMENS["different_collectives"]
    assert specimen.ranks("half", 4) == {0, 1}
    assert specimen.ranks("last", 3) == {2}
    assert specimen.ranks("first", 2) == {0}
    assert specimen.ranks("all", 2) == {0, 1}
    assert specimen.ranks("none", 2) == set()


def test_faults_and_look_alikes_are_both_there() -> None:
    faults = {s.verdict_class for s in SPECIMENS.values() if not s.healthy}
    assert len(faults) >= 10
    assert {"idle", "long_step", "startup", "paused"} <= {n for n, s in SPECIMENS.items() if s.healthy}


def test_directions_survive_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    given = Directions("idle", tmp_path, 7, 4321)  # type: ignore[arg-type]
    for key, value in given.environment().items():
        monkeypatch.setenv(key, value)
    assert Directions.read() == given


def test_the_command_lists_them_and_refuses_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "closeranks.cli.main", "specimen"]
    listed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert [json.loads(line)["name"] for line in listed.stdout.splitlines()] == list(SPECIMENS)
    refused = subprocess.run([*command, "nonesuch"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "different_collectives" in refused.stderr
    refused = subprocess.run([*command, "idle", "--world", "1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    refused = subprocess.run([*command, "idle", "--wait", "nan"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    late = subprocess.run([*command, "idle", "--wait", "0.01"], capture_output=True, text=True, check=False)
    assert late.returncode == 3
    assert "did not come within 0.01 s" in late.stderr
    assert "--wait" in late.stderr
