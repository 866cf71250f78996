"""The picture and its rendering: rates between two looks, past incidents, any text, no terminal."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from closeranks.cli.top import render
from closeranks.watch import machine
from closeranks.watch.picture import Engine, Observer, Picture, Rank, _limited, incidents, recoveries
from closeranks.watch.recover_journal import Entry, Journal, Now
from closeranks.watch.recover_state import Case, Plan
from closeranks.watch.settings import Settings
from closeranks.watch.signals import Readings
from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Snapshot
from closeranks.watch.snapshot import Signal as SignalName


def shown(picture: Picture, width: int = 150) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render(picture))
    return console.export_text()


RANK = Rank(label="TP0", pid=7, state="S", cpu_percent=12.3, switches_s=4.0, threads=9, wchan="futex_wait_queue")
ENGINE = Engine(
    name="decode-31022", kind="sglang", role="decode", url="http://127.0.0.1:31022", phase="suspect",
    why=("[proc] no main thread ran for 3.0 s",), blind=("gpu: no nvidia-smi here",), running=3.0, waiting=None,
    queues={"transfer": 5.0}, tokens_s=0.0, http="HTTP 200", ranks=(RANK,),
)  # fmt: skip


def test_everything_that_is_known_is_shown() -> None:
    text = shown(Picture(at=0.0, engines=(ENGINE,)))
    for word in ("decode-31022", "suspect", "no main thread", "blind: gpu", "running 3", "transfer 5", "TP0", "futex"):
        assert word in text
    assert "waiting" not in text, "what is not known is not shown as a number"


def test_nothing_seen_is_said() -> None:
    assert "no engine is seen" in shown(Picture(at=0.0, engines=()))


def test_any_width_will_do() -> None:
    row = {"time": "t", "engine": "e" * 60, "verdict": "V" * 40, "certainty": "likely", "summary": "s" * 400}
    for width in (20, 40, 80, 400):
        assert shown(Picture(at=0.0, engines=(ENGINE,), incidents=(row,)), width)


def test_markup_in_names_is_text() -> None:
    row = {"time": "t", "engine": "e", "verdict": "V", "certainty": "c", "summary": "[/red] is text"}
    assert "[/red] is text" in shown(Picture(at=0.0, engines=(), incidents=(row,), notes=("[bold] too",)))


def test_rates_are_between_two_looks_of_the_same_life(tmp_path: Path) -> None:
    async def main() -> None:
        observer = Observer(Settings(), tmp_path)
        engine = EngineSeen("e-1", "sglang", "both", None, (Proc(5, 1, 1, "rank", "e-1", 0, "x"),))

        def look(at: float, ticks: float, start: float) -> Engine:
            values = {"at": at, "all_ticks": ticks, "switches": ticks, "start": start, "state": "S", "threads": 2.0}
            snapshot = Snapshot(at, at, (engine,), {"proc": {"e-1/TP0": values}})
            made = observer._engine(engine, snapshot)
            observer._before = snapshot
            return made

        assert look(1.0, 100.0, 1.0).ranks[0].switches_s is None
        assert look(3.0, 150.0, 1.0).ranks[0].switches_s == 25.0
        assert look(5.0, 10.0, 2.0).ranks[0].switches_s is None, "another process under the same name"
        await observer.close()

    asyncio.run(main())


def test_a_signal_that_gives_nothing_is_blind_and_the_picture_is_made() -> None:
    class Broken:
        name: SignalName = "loads"
        every_s, limit_s = 1.0, 5.0

        async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
            raise PermissionError(13, "Permission denied")

    engine = EngineSeen("e-1", "sglang", "both", None, ())
    assert asyncio.run(_limited(Broken(), (engine,))) == {"e-1": Blind("PermissionError: [Errno 13] Permission denied")}


def test_our_own_engine_that_cannot_be_counted_is_shown_as_blind(tmp_path: Path) -> None:
    """Its threads run, its gateway is not to be seen: that is not healthy, and the picture says what is missing."""

    async def main() -> Engine:
        observer = Observer(Settings(), tmp_path)
        engine = EngineSeen("decode", "closeranks", "decode", None, (Proc(5, 1, 1, "leader", "decode", None, "x"),))
        made = None
        for at in range(10):
            proc = {"at": float(at), "start": 1.0, "state": "S", "switches": float(at), "ticks": float(at)}
            steps = Blind("its gateway's address is not known: no socket of its own can be seen")
            snapshot = Snapshot(
                float(at), 0.0, (engine,), {"proc": {"decode/leader": proc}, "steps": {"decode": steps}}
            )
            observer._memory = machine.step(observer._memory, snapshot)
            made = observer._engine(engine, snapshot)
        await observer.close()
        assert made is not None
        return made

    found = asyncio.run(main())
    assert found.phase == "blind"
    text = shown(Picture(at=0.0, engines=(found,)))
    assert "healthy" not in text
    assert "blind: steps: its gateway's address is not known" in text
    assert found.running is None


def test_tokens_of_our_own_engine_are_its_steps_signal(tmp_path: Path) -> None:
    async def main() -> None:
        observer = Observer(Settings(), tmp_path)
        engine = EngineSeen("decode", "closeranks", "decode", "http://127.0.0.1:1", ())
        rates = []
        for at, count in ((1.0, 10.0), (3.0, 30.0)):
            values = {"at": at, "steps": at, "tokens": count, "running": 2.0}
            snapshot = Snapshot(at, at, (engine,), {"steps": {"decode": values}})
            rates.append(observer._engine(engine, snapshot).tokens_s)
            observer._before = snapshot
        await observer.close()
        assert rates == [None, 10.0]

    asyncio.run(main())


def test_bundles_that_are_not_whole_are_passed_over(tmp_path: Path) -> None:
    for name, text in (("b", json.dumps({"engine": "decode-1", "verdict": "DEAD_PEER", "confirmed": 0})), ("a", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    (tmp_path / "c").mkdir()
    (tmp_path / "mine").write_text("{}")
    found = incidents(tmp_path)
    assert [row["engine"] for row in found] == ["decode-1"]
    assert found[0]["time"] == "1970-01-01 00:00:00Z"
    for text in ("[]", "null", "[" * 100_000, '{"confirmed": 1e300}', '{"confirmed": -1e30}', '{"confirmed": NaN}'):
        (tmp_path / "a" / "manifest.json").write_text(text)
        rows = incidents(tmp_path)
        assert [row["time"] for row in rows if row["engine"] == ""] == [""] * text.startswith("{")
    assert incidents(tmp_path / "nowhere") == []


def test_recoveries_are_the_journals_newest_first(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.open()
    ladder = Plan(Case(blamed=("decode-1",), verdict="DEAD_PEER"), (), ())
    for number in range(7):
        now = Now(float(number), 0.0, "")
        journal.append(Entry(at=now, plan=f"p{number}", event="planned", ladder=ladder))
        if number < 6:
            journal.append(Entry(at=now, plan=f"p{number}", event="over", took_s=75.0, says="recovered: yes"))
    journal.close()
    notes: list[str] = []
    found = recoveries(tmp_path / "journal", notes)
    assert [row["now"] for row in found] == ["planned ", *["recovered: yes"] * 4]
    assert found[1]["took_s"] == "75.0"
    assert not notes
    (tmp_path / "journal").write_bytes(b"rubbish\n" + (tmp_path / "journal").read_bytes())
    assert recoveries(tmp_path / "journal", notes) == []
    assert "damaged" in notes[0]


def test_one_picture_without_a_terminal() -> None:
    command = [sys.executable, "-m", "closeranks.cli.main", "top", "--once", "--json", "--pid", str(os.getpid())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == 3, ran.stderr
    picture = json.loads(ran.stdout)
    assert picture["schema"] == 1
    assert picture["engines"] == []
    wrong = subprocess.run([*command, "--interval", "0"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 2
