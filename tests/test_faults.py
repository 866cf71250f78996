"""Specs are checked when they are given; a fault acts exactly when its spec says."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from closeranks import faults
from closeranks.cli.main import main
from closeranks.protocol import PeerMessage


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rank.nowhere:raise", "points: rank.forward"),
        ("rank.forward:explode", "actions: raise, loop"),
        ("rank.forward", "no action ''"),
        ("rank.forward:raise,after=0", "too small"),
        ("rank.forward:raise,after=x", "after=x"),
        ("rank.forward:raise,rank", "expected key=value"),
        ("transfer.start:stick,seconds=nan", "0 or more"),
        ("transfer.start:stick,seconds=-5", "0 or more"),
        ("peer.send:drop,message=grant", "one of Hello, Grant"),
        ("rank.forward:raise,engine=decod", "one of prefill, decode, both"),
        ("rank.forward:raise,rank=one", "expected a number"),
        ("rank.forward:raise,rank=1,rank=0", "given twice"),
        ("rank.row:raise", "needs token="),
    ],
)
def test_bad_specs_say_what_there_is(spec: str, says: str) -> None:
    with pytest.raises(faults.FaultSpecError, match=says):
        faults.parse(spec)


def test_acts_at_its_count_and_for_its_times() -> None:
    injector = faults.Injector(["rank.digest:wrong,rank=1,after=3,times=2"], rank=1)
    assert [injector.due("rank.digest") is not None for _ in range(6)] == [False, False, True, True, False, False]


def test_facts_of_process_and_point_must_match() -> None:
    injector = faults.Injector(["peer.send:drop,engine=decode,message=Grant,times=0"], engine="decode")
    assert injector.due("peer.send", message="End") is None
    assert injector.due("peer.send", message="Grant") is not None
    assert faults.Injector(["peer.send:drop,engine=decode"], engine="prefill").due("peer.send") is None


def test_raise_names_the_drill() -> None:
    with pytest.raises(faults.InjectedFault, match=r"injected: rank\.forward:raise"):
        faults.Injector(["rank.forward:raise"]).act("rank.forward")


def test_nothing_given_nothing_held() -> None:
    assert faults.injector([]) is None


def test_a_key_that_the_point_never_says_is_refused() -> None:
    with pytest.raises(faults.FaultSpecError, match=r"rank\.forward knows engine, role"):
        faults.parse("rank.forward:raise,egnine=decode")


def test_every_point_has_actions_and_keys() -> None:
    assert faults.KEYS.keys() == faults.POINTS.keys()


def test_a_fault_is_spent_once_over_all_epochs_of_its_process(tmp_path: Path) -> None:
    spec, always = "rank.forward:raise,rank=1,times=2", "rank.digest:wrong,times=0"
    record = tmp_path / faults.RECORD
    seen = []
    for epoch in range(4):
        injector = faults.Injector([spec, always], record, engine="decode", rank=1, epoch=epoch)
        seen.append((injector.due("rank.forward") is not None, injector.due("rank.digest") is not None))
    assert seen == [(True, True), (True, True), (False, True), (False, True)]
    # another process with the same spec has its own count
    assert faults.Injector([spec], record, engine="prefill", rank=1).due("rank.forward") is not None
    entries = faults.read_record(record)
    assert [e["spec"] for e in entries].count(spec) == 3
    assert entries[0]["who"] == {"engine": "decode", "rank": "1"}


def test_a_torn_record_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    record = tmp_path / faults.RECORD
    record.write_text('{"spec": "rank.forward:raise", "who": {}}\n[1]\n{"spec": "rank.fo')
    assert len(faults.read_record(record)) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]", "localhost", "ipc:///run/x", "tcp://127.0.0.3:9000"])
def test_faults_where_nobody_else_can_reach(address: str) -> None:
    faults.admit(["rank.forward:raise"], [address], False, {"both": 1}, True)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "tcp://10.0.0.5:9000", "example.org", "tcp://*:9000", ""])
def test_faults_within_reach_of_others_need_a_second_word(address: str) -> None:
    with pytest.raises(faults.FaultSpecError, match="--allow-faults"):
        faults.admit(["rank.forward:raise"], ["127.0.0.1", address], False, {"both": 1}, True)
    faults.admit(["rank.forward:raise"], [address], True, {"both": 1}, True)
    faults.admit([], [address], False, {"both": 1}, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fault", "rank.forward:raise,rank=9"], "ranks 0 to 0"),
        (["--fault", "rank.forward:raise,engine=both"], "which has prefill, decode"),
        (["--fault", "rank.forward:raise,engine=decode,role=prefill"], "no such engine"),
        (["--fault", "rank.forward:raise", "--fault", "rank.forward:raise"], "times=2"),
        (["--fault", "gateway.request:kill", "--disaggregation-mode", "prefill"], "no gateway"),
        (["--fault", "rank.nowhere:raise"], "points: rank.forward"),
        (["--fault", "rank.forward:raise", "--host", "0.0.0.0"], "--allow-faults"),
        (
            ["--fault", "rank.forward:raise", "--disaggregation-mode", "decode", "--control", "tcp://10.0.0.5:9000"],
            "--allow-faults",
        ),
    ],
)
def test_serve_refuses_before_it_starts_anything(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--dry-run", "--run-dir", str(tmp_path / "run"), *flags]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("point", faults.POINTS)
def test_every_point_is_reached_by_some_part(point: str) -> None:
    source = Path(faults.__file__).parent
    parts = [p for p in source.rglob("*.py") if p != Path(faults.__file__) and f'"{point}"' in p.read_text()]
    assert parts, f"nothing asks for {point}"


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("crash", signal.SIGSEGV)])
def test_what_ends_a_process_ends_it_and_is_on_record_before(
    action: str, number: signal.Signals, tmp_path: Path
) -> None:
    record = tmp_path / faults.RECORD
    program = (
        "from pathlib import Path; from closeranks.faults import Injector; "
        f"Injector(['rank.forward:{action}'], Path({str(record)!r}), rank=0).act('rank.forward')"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == -number
    assert [entry["spec"] for entry in faults.read_record(record)] == [f"rank.forward:{action}"]


def test_an_endless_loop_may_be_bounded() -> None:
    began = time.monotonic()
    assert faults.Injector(["rank.forward:loop,seconds=0.2"]).act("rank.forward") is not None
    assert time.monotonic() - began >= 0.2


def test_the_messages_that_can_be_lost_are_those_that_leaders_send() -> None:
    assert faults._WORDS["message"] == tuple(kind.__name__ for kind in get_args(PeerMessage))
    assert all(faults.parse(f"peer.send:drop,message={name}").match for name in faults._WORDS["message"])
