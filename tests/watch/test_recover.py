"""The executor: whatever kills it and whenever, each engine is ended and started at most once; it stops when told."""

import asyncio
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from closeranks.supervise.platforms import PlatformError, Process, Seen, Target
from closeranks.watch import patience, recover_desk, recover_journal, recover_run
from closeranks.watch.recover import Recovery
from closeranks.watch.recover_journal import Entry, Journal, Now, read
from closeranks.watch.recover_run import Outcome, Shown, _bounded
from closeranks.watch.recover_state import Case, Policy, Refusal
from closeranks.watch.recover_wire import Endpoint, StepFailed, Wire
from closeranks.watch.snapshot import EngineSeen, Proc

CASE = Case(blamed=("decode-2",), verdict="DESYNC_DIFFERENT_COLLECTIVE")


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are killed here, not machines: what was written is there, flushed or not. And nobody waits."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(recover_run, "START_AGAIN_S", (0.0, 0.0))


class Killed(BaseException):
    """The executor's process ends here, as by SIGKILL: nothing of its own runs any more."""


class World:
    """Two engines and what was done to them. `life` is which life each is in; None: it does not run."""

    def __init__(self) -> None:
        self.life: dict[str, int | None] = {"prefill-1": 1, "decode-2": 1}
        self.done: list[tuple[str, str]] = []
        self.tokens: set[str] = set()
        self.works = True
        self.refuses: set[str] = set()

    def engines(self) -> tuple[EngineSeen, ...]:
        return tuple(
            EngineSeen(name, "sglang", role, f"http://127.0.0.1:{port}", (proc(name),))  # type: ignore[arg-type]
            for name, role, port in (("prefill-1", "prefill", 1), ("decode-2", "decode", 2))
        )

    def count(self) -> Counter[tuple[str, str]]:
        return Counter(self.done)


def proc(engine: str) -> Proc:
    return Proc(2**22 + len(engine), 1, 1, "launcher", engine, None, "x")


class Double:
    """A platform over a `World`, idempotent by life and token as the real ones are."""

    name: ClassVar[str] = "plain"
    tried: ClassVar[bool] = True

    def __init__(self, world: World) -> None:
        self.world = world

    def find(self, seen: Seen) -> Target:
        life = str(self.world.life[seen.name])
        return Target(name=seen.name, platform="plain", processes=(Process(1, 1),), life=life)

    def is_running(self, target: Target) -> bool:
        return str(self.world.life[target.name]) == target.life

    def end_tree(self, target: Target, deadline_s: float) -> int:
        if "end" in self.world.refuses:
            raise PlatformError("process 7 is in state D")
        if not self.is_running(target):
            return 0
        self.world.done.append(("end", target.name))
        self.world.life[target.name] = None
        return 1

    def start(self, target: Target, token: str, folder: Path) -> str:
        if token in self.world.tokens:
            return "not started again"
        assert self.world.life[target.name] is None, "started beside a life that runs"
        self.world.tokens.add(token)
        self.world.done.append(("start", target.name))
        self.world.life[target.name] = int(target.life) + 1
        return "started"

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        return ""

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        return (step, target.name)


class Path_(Wire):
    """The HTTP side over a `World`: the path works when every engine runs in a life after its first."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    async def version(self, one: Endpoint) -> str:
        return "0.5.23"

    async def ready(self, one: Endpoint) -> bool:
        return self.world.life[one.name] is not None

    async def check(
        self, names: Sequence[str], ends: Any, limit_s: float, at_once: int = 1, every: bool = False
    ) -> str:
        if not self.world.works or not all((self.world.life[name] or 0) > 1 for name in names):
            raise StepFailed("no token came")
        return "tokens"


def recovery(world: World, folder: Path, policy: Policy | None = None, **more: Any) -> Recovery:
    policy = policy or Policy(verify_tries=1)
    return Recovery(folder, policy, platforms=lambda name: Double(world), wire=lambda: Path_(world), **more)


def recover(world: World, folder: Path, policy: Policy | None = None, **more: Any) -> Outcome:
    return asyncio.run(recovery(world, folder, policy, **more).recover(CASE, world.engines()))


ONCE = Counter([(what, name) for what in ("end", "start") for name in ("prefill-1", "decode-2")])


def test_it_recovers_and_says_each_step(tmp_path: Path) -> None:
    world, shown = World(), list[Shown]()
    outcome = recover(world, tmp_path / "state", show=shown.append)
    assert outcome.status == "recovered", outcome
    assert world.count() == ONCE
    order = [f"{kind} {name}" for kind, name in world.done]
    assert order == ["end prefill-1", "end decode-2", "start prefill-1", "start decode-2"]
    assert [s.kind for s in shown if s.event == "done"] == [s.kind for s in outcome.steps]
    assert not list((tmp_path / "state").glob("*.facts")), "how engines are started stayed on disk"
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def killed_at(count: int, before: bool) -> Callable[[Journal, Entry], None]:
    """`Journal.append` that ends the process before or after its n-th line is on disk."""
    real, seen = Journal.append, [0]

    def append(self: Journal, entry: Entry) -> None:
        seen[0] += 1
        if seen[0] == count and before:
            raise Killed
        real(self, entry)
        if seen[0] == count:
            raise Killed

    return append


@pytest.mark.parametrize("before", [True, False], ids=["before the line", "after the line"])
def test_killed_at_any_line_of_the_journal_it_goes_on_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    lines = 0
    for count in range(1, 100):
        world, folder = World(), tmp_path / f"{count}"
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "append", killed_at(count, before))
            try:
                outcome = recover(world, folder)
            except Killed:
                lines = count
            else:
                assert outcome.status == "recovered"
                break
        resumed = asyncio.run(recovery(world, folder).resume())
        begun = world.count()
        assert not [k for k, n in begun.items() if n > 1], (count, begun)
        if resumed is not None:
            assert resumed.status == "recovered", (count, resumed)
            assert world.count() == ONCE
        again = recover(world, folder)
        if resumed is not None or count > 1:
            assert world.count() == ONCE, count
        assert again.status in ("refused", "recovered")
    assert lines > 20, "the plan has that many lines"


def test_killed_within_a_step_it_goes_on_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("end_tree", "start"):
        for engine in ("prefill-1", "decode-2"):
            for after in (True, False):
                world, folder = World(), tmp_path / f"{name}{engine}{after}"
                real = getattr(Double, name)

                def dying(self: Double, target: Target, *args: Any, _real: Any = real, _after: bool = after,
                          _engine: str = engine) -> Any:  # fmt: skip
                    result = _real(self, target, *args) if _after or target.name != _engine else None
                    if target.name == _engine:
                        raise Killed
                    return result

                with monkeypatch.context() as patch:
                    patch.setattr(Double, name, dying)
                    with pytest.raises(Killed):
                        recover(world, folder)
                outcome = asyncio.run(recovery(world, folder).resume())
                assert outcome is not None
                assert outcome.status == "recovered"
                assert world.count() == ONCE


def test_a_journal_cut_anywhere_never_makes_it_do_a_thing_twice(tmp_path: Path) -> None:
    """A cut loses the last word on a step. What was done is then found out from the engines, not believed."""
    folder = tmp_path / "first"
    recover(World(), folder)
    data = (folder / "journal").read_bytes()
    for cut in range(0, len(data), 97):
        world, copy = World(), tmp_path / f"cut{cut}"
        copy.mkdir()
        (copy / "journal").write_bytes(data[:cut])
        resumed = asyncio.run(recovery(world, copy).resume())
        # The facts file is gone with the finished plan: what is open is closed, with nothing done.
        assert resumed is None or resumed.status in ("failed", "stopped")
        assert not world.done


def test_a_stop_file_is_heeded_between_any_two_steps(tmp_path: Path) -> None:
    for count in range(1, 40):
        world, folder, seen = World(), tmp_path / str(count), [0]

        def show(shown: Shown, _folder: Path = folder, _count: int = count, _seen: list[int] = seen) -> None:
            _seen[0] += shown.event != "begin"
            if _seen[0] == _count and shown.event != "begin":
                (_folder / "STOP").write_text("me")

        outcome = recover(world, folder, show=show)
        if outcome.status == "recovered":
            assert count > 8
            return
        assert outcome.status == "stopped", outcome
        assert len(outcome.steps) == count
        assert "me" in outcome.says
        done = list(world.done)
        assert recover(world, folder).status == "stopped"
        assert world.done == done
        lies = {name for name, life in world.life.items() if life is None}
        resumed = asyncio.run(recovery(world, folder).resume())
        assert (resumed is not None) == bool(lies), "closed, unless engines lie"
        (folder / "STOP").unlink()
        if resumed is not None:
            assert resumed.status == "stopped"
            assert all(name in outcome.says for name in lies)
            assert world.done == done
            taken_back = asyncio.run(recovery(world, folder).resume())
            assert taken_back is not None
            assert taken_back.status == "recovered"
            assert world.count() == ONCE
    raise AssertionError("it never ended")


def failing(monkeypatch: pytest.MonkeyPatch, times: dict[str, int]) -> None:
    """The first starts of these engines fail."""
    real = Double.start

    def start(self: Double, target: Target, token: str, folder: Path) -> str:
        if times.get(target.name, 0) > 0:
            times[target.name] -= 1
            raise PlatformError("the port is taken")
        return real(self, target, token, folder)

    monkeypatch.setattr(Double, "start", start)


@pytest.mark.parametrize("engine", ["prefill-1", "decode-2"])
def test_what_was_ended_is_started_again_until_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    world = World()
    failing(monkeypatch, {engine: 2})
    assert recover(world, tmp_path).status == "recovered"
    assert world.count() == ONCE


def test_an_engine_that_cannot_be_started_leaves_the_plan_open_and_the_others_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    failing(monkeypatch, {"prefill-1": 3})
    outcome = recover(world, tmp_path)
    assert outcome.status == "failed"
    assert "ended and not started: prefill-1" in outcome.says
    assert outcome.wait_s is not None
    assert world.life["decode-2"] == 2, "nobody else would start it"
    assert recover(world, tmp_path).status == "recovered", "the same plan"
    assert world.count() == ONCE
    assert len({e.plan for e in read(tmp_path / "journal")}) == 1


def test_one_that_does_not_end_does_not_keep_the_others_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, real = World(), Double.end_tree

    def end_tree(self: Double, target: Target, deadline_s: float) -> int:
        if target.name == "decode-2":
            raise PlatformError("process 7 is in state D")
        return real(self, target, deadline_s)

    monkeypatch.setattr(Double, "end_tree", end_tree)
    outcome = recover(world, tmp_path)
    assert outcome.status == "failed"
    assert "end decode-2" in outcome.says
    assert world.done == [("end", "prefill-1"), ("start", "prefill-1")]
    assert asyncio.run(recovery(world, tmp_path).resume()) is None, "nothing lies"


def test_an_engine_that_ends_again_while_it_loads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, deaths = World(), [1]

    def has_ended(self: Double, target: Target, token: str, folder: Path) -> str:
        return "out of memory" if world.life[target.name] is None else ""

    async def ready(self: Path_, one: Endpoint) -> bool:
        if one.name == "decode-2" and world.life[one.name] == 2 and deaths:
            deaths.pop()
            world.life[one.name] = None
            world.tokens.clear()  # as the platforms do: who took it is gone
        return world.life[one.name] is not None

    monkeypatch.setattr(Double, "has_ended", has_ended)
    monkeypatch.setattr(Path_, "ready", ready)
    monkeypatch.setattr(recover_run, "START_AGAIN_S", (0.0,))
    outcome = recover(world, tmp_path)
    assert outcome.status == "recovered"
    assert world.count() == ONCE + Counter([("start", "decode-2")])
    assert [s.says for s in outcome.steps if s.kind == "start" and s.event == "failed"] == [
        "decode-2 ended again: out of memory"
    ]


def test_one_that_an_operator_started_meanwhile_is_not_started_beside_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    failing(monkeypatch, {"decode-2": 3})
    assert recover(world, tmp_path).status == "failed"
    world.life["decode-2"] = 5
    assert recover(world, tmp_path).status == "recovered"
    assert world.count()["start", "decode-2"] == 0


def test_whoever_ends_its_process_can_wait_until_what_was_ended_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, real = World(), Double.end_tree
    ending, may_end = threading.Event(), threading.Event()

    def end_tree(self: Double, target: Target, deadline_s: float) -> int:
        ending.set()
        may_end.wait(30)
        return real(self, target, deadline_s)

    async def never(self: Path_, one: Endpoint) -> bool:
        return False

    async def main() -> None:
        made = recovery(world, tmp_path)
        assert await made.settled(0.0), "nothing is ended yet"
        with monkeypatch.context() as patch:
            patch.setattr(Double, "end_tree", end_tree)
            patch.setattr(Path_, "ready", never)
            running = asyncio.create_task(made.recover(CASE, world.engines()))
            await asyncio.to_thread(ending.wait)
            assert not await made.settled(0.01)
            may_end.set()
            assert await made.settled(30)
            running.cancel()
            await asyncio.wait({running})
        assert world.count() == ONCE

    asyncio.run(main())
    resumed = asyncio.run(recovery(world, tmp_path).resume())
    assert resumed is not None
    assert resumed.status == "recovered"
    assert world.count() == ONCE


def test_a_stop_file_ends_a_wait(tmp_path: Path) -> None:
    world = World()

    async def main() -> Outcome:
        waits = asyncio.Event()

        def show(shown: Shown) -> None:
            if shown.kind == "start":
                world.life.update({"prefill-1": None, "decode-2": None})  # they never get ready
            if shown.kind == "ready":
                waits.set()

        made = recovery(world, tmp_path, show=show)
        running = asyncio.create_task(made.recover(CASE, world.engines()))
        await waits.wait()
        made.stop_file.touch()
        return await asyncio.wait_for(running, 30)

    outcome = asyncio.run(main())
    assert outcome.status == "stopped"
    assert outcome.steps[-1].kind == "start"


def test_of_two_executors_one_acts(tmp_path: Path) -> None:
    world = World()

    async def main() -> list[Outcome]:
        both = [recovery(world, tmp_path) for _ in range(2)]
        return list(await asyncio.gather(*(r.recover(CASE, world.engines()) for r in both)))

    outcomes = asyncio.run(main())
    assert sorted(o.status for o in outcomes) == ["busy", "recovered"]
    assert world.count() == ONCE
    # And the one that comes later is told by the journal.
    late = recover(world, tmp_path)
    assert late.status == "refused"
    assert late.wait_s is not None
    assert world.count() == ONCE


def test_the_lock_of_another_process_is_seen(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    world = World()
    assert recover(world, tmp_path).status == "busy"
    assert not world.done
    os.close(lock)


def test_a_full_disk_stops_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    world = World()
    monkeypatch.setattr(recover_journal.os, "pwrite", full)
    outcome = recover(world, tmp_path)
    assert outcome.status == "stopped"
    assert "No space left" in outcome.says
    assert not world.done
    assert not list(tmp_path.glob("*.facts")), "secrets of a plan that there is not"


def test_secrets_of_plans_that_there_are_not_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".facts"):
            raise OSError(28, "No space left on device")

    world = World()
    (tmp_path / "left.facts").write_text("{}")  # by an executor that was killed before its plan was written down
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert recover(world, tmp_path).status == "stopped"
    assert not list(tmp_path.glob("*.facts"))
    assert recover(world, tmp_path).status == "recovered"


def test_a_disk_that_fills_in_the_middle_stops_it_there_and_it_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    for room in range(1, 26):
        world, folder, left = World(), tmp_path / str(room), [room]

        def some(fd: int, data: bytes, offset: int, _left: list[int] = left) -> int:
            _left[0] -= 1
            if _left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(recover_journal.os, "pwrite", some)
            outcome = recover(world, folder)
        if outcome.status == "recovered":
            assert room > 20
            return
        assert outcome.status == "stopped"
        begun = [e for e in read(folder / "journal") if e.event == "begin" and e.action and e.action.kind == "end"]
        assert sum(1 for what, _ in world.done if what == "end") <= len(begun), "done without having been written down"
        resumed = asyncio.run(recovery(world, folder).resume())
        assert resumed is not None
        assert resumed.status == "recovered"
        assert world.count() == ONCE


def test_a_disk_that_hangs_does_not_stand_the_watch_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, and nobody else acts until the call has come back: a late line would be written over theirs."""
    world, answers, count = World(), threading.Event(), [0]

    def flush(fd: int) -> None:
        count[0] += 1
        if count[0] == 12:
            answers.wait(30)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(recover_desk, "DISK_S", 1.0)

    async def main() -> tuple[Outcome, Outcome, Outcome | None]:
        first, other = recovery(world, tmp_path), recovery(world, tmp_path)
        hung = await first.recover(CASE, world.engines())
        meanwhile = await other.recover(CASE, world.engines())
        answers.set()
        await asyncio.wait(first._desk._closing)
        return hung, meanwhile, await other.resume()

    hung, meanwhile, after = asyncio.run(main())
    assert (hung.status, meanwhile.status) == ("stopped", "busy")
    assert "did not answer" in hung.says
    assert hung.wait_s is not None
    assert after is not None
    assert after.status == "recovered"
    assert world.count() == ONCE


def test_a_damaged_journal_stops_it(tmp_path: Path) -> None:
    world = World()
    recover(world, tmp_path)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    (tmp_path / "journal").write_bytes(b"".join([*lines[:3], b"rubbish\n", *lines[4:]]))
    done = list(world.done)
    outcome = recover(world, tmp_path)
    assert outcome.status == "stopped"
    assert "line 4" in outcome.says
    assert world.done == done
    seen = asyncio.run(recovery(world, tmp_path).preview(CASE, world.engines()))
    assert isinstance(seen.plan, Refusal)
    assert "line 4" in seen.plan.reason


@pytest.mark.parametrize(("line", "lies"), [(4, False), (7, True), (8, True)])
def test_an_old_interruption_is_closed_unless_it_left_engines_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, lies: bool
) -> None:
    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed_at(line, before=False))
        with pytest.raises(Killed):
            recover(world, tmp_path)
    done = list(world.done)
    now = Now.read()
    much_later = recovery(world, tmp_path, clock=lambda: Now(now.wall + 5000, now.up + 5000, now.boot))
    outcome = asyncio.run(much_later.resume())
    assert outcome is not None
    assert outcome.status == ("recovered" if lies else "stopped")
    assert world.done == done if not lies else world.count() == ONCE
    assert asyncio.run(much_later.resume()) is None


def test_how_long_it_was_interrupted_counts_not_how_long_its_own_steps_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, now, passed = World(), Now.read(), [0.0]

    def clock() -> Now:
        passed[0] += 100.0
        return Now(now.wall + passed[0], now.up + passed[0], now.boot)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", killed_at(19, before=False))
        with pytest.raises(Killed):
            recover(world, tmp_path, clock=clock)
    assert world.count() == ONCE, "nothing lies"
    outcome = asyncio.run(recovery(world, tmp_path, clock=clock).resume())
    assert outcome is not None
    assert outcome.status == "recovered", outcome


def test_an_end_that_failed_and_came_about_later_leaves_nothing_lying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that is slow to stop its container does so after the command was given up."""
    world, real = World(), Double.end_tree

    def late(self: Double, target: Target, deadline_s: float) -> int:
        if target.name == "decode-2":
            real(self, target, deadline_s)
            raise PlatformError("`docker stop` did not end within 30 s")
        return real(self, target, deadline_s)

    monkeypatch.setattr(Double, "end_tree", late)
    assert recover(world, tmp_path).status == "recovered"
    assert world.count() == ONCE


def test_an_engine_of_which_it_is_not_known_whether_it_has_ended_keeps_the_plan_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: Double, target: Target, *args: Any) -> Any:
        raise PlatformError("the daemon does not answer")

    world = World()
    with monkeypatch.context() as patch:
        patch.setattr(Double, "end_tree", silent)
        patch.setattr(Double, "is_running", silent)
        outcome = recover(world, tmp_path)
    assert (outcome.status, world.done) == ("failed", [])
    assert "perhaps ended: prefill-1" in outcome.says
    assert outcome.wait_s is not None
    assert recover(world, tmp_path).status == "recovered", "the same plan"
    assert world.count() == ONCE


def test_killed_within_an_end_and_stopped_its_plan_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, real = World(), Double.end_tree

    def dying(self: Double, target: Target, deadline_s: float) -> int:
        real(self, target, deadline_s)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Double, "end_tree", dying)
        with pytest.raises(Killed):
            recover(world, tmp_path)
    (tmp_path / "STOP").touch()
    stopped = asyncio.run(recovery(world, tmp_path).resume())
    assert stopped is not None
    assert "ended and not started: prefill-1" in stopped.says
    assert world.count() == Counter([("end", "prefill-1")])
    (tmp_path / "STOP").unlink()
    resumed = asyncio.run(recovery(world, tmp_path).resume())
    assert resumed is not None
    assert resumed.status == "recovered"
    assert world.count() == ONCE


def test_a_plan_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine that nobody can start any more would keep the others from being recovered."""
    world = World()
    failing(monkeypatch, {"prefill-1": 99})
    assert recover(world, tmp_path).status == "failed"
    given_up = asyncio.run(recovery(world, tmp_path).give_up())
    assert given_up is not None
    assert "ended and not started: prefill-1" in given_up.says
    assert not list(tmp_path.glob("*.facts"))
    assert asyncio.run(recovery(world, tmp_path).give_up()) is None
    assert asyncio.run(recovery(world, tmp_path).resume()) is None


def test_a_case_that_came_while_another_plan_was_open_is_told_that_it_was_not_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    failing(monkeypatch, {"prefill-1": 3})
    assert recover(world, tmp_path).status == "failed"
    other = asyncio.run(recovery(world, tmp_path).recover(Case(blamed=("nobody",)), world.engines()))
    assert other.status == "busy"
    assert "nothing was done about nobody" in other.says
    assert "recovered" in other.says
    assert world.count() == ONCE


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), None], ids=["refuses", "hangs"])
def test_a_disk_that_fails_while_an_engine_loads_leaves_the_plan_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    """It says nothing about the engine: no step has failed."""
    world, answers, loads = World(), threading.Event(), list[str]()
    real_ready, real_exists = Path_.ready, Path.exists

    async def ready(self: Path_, one: Endpoint) -> bool:
        if not loads:
            loads.append(one.name)
            return False
        return await real_ready(self, one)

    def exists(self: Path, **how: Any) -> bool:
        if self.name == "STOP" and loads and not answers.is_set():
            if error:
                answers.set()
                raise error
            answers.wait(30)
        return real_exists(self, **how)

    monkeypatch.setattr(Path_, "ready", ready)
    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr(recover_desk, "DISK_S", 0.2)

    async def main() -> tuple[Outcome, Outcome | None]:
        made = recovery(world, tmp_path)
        first = await made.recover(CASE, world.engines())
        answers.set()
        if made._desk._closing:
            await asyncio.wait(made._desk._closing)
        monkeypatch.setattr(recover_desk, "DISK_S", 20.0)
        return first, await made.resume()

    first, after = asyncio.run(main())
    assert first.status == "stopped", first
    assert first.wait_s is not None
    assert after is not None
    assert after.status == "recovered"
    assert world.count() == ONCE


def test_a_plan_of_a_former_boot_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process numbers and units are of that boot: others' engines may have them now."""
    world = World()

    def dying(self: Double, target: Target, token: str, folder: Path) -> str:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Double, "start", dying)
        with pytest.raises(Killed):
            recover(world, tmp_path)
    done, now = list(world.done), Now.read()
    rebooted = recovery(world, tmp_path, clock=lambda: Now(now.wall + 60, 5.0, "another boot"))
    outcome = asyncio.run(rebooted.resume())
    assert outcome is not None
    assert outcome.status == "stopped"
    assert "started anew" in outcome.says
    assert "ended and not started: prefill-1, decode-2" in outcome.says
    assert world.done == done
    assert read(tmp_path / "journal")[-1].event == "over"
    assert asyncio.run(rebooted.resume()) is None


def test_processes_that_do_not_end_are_never_started_beside(tmp_path: Path) -> None:
    world = World()
    world.refuses.add("end")
    outcome = recover(world, tmp_path)
    assert outcome.status == "failed"
    assert "end prefill-1" in outcome.says
    assert not [d for d in world.done if d[0] == "start"]


def test_a_path_that_stays_dead_is_said(tmp_path: Path) -> None:
    world = World()
    world.works = False
    outcome = recover(world, tmp_path)
    assert outcome.status == "failed"
    assert world.count() == ONCE
    assert outcome.steps[-1].kind == "verify"


def test_a_clock_that_jumps_back_lets_nothing_be_done_twice(tmp_path: Path) -> None:
    world, now = World(), Now.read()
    assert recover(world, tmp_path).status == "recovered"
    for shifted in (Now(now.wall - 86400, now.up, now.boot), Now(now.wall - 86400, 5.0, "another boot")):
        assert recover(world, tmp_path, clock=lambda _s=shifted: _s).status == "refused"  # type: ignore[misc]
    ahead = Now(now.wall + 86400, now.up, now.boot)
    assert recover(world, tmp_path, clock=lambda: ahead).status == "refused"
    assert world.count() == ONCE


def test_engines_that_share_a_container_are_not_ended_one_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(self: Double, seen: Seen) -> Target:
        return Target(name=seen.name, platform="docker", unit="all-in-one", life="1")

    world = World()
    monkeypatch.setattr(Double, "find", find)
    outcome = recover(world, tmp_path)
    assert outcome.status == "refused"
    assert "all-in-one runs prefill-1 too" in outcome.says
    assert not world.done


def test_a_preview_changes_nothing(tmp_path: Path) -> None:
    world = World()
    preview = asyncio.run(recovery(world, tmp_path / "state").preview(CASE, world.engines()))
    assert {e.engine: (e.end, e.start) for e in preview.ends} == {
        n: (("end", n), ("start", n)) for n in ("prefill-1", "decode-2")
    }
    assert not world.done
    assert not (tmp_path / "state").exists()
    (tmp_path / "file").write_text("")
    refused = asyncio.run(recovery(world, tmp_path / "file" / "state").preview(CASE, world.engines()))
    assert isinstance(refused.plan, Refusal)
    assert "Not a directory" in refused.plan.reason


def test_a_step_is_not_late_because_we_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for happens meanwhile; an engine that was ended would otherwise not be started again."""
    monkeypatch.setattr(patience, "SLICE_S", 0.05)
    happened = threading.Event()

    async def step() -> str:
        await asyncio.to_thread(happened.wait)
        return "done"

    async def go() -> str:
        threading.Timer(0.1, happened.set).start()
        asyncio.get_running_loop().call_later(0.01, time.sleep, patience.PAUSE_S + 0.5)  # as SIGSTOP does
        return await _bounded(step(), 1.0)

    assert asyncio.run(go()) == "done"


def test_a_step_that_is_late_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SLICE_S", 0.01)
    gone: list[str] = []

    async def step() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            gone.append("cancelled")
        return "never"

    with pytest.raises(TimeoutError):
        asyncio.run(_bounded(step(), 0.05))
    assert gone == ["cancelled"]


def test_secrets_in_what_a_step_says_do_not_get_into_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(self: Double, target: Target, token: str, folder: Path) -> str:
        raise PlatformError("could not start: --api-key sk-verysecretkey1 \udcff")

    world = World()
    monkeypatch.setattr(Double, "start", leaking)
    monkeypatch.setattr(recover_run, "START_AGAIN_S", ())
    outcome = recover(world, tmp_path)
    assert outcome.status == "failed"
    assert "sk-verysecretkey1" not in (tmp_path / "journal").read_text() + repr(outcome)
