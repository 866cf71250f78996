"""What a plan is made from: how engines were started is kept in mind for when nothing of them is left."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from closeranks.supervise.platforms import platform_named
from closeranks.watch import procfs, recover_survey
from closeranks.watch.recover_state import Policy
from closeranks.watch.recover_survey import Choice, Survey
from closeranks.watch.recover_wire import Endpoint, Wire
from closeranks.watch.snapshot import EngineSeen, Proc
from tests.watch.test_recover_units import FAR, service

Start = Callable[[], tuple["subprocess.Popen[bytes]", EngineSeen]]


class Silent(Wire):
    """Nobody answers."""

    async def version(self, one: Endpoint) -> str:
        return ""

    async def epoch(self, one: Endpoint) -> int | None:
        return None


@pytest.fixture
def start() -> Iterator[Start]:
    children = []

    def one() -> tuple["subprocess.Popen[bytes]", EngineSeen]:
        command = [sys.executable, "-c", "print('here', flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n", "before that, /proc may show an environment that is still empty"
        row = procfs.row(child.pid)
        assert row is not None
        head = Proc(child.pid, row.start_time, row.ppid, "launcher", "decode-1", None, "python3")
        return child, EngineSeen("decode-1", "sglang", "decode", "http://127.0.0.1:1", (head,))

    yield one
    for child in children:
        child.kill()
        child.communicate()


def survey(**choices: Choice) -> Survey:
    return Survey(Policy(), choices, platform_named)


def look(one: Survey, blamed: tuple[str, ...], engines: tuple[EngineSeen, ...]) -> Any:
    names, units = one.units(blamed, engines)
    return asyncio.run(one.look(units, names, {}, Silent()))


def test_an_engine_that_is_gone_as_a_whole_can_be_started_if_it_was_seen_before(start: Start) -> None:
    child, engine = start()
    one = survey()
    assert not one.knows("decode-1")
    one.remember((engine,))
    child.kill()
    child.wait()
    assert one.knows("decode-1")
    found = look(one, ("decode-1",), ())
    (side,) = found.sides
    assert side.obstacle == ""
    assert found.targets["decode-1"].launch.argv[0] == sys.executable
    assert platform_named("plain").end_tree(found.targets["decode-1"], 5.0) == 0
    assert look(one, ("prefill-2",), ()).sides == (), "one that was never seen is not made up"


def test_who_ran_it_is_remembered_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is gone is in no cgroup: started as a plain one, a unit would run beside its manager."""
    child, engine = start()
    here = child.pid
    monkeypatch.setattr(
        recover_survey, "platform_of", lambda pid, folder: ("systemd", "e.service") if pid == here else ("plain", "")
    )
    one = survey()
    one.remember((engine,))
    child.kill()
    child.wait()
    monkeypatch.setattr(recover_survey, "platform_of", lambda pid, folder: ("plain", ""))
    asked = list[tuple[str, str]]()

    class Systemd:
        name = "systemd"

        def find(self, seen: Any) -> Any:
            asked.append((self.name, seen.unit))
            return platform_named("plain").find(seen)

    one._platforms = lambda name: Systemd() if name == "systemd" else platform_named(name)  # type: ignore[assignment,return-value]
    look(one, ("decode-1",), (engine,))
    assert asked == [("systemd", "e.service")]


def test_our_own_engine_that_is_gone_with_its_supervisor_is_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = recover_survey.Launch(argv=("closeranks", "serve"), cwd="/", env={}, program="/bin/true")
    monkeypatch.setattr(recover_survey, "read_launch", lambda pid: launch)
    one = survey()
    one.remember(service(FAR))
    assert one.knows("decode")
    names, units = one.units(("decode", "prefill"), ())
    assert names == ("service-8000",)
    assert [u.name for u in units] == ["service-8000"]
    names, units = one.units(("decode", "prefill"), service(FAR)[1:])
    assert names == ("service-8000",), "given up by its supervisor: the service as it is seen now"
    assert [u.name for u in units].count("service-8000") == 1


def test_one_of_ours_ends_leader_and_ranks_only(start: Start, tmp_path: Path) -> None:
    child, engine = start()
    head = engine.procs[0]
    procs = tuple(Proc(head.pid, head.start_time, 1, role, "both", None, "x") for role in ("leader",))  # type: ignore[arg-type]
    far = Proc(FAR, 1, 1, "gateway", "both", None, "closeranks::gateway")
    own = EngineSeen("both", "closeranks", "both", "http://127.0.0.1:1", (*procs, far))
    target = look(survey(), ("both",), (own,)).targets["both"]
    assert target.platform == "supervised"
    assert [p.pid for p in target.processes] == [child.pid]
    alone = EngineSeen("both", "closeranks", "both", None, procs)
    (side,) = look(survey(), ("both",), (alone,)).sides
    assert "--router" in side.obstacle
