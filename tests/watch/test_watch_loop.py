"""The watch itself when things go wrong around it, its own endpoints, and the command."""

import asyncio
import json
import os
import re
import stat
import threading
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession

from closeranks.cli.main import main
from closeranks.evidence import capture
from closeranks.watch import patience, procfs, server, verdict
from closeranks.watch.incident import Incident
from closeranks.watch.loop import AGAIN, Watch
from closeranks.watch.machine import Memory, Past
from closeranks.watch.recover_state import NOT_OURS
from closeranks.watch.settings import Settings
from closeranks.watch.signals import stacks
from closeranks.watch.snapshot import Evidence, Proc, ProcRole, State
from closeranks.watch.verdict import Judged, beside_proof
from tests.watch.looks import NAME, engine

CONFIRMED = State(NAME, "confirmed", (Evidence("log", None, "its log says: x"),), 0.0)
NO_PID = 2**22 + 7


def myself(role: ProcRole, start_time: int = 0) -> Proc:
    row = procfs.row(os.getpid())
    assert row is not None
    return Proc(row.pid, start_time or row.start_time, row.ppid, role, NAME, None, "python3")


def test_of_a_pid_that_is_anothers_nothing_is_kept(tmp_path: Path) -> None:
    """Its engine died, and somebody was started who is none of ours: not dumped, not read, not in the bundle."""
    strangers = (myself("launcher", 1), myself("leader", 1))
    seen = msgspec.structs.replace(engine(), url=None, procs=strangers)

    async def go() -> tuple[stacks.Rounds, dict[str, bytes], dict[str, str]]:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        rounds = await stacks.take([seen], stacks.Dumping(), 0.1)
        files = await watch.keeper.collect([seen], rounds)
        await watch.close()
        return rounds, files.contents, await stacks.native(seen)

    rounds, files, native = asyncio.run(go())
    assert set(rounds.first.values()) == {f"no stacks: {stacks.GONE}\n"}
    assert set(rounds.proc_first.values()) == {f"{stacks.GONE}\n"}
    assert native == {}
    assert f"{NAME}/environment.txt" not in files
    assert f"{NAME}/flags.txt" in files
    assert f"{os.getpid()} " not in b"".join(files.values()).decode()


def test_a_py_spy_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 600\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(capture, "py_spy", lambda: str(program))
    monkeypatch.setattr(stacks, "PY_SPY_S", 0.5)
    seen = msgspec.structs.replace(engine(), procs=(myself("launcher"),))
    dumping = stacks.Dumping()
    rounds = asyncio.run(stacks.take([seen], dumping, 0.1))
    assert "did not answer" in rounds.first[f"{NAME}/launcher"]
    assert isinstance(rounds.readings[f"{NAME}/launcher"], stacks.Blind)
    assert dumping.until < time.monotonic()
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists() or capture._state(int(pid)) == "Z"


def test_a_discovery_that_hangs_does_not_stop_the_looks(tmp_path: Path) -> None:
    release = threading.Event()

    async def go() -> int:
        watch, stop = Watch(Settings(bundle_dir=str(tmp_path), interval=0.2)), asyncio.Event()
        watch.finder.find = lambda: release.wait() and ()  # type: ignore[method-assign,assignment,return-value]
        look = watch.look

        def counted() -> None:
            look()
            if watch.looks == 3:
                release.set()
                stop.set()

        watch.look = counted  # type: ignore[method-assign]
        await watch.run(stop)
        return watch.looks

    assert asyncio.run(go()) == 3


def test_a_full_disk_costs_the_bundle_and_not_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("closeranks.evidence.gather.store", full)

    async def go() -> Incident:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.keeper._judge = verdict.Judge(longest_s=500)
        try:
            return await watch.keeper.keep(CONFIRMED, watch.snapshot, {NAME: CONFIRMED}, None)
        finally:
            await watch.close()

    found = asyncio.run(go())
    assert found.folder == ""
    assert found.verdict.cls == "UNDETERMINED"
    assert "no verdict" not in found.verdict.summary


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SLICE_S", 0.01)


def judged(limit_s: float, longest_s: float, used_s: float) -> Judged:
    return asyncio.run(verdict.Judge(limit_s, longest_s, lambda pid: used_s).judge({"a": b"x"}))


@pytest.mark.parametrize("stopped", [True, False])
def test_a_wait_does_not_count_what_we_were_stopped_for(stopped: bool, short_slices: None) -> None:
    """And has an end all the same."""
    at = slices = 0

    def clock() -> float:
        nonlocal at
        at += 60 if stopped else 0
        return at

    def count() -> bool:
        nonlocal slices
        slices += 1
        return False

    async def go() -> bool:
        return await patience.within(asyncio.get_running_loop().create_future(), 0.1, count, clock)

    assert asyncio.run(go()) is False
    assert (20 <= slices < 40) if stopped else slices == 10


@pytest.mark.usefixtures("short_slices")
def test_a_diagnosis_that_got_no_cpu_is_not_late() -> None:
    found = judged(0.05, 500.0, 0.0)
    assert "no verdict" not in found.summary
    assert "verdict.json" in found.files


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize(("limit_s", "longest_s"), [(0.05, 500.0), (500.0, 0.05)])
def test_a_verdict_that_takes_too_long_is_undetermined_and_says_so(limit_s: float, longest_s: float) -> None:
    found = judged(limit_s, longest_s, 0.2)
    assert found.cls == "UNDETERMINED"
    assert re.fullmatch(r"no verdict: cut off after \d+ s, in which it used 0\.2 s of CPU", found.summary)


def test_the_cpu_of_a_process_counts() -> None:
    spent = verdict.cpu_s(os.getpid())
    while verdict.cpu_s(os.getpid()) < spent + 0.02:
        pass
    assert verdict.cpu_s(NO_PID) == 0.0


def test_no_diagnosis_speaks_against_a_proof() -> None:
    """Stacks of a service whose gateway is stopped show engines that wait for work; a restart must not be refused."""
    healthy = Judged("HEALTHY_IDLE", "likely", "idle", files={"verdict.md": "x"})
    found = beside_proof(healthy, "gateway (pid 7) is stopped by a signal")
    assert found.cls == "UNDETERMINED"
    assert found.cls not in NOT_OURS
    assert "gateway (pid 7)" in found.summary
    assert "HEALTHY_IDLE" in found.summary
    assert found.files == healthy.files
    named = Judged("MISSING_PARTICIPANT", "shown", "TP1 is stopped")
    assert beside_proof(named, "x") == named


def test_a_confirmed_engine_gets_one_bundle_and_the_caller_is_told(tmp_path: Path) -> None:
    told: list[Incident] = []

    async def go() -> None:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.on_change = lambda old, state: None
        watch._engines = ()

        async def hear(found: Incident) -> None:
            told.append(found)

        watch.on_incident = hear
        for _ in range(3):
            watch._changed(None, CONFIRMED)
        await watch.close(500)
        assert len(watch.incidents) == watch.incidents_total == 1

    asyncio.run(go())
    assert [found.engine for found in told] == [NAME] * 3, "it may have moved before anything was done about the first"
    assert [AGAIN in found.notes for found in told] == [False, True, True]
    assert len({found.folder for found in told}) == 1
    assert told[0].began < told[1].began
    assert len(list(tmp_path.iterdir())) == 1
    assert json.loads((next(tmp_path.iterdir()) / "manifest.json").read_text())["engine"] == NAME


def test_a_verdict_holds_for_its_ground_and_not_where_nothing_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was slow a minute ago may stand still now, with nothing kept that shows it."""
    unheard = State(NAME, "confirmed", (Evidence("probe", None, "unheard (3 of 3) for 12.5 s"),), 0.0)
    longer = State(NAME, "confirmed", (Evidence("probe", None, "unheard (4 of 4) for 31 s"),), 0.0)
    stands = State(NAME, "confirmed", (Evidence("proc", "TP1", "stands for 11 s"),), 0.0)
    verdicts = iter(["NOT_HUNG_SLOW_OR_CAPACITY", "NOT_HUNG_SLOW_OR_CAPACITY", "DEAD_PEER", "KV_TRANSFER"])
    told: list[Incident] = []

    async def go() -> None:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.on_change = lambda old, state: None

        async def keep(state: State, *_: object) -> Incident:
            return Incident(state.engine, 0.0, (), verdict=Judged(next(verdicts), "likely", ""))

        async def hear(found: Incident) -> None:
            told.append(found)

        monkeypatch.setattr(watch.keeper, "keep", keep)
        watch.on_incident = hear
        for state in (unheard, longer, longer, unheard, stands, stands):
            watch._changed(None, state)
        await watch.close(500)

    asyncio.run(go())
    slow = "NOT_HUNG_SLOW_OR_CAPACITY"
    assert [x.verdict.cls for x in told] == [slow, slow, "DEAD_PEER", "DEAD_PEER", "KV_TRANSFER", "KV_TRANSFER"]
    assert [x.news for x in told] == [True, False, True, False, True, False]


def test_the_log_of_an_engine_that_is_gone_as_a_whole_is_in_its_bundle(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("[x] Subprocess scheduler_1 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n")
    seen = msgspec.structs.replace(engine(base=NO_PID), logs=(str(log),), url=None)

    async def go() -> None:
        watch = Watch(Settings(bundle_dir=str(tmp_path / "bundles")))
        watch.on_change = lambda old, state: None
        watch.memory = Memory(past={NAME: Past(seen, 0.0, 0.0)}, states={NAME: CONFIRMED})
        watch._changed(None, CONFIRMED)
        await watch.close(500)

    asyncio.run(go())
    (folder,) = (tmp_path / "bundles").iterdir()
    assert "exit code -9" in (folder / NAME / "engine.log").read_text()


def test_another_life_that_is_confirmed_gets_a_bundle_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> int:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.on_change = lambda old, state: None

        async def kept(*_: object) -> Incident:
            return Incident(NAME, 0.0, ())

        monkeypatch.setattr(watch.keeper, "keep", kept)
        monkeypatch.setattr(watch.keeper, "prepare", lambda engines: asyncio.sleep(0))
        for base in (NO_PID, NO_PID, NO_PID + 100):
            watch._engines = (msgspec.structs.replace(engine(base=base), url=None),)
            watch._changed(None, CONFIRMED)
        watch._engines = ()
        await watch.close(500)
        return len(watch.incidents)

    assert asyncio.run(go()) == 2


def test_another_ground_in_the_same_life_gets_a_bundle_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict and plan of recovery would be of another fault."""

    async def go() -> list[Incident]:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.on_change = lambda old, state: None

        async def kept(state: State, *_: object) -> Incident:
            return Incident(NAME, 0.0, (state.cls,))

        monkeypatch.setattr(watch.keeper, "keep", kept)
        for state in (CONFIRMED, CONFIRMED, msgspec.structs.replace(CONFIRMED, cls="KV_TRANSFER")):
            watch._changed(None, state)
        await watch.close(500)
        return watch.incidents

    assert [found.why for found in asyncio.run(go())] == [("",), ("KV_TRANSFER",)]


def test_incidents_are_counted_beyond_those_that_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> tuple[int, int]:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))
        watch.on_change = lambda old, state: None

        async def kept(*_: object) -> Incident:
            return Incident(NAME, 0.0, ())

        monkeypatch.setattr(watch.keeper, "keep", kept)
        for number in range(53):
            watch._changed(None, State(f"decode-{number}", "confirmed", (), 0.0))
        await watch.close(500)
        return len(watch.incidents), watch.told().incidents

    assert asyncio.run(go()) == (50, 53)


def test_a_failure_of_who_is_told_is_said_and_the_watch_goes_on(tmp_path: Path) -> None:
    async def go() -> None:
        watch = Watch(Settings(bundle_dir=str(tmp_path)))

        async def fail(found: Incident) -> None:
            raise RuntimeError("webhook")

        watch.on_incident = fail
        watch._changed(None, CONFIRMED)
        await watch.close(500)
        assert len(watch.incidents) == 1

    asyncio.run(go())


def told(states: dict[str, State], looked: float = 100.0) -> server.Told:
    return server.Told(looked, states, 5, 1, {NAME: 1}, 0.5)


@pytest.mark.parametrize(
    ("states", "looked", "ok"),
    [
        ({}, 100.0, False),
        ({NAME: State(NAME, "blind", (), 0.0)}, 100.0, False),
        ({NAME: State(NAME, "healthy", (), 0.0)}, 100.0, True),
        ({NAME: CONFIRMED}, 100.0, True),
        ({NAME: State(NAME, "healthy", (), 0.0)}, 80.0, False),
    ],
)
def test_health_of_the_watch(states: dict[str, State], looked: float, ok: bool) -> None:
    assert server.healthy(told(states, looked), 101.0)[0] is ok


def test_its_own_endpoints() -> None:
    async def go() -> None:
        odd = 'a"b\\c'
        states = {NAME: CONFIRMED, "x": State("x", "suspect", (), 0.0), odd: State(odd, "blind", (), 0.0, ("log: no",))}
        runner, port = await server.serve(lambda: told(states, time.monotonic()), 0)
        async with ClientSession() as session:
            codes = {}
            for path in ("healthz", "metrics", "states", f"liveness/{NAME}", "liveness/x", "liveness/none"):
                async with session.get(f"http://127.0.0.1:{port}/{path}") as answer:
                    codes[path] = answer.status
                    text = await answer.text()
                    if path == "metrics":
                        assert f'closeranks_watch_engine_phase{{engine="{NAME}",phase="confirmed"}} 1' in text
                        assert 'engine="a\\"b\\\\c"' in text
        assert codes == {"healthz": 200, "metrics": 200, "states": 200, f"liveness/{NAME}": 503, "liveness/x": 200,
                         "liveness/none": 404}  # fmt: skip
        await runner.cleanup()

    asyncio.run(go())


@pytest.mark.parametrize(
    "argv",
    [
        ["--interval", "99"], ["--probe", "often"], ["--log", "x"], ["--url", "127.0.0.1:1"], ["--port", "x"],
        ["--url", "http://127.0.0.1"], ["--url", "http://127.0.0.1:x"], ["--url", "http://127.0.0.1:0"],
        ["--config", "/nonexistent.yaml"], ["--interval", "nan"], ["--port", "99999"], ["--port", "-7"],
        ["--wait-s", "nan"], ["--wait-s", "-1"], ["--log", "decode-1="], ["--webhook", "hooks.example/x"],
        ["--probe-url", "nowhere"], ["--router", "nowhere"], ["--cooldown-s", "nan"], ["--ready-s", "inf"],
        ["--verify-tries", "0"], ["--ramp", "0"], ["--per-hour", "-1"],
    ],
)  # fmt: skip
def test_wrong_settings_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *argv]) == 2
    said = capsys.readouterr().err
    assert argv[0] in said or argv[1] in said


@pytest.mark.parametrize("content", [b"\xff\xfe\x00x", b"[" * 100_000, b"- a", b"1: 2", b"interval: [1]", b"a: *b"])
def test_a_file_of_rubbish_is_named(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "watch.yaml"
    path.write_bytes(content)
    for command in (["watch", "--once"], ["top", "--once"], ["recover", "--journal"]):
        assert main([*command, "--config", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def test_where_there_is_nothing_to_see_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--pid", str(NO_PID), "--wait-s", "0", "--json"]) == 3
    assert "no engine was found" in capsys.readouterr().err


def test_the_memory_of_a_watch_without_engines_is_empty() -> None:
    assert Memory().states == {}
