"""Supervision with real processes: whole replacement at any end, evidence before it, no process left, storms stop."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from closeranks.diagnose.judge import diagnose_paths
from closeranks.faults import RECORD
from closeranks.supervise import engine as engine_module
from closeranks.supervise import loading, standing
from closeranks.supervise.engine import Engine, Epoch, Program, State

# A leader that beats, or a rank that waits; either does what its settings say to do at which epoch.
PROGRAM = """
import json, os, pathlib, sys, time
settings = json.load(open(sys.argv[1]))
folder = pathlib.Path(sys.argv[1]).parent
(folder / (settings["name"] + ".pid")).write_text(str(os.getpid()))
while True:
    if settings["beats"] and folder.exists():
        (folder / "heartbeat").touch()
    if settings["exit"] is not None:
        name = settings.get("fault", "planned")
        (folder / "fault.json").write_text(json.dumps({"name": name, "detail": "by the test"}))
        sys.exit(settings["exit"])
    time.sleep(0.05)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scripted.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "scripted"


def planned(module: str, exits: Callable[[int, str], int | None]) -> engine_module.Plan:
    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        return [
            Program(name, module, {"name": name, "beats": name == "leader", "exit": exits(epoch.number, name)})
            for name in ("leader", "rank0", "rank1")
        ]

    return plan


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def drive(engine: Engine, seen: asyncio.Queue[State], steps: Callable[[], Awaitable[None]]) -> None:
    run = asyncio.create_task(engine.run())
    try:
        await asyncio.wait_for(steps(), 60)
    finally:
        engine.stop()
        await asyncio.wait_for(run, 30)


def make(tmp_path: Path, plan: engine_module.Plan) -> tuple[Engine, asyncio.Queue[State]]:
    seen: asyncio.Queue[State] = asyncio.Queue()
    return Engine("prefill", sys.executable, tmp_path / "run", plan, lambda e: seen.put_nowait(e.state)), seen


async def until(seen: asyncio.Queue[State], state: State) -> None:
    while await seen.get() is not state:
        pass


def verdict(engine: Engine) -> tuple[str, str, str]:
    """Class, certainty and the first words of what `diagnose` says of the last incident."""
    assert engine.last_incident is not None
    main = diagnose_paths([engine.last_incident]).findings[0]
    return main.cls, main.certainty, main.summary.partition(";")[0]


def test_a_dead_rank_replaces_the_whole_engine(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            first = {c.name: c.pid for c in engine.children}
            os.kill(first["rank1"], signal.SIGKILL)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            assert engine.epoch.ended == 1
            assert not any(alive(pid) for pid in first.values())
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert manifest["exit_codes"]["rank1"] == -signal.SIGKILL
            assert "rank1 was ended by signal 9" in manifest["reason"]
            assert "scripted" in (engine.last_incident / "rank0.stacks.txt").read_text()
            assert verdict(engine) == ("DEAD_PEER", "shown", "rank 1 of prefill was ended from outside (SIGKILL)")

        await drive(engine, seen, steps)
        assert engine.state is State.STOPPED
        assert not any(alive(c.pid) for c in engine.children)

    asyncio.run(main())


def test_the_reason_is_the_one_the_leader_gave(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(
            tmp_path, planned(program, lambda epoch, name: 70 if (epoch, name) == (1, "leader") else None)
        )

        async def steps() -> None:
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert manifest["reason"] == "planned: by the test (leader exited with 70 (fault))"
            assert verdict(engine) == ("CRASH_LOOKS_LIKE_HANG", "shown", "leader of prefill raised planned")

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_stopped_leader_is_noticed(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            os.kill(engine.children[0].pid, signal.SIGSTOP)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            assert verdict(engine) == ("MISSING_PARTICIPANT", "shown", "leader of prefill was stopped by a signal")

        await drive(engine, seen, steps)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["epoch", "run"])
def test_a_removed_folder_ends_the_epoch_and_the_next_has_one(tmp_path: Path, program: str, what: str) -> None:
    """Without its folder a leader cannot beat: nobody would notice if it hung."""

    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            shutil.rmtree(tmp_path / "run" / "1" if what == "epoch" else tmp_path / "run")
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert "has been removed" in manifest["reason"]
            assert verdict(engine) == ("IPC_OR_EXTERNAL_LOST", "shown", "The run folder of prefill was removed")

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_removed_control_socket_ends_the_epoch(tmp_path: Path, program: str) -> None:
    """Who is connected stays so, but no successor of the peer ever would be: the pair would serve nobody, for good."""
    place = tmp_path / "control.sock"

    def listen() -> None:
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place))

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        listen()
        (folder / "ready").touch()
        settings = {"name": "leader", "beats": True, "exit": None, "endpoint": f"ipc://{place}"}
        return [Program("leader", program, settings)]

    async def main() -> None:
        engine, seen = make(tmp_path, plan)

        async def steps() -> None:
            await until(seen, State.RUNNING)
            place.unlink()
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            assert "has been removed: nobody can connect" in engine.last_reason
            assert verdict(engine) == ("IPC_OR_EXTERNAL_LOST", "shown", "The control socket of prefill was removed")

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_storm_stops_the_engine_and_keeps_evidence(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: 70 if name == "leader" else None))

        async def steps() -> None:
            await until(seen, State.GIVEN_UP)
            assert engine.epoch.number == engine_module.STORM_EPOCHS
            assert len(list(engine.incidents.iterdir())) == engine_module.STORM_EPOCHS
            assert not any(alive(c.pid) for c in engine.children)

        await drive(engine, seen, steps)

    asyncio.run(main())


@pytest.mark.parametrize(("ready", "epochs"), [(False, 1), (True, 3)])
def test_what_cannot_work_as_it_is_set_up_is_not_tried_again(
    tmp_path: Path, program: str, ready: bool, epochs: int
) -> None:
    """A rank without a GPU, a pool without a page. One that has been ready has settings that can work."""

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        if ready:
            (folder / "ready").touch()
        return [Program("leader", program, {"name": "leader", "beats": True, "exit": 70, "fault": "ValueError"})]

    async def main() -> None:
        engine, seen = make(tmp_path, plan)

        async def steps() -> None:
            await until(seen, State.GIVEN_UP)
            assert len(list(engine.incidents.iterdir())) == engine.epoch.number == epochs

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_epochs_go_on_after_a_new_supervisor(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        for expected in (1, 2):
            engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

            async def steps(seen: asyncio.Queue[State] = seen) -> None:
                await until(seen, State.RUNNING)

            await drive(engine, seen, steps)
            assert engine.epoch.number == expected

    asyncio.run(main())


LOOPS = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]).parent
leads = json.load(open(sys.argv[1]))["name"] == "leader"
while True:
    if leads:
        (folder / "heartbeat").touch()
    while leads and (folder / "loop").exists():
        pass
    time.sleep(0.05)
"""


def test_a_leader_that_goes_round_inside_one_turn_is_noticed(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    monkeypatch.setattr(standing, "LOOP_S", 1.0)

    async def main() -> None:
        engine, seen = make(tmp_path, planned("loops", lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            (tmp_path / "run" / "1" / "loop").touch()
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert manifest["reason"].startswith("leader has not beaten for ")
            assert manifest["reason"].endswith(" s of CPU")

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_stopped_rank_is_noticed_and_one_that_goes_on_is_not(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing, "STOPPED_S", 1.5)

    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            rank = engine.children[2].pid
            os.kill(rank, signal.SIGSTOP)
            await asyncio.sleep(0.6)
            os.kill(rank, signal.SIGCONT)
            await asyncio.sleep(1.5)
            assert engine.epoch.number == 1
            os.kill(rank, signal.SIGSTOP)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert not alive(rank)
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert "rank1 has been stopped by a signal" in manifest["reason"]

        await drive(engine, seen, steps)

    asyncio.run(main())


LAST_WORDS = """
import json, os, pathlib, signal, sys, time
settings = json.load(open(sys.argv[1]))
folder = pathlib.Path(sys.argv[1]).parent
if settings["name"] == "rank1" and settings["crash"]:
    while not (folder / "heartbeat").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), settings["crash"])
def ended(number, frame):
    said = json.loads((folder / "ended.json").read_text())
    rooms = ["000000000000000a.%d" % settings["epoch"]]
    culprit = rooms[0] if settings["epoch"] == 3 else ""
    fault = {"name": "crash", "said": said, "charged": rooms, "culprit": culprit}
    (folder / "fault.json").write_text(json.dumps(fault))
    sys.exit(70)
signal.signal(signal.SIGUSR2, ended)
while True:
    if settings["name"] == "leader":
        (folder / "heartbeat").touch()
    time.sleep(0.05)
"""


def test_a_crash_is_charged_and_its_culprit_is_no_storm(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that crashes a rank three times, the third time alone, explains all three."""
    (tmp_path / "crashing.py").write_text(LAST_WORDS)

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        crash = signal.SIGSEGV if epoch.number <= 3 else 0
        return [
            Program(name, "crashing", {"name": name, "epoch": epoch.number, "crash": crash})
            for name in ("leader", "rank0", "rank1")
        ]

    async def main() -> None:
        engine, seen = make(tmp_path, plan)

        async def steps() -> None:
            while engine.epoch.number < 4 or engine.state is not State.RUNNING:
                assert await seen.get() is not State.GIVEN_UP
            manifests = [json.loads(p.read_text()) for p in sorted(engine.incidents.glob("*/manifest.json"))]
            assert len(manifests) == 3
            for manifest in manifests:
                assert manifest["fault"]["said"] == {"rank": 1, "how": "was ended by signal 11"}
                assert manifest["exit_codes"]["leader"] == 70

        await drive(engine, seen, steps)

    asyncio.run(main())


FAULTS = {
    "three of nobody's": ["", "", ""],
    "three, each in another's step": ["a", "b", "c"],
    "a kill, then a poisonous request, which comes next": ["", "a b", "a c"],
    "two poisonous requests": ["a", "b", "a", "b"],
    "three pairs, none of which came to anything": ["a b", "a", "c", "c", "d e", "e d"],
    "a culprit explains what it was in": ["", "a b", "a b", "!a", ""],
    "and nothing else": ["", "a", "a", "!a", "b", ""],
    "whoever runs alone fails": ["!a", "!b", "!c", "!d", "!e"],
    "and others were finished between": ["!a", "!b", "+!c", "!d", "!e", "!f", "+"],
}
"""Requests in the steps that failed, fault by fault; `!`: it was alone; `+`: some were finished in that epoch."""
STORMS = {
    "three of nobody's": 3,
    "three, each in another's step": 3,
    "three pairs, none of which came to anything": 5,
    "and nothing else": 6,
    "whoever runs alone fails": 5,
}


@pytest.mark.parametrize("loading", [0.0, 100.0])
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_a_storm_and_what_a_request(
    name: str, loading: float, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the engine's age only, not of how long it takes to load; and with a minute between faults, of none but where
    every request fails alone."""
    for pause in (1.0, 61.0):
        engine, _ = make(tmp_path, planned(program, lambda epoch, name: None))
        clock = 1000.0
        monkeypatch.setattr(engine_module.time, "monotonic", lambda: clock)  # noqa: B023
        stopped = 0
        for number, fault in enumerate(FAULTS[name], 1):
            engine._began, engine._ready_at = clock, clock + loading
            clock += loading + pause
            words = fault.lstrip("+").split()
            rooms = [f"{word.strip('!')}.{number}" for word in words]
            culprit = rooms[0] if fault.lstrip("+").startswith("!") else ""
            engine._count({"charged": rooms, "culprit": culprit, "finished": int(fault.startswith("+"))})
            stopped = stopped or (number if engine._is_storm() else 0)
        wanted = STORMS.get(name, 0)
        if "alone" not in name and (pause > engine_module.STORM_S or (loading and wanted > 5)):
            wanted = 0  # they are not within a minute
        assert stopped == wanted


def test_a_kill_from_outside_charges_nobody(tmp_path: Path, program: str) -> None:
    (tmp_path / "crashing.py").write_text(LAST_WORDS)

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        crash = signal.SIGKILL if epoch.number == 1 else 0
        return [
            Program(name, "crashing", {"name": name, "epoch": epoch.number, "crash": crash})
            for name in ("leader", "rank0", "rank1")
        ]

    async def main() -> None:
        engine, seen = make(tmp_path, plan)

        async def steps() -> None:
            while engine.epoch.number < 2 or engine.state is not State.RUNNING:
                await seen.get()
            assert engine.last_incident is not None
            assert json.loads((engine.last_incident / "manifest.json").read_text())["fault"] == {}

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_a_disk_that_takes_nothing_is_waited_for(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AGAIN_S", 0.1)
    full, tried = True, asyncio.Event()
    ready = planned(program, lambda epoch, name: None)

    def plan(epoch: Epoch, folder: Path) -> list[Program]:
        if epoch.number == 5:
            tried.set()
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return ready(epoch, folder)

    async def main() -> None:
        engine, seen = make(tmp_path, plan)

        async def steps() -> None:
            nonlocal full
            await tried.wait()
            full = False
            await until(seen, State.RUNNING)
            assert engine.restarts == 0

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_an_incident_says_that_it_was_a_drill(tmp_path: Path, program: str) -> None:
    async def main() -> None:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            await until(seen, State.RUNNING)
            victim = engine.children[1].pid
            steps_log = tmp_path / "run" / "1" / "log"
            steps_log.mkdir()
            for number in range(3):
                (steps_log / f"{number:08}.crlog").write_bytes(bytes([number]) * 600_000)
            (tmp_path / RECORD).write_text(
                json.dumps({"spec": "rank.forward:kill", "pid": victim}) + "\n" + json.dumps({"spec": "x", "pid": 1})
            )
            os.kill(victim, signal.SIGKILL)
            await until(seen, State.RECOVERING)
            await until(seen, State.RUNNING)
            assert engine.last_incident is not None
            manifest = json.loads((engine.last_incident / "manifest.json").read_text())
            assert [entry["spec"] for entry in manifest["drill"]] == ["rank.forward:kill"]
            assert [p.name for p in engine.last_incident.glob("*.crlog")] == ["00000002.crlog"]
            assert manifest["files"]["00000002.crlog"]["bytes"] == 600_000, "cut, it could not be replayed"

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_what_cannot_be_removed_or_told_ends_no_epoch(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of the past that stay, and a disk that for a while does not say what it has."""
    monkeypatch.setattr(engine_module, "EPOCHS_KEPT", 0)
    failing = False
    real = Path.stat

    def status(path: Path, **how: bool) -> os.stat_result:
        if failing and path.is_relative_to(tmp_path / "run"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **how)

    def stays(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "stat", status)
    monkeypatch.setattr(shutil, "rmtree", stays)
    (tmp_path / "run" / "1").mkdir(parents=True)
    (tmp_path / "run" / "epoch").write_text("1")

    async def main() -> None:
        nonlocal failing
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))

        async def steps() -> None:
            nonlocal failing
            await until(seen, State.RUNNING)
            assert engine.epoch.number == 2
            failing = True
            await asyncio.sleep(2.5 * engine_module.LOOK_S)
            failing = False
            await asyncio.sleep(2.5 * engine_module.LOOK_S)
            assert engine.epoch.number == 2
            assert engine.state is State.RUNNING
            assert seen.empty()

        await drive(engine, seen, steps)

    asyncio.run(main())


def test_while_it_loads_it_is_said_who_has_and_what_the_others_did(
    tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "EVERY_S", 0.3)

    async def main() -> str:
        engine, seen = make(tmp_path, planned(program, lambda epoch, name: None))
        said = ""

        async def steps() -> None:
            nonlocal said
            await until(seen, State.RUNNING)
            (tmp_path / "run" / "1" / "rank1.log").write_text('{"event": "rank ready"}\n')
            while "loaded=['rank1']" not in said:
                await asyncio.sleep(0.1)
                said += "".join(capfd.readouterr())
            (tmp_path / "run" / "1" / "ready").touch()
            await asyncio.sleep(3 * engine_module.LOOK_S)
            capfd.readouterr()
            await asyncio.sleep(3 * engine_module.LOOK_S)
            assert "engine loads" not in "".join(capfd.readouterr())

        await drive(engine, seen, steps)
        return said

    said = asyncio.run(main())
    (line, *_) = [line for line in said.splitlines() if "loaded=['rank1']" in line]
    assert "engine=prefill" in line
    assert "s of CPU" in line.partition("rank0=")[2]
    assert "rank1=" not in line
