"""The step log: bounded, readable after a crash, silent about tokens; replay gives the same answers again."""

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.cli import main as cli
from closeranks.engine.leader import snapshot
from closeranks.engine.leader.events import Config, Tick
from closeranks.engine.leader.log import MAGIC, Damaged, Header, Writer, read, segments
from closeranks.engine.leader.replay import Life, replay
from tests.simulation.run import Run

LOGGED = "decode-1"


def simulated(folder: Path, seed: int, segment_bytes: int = 1 << 14, keep: int = 50, events: int = 9000) -> Run:
    """A run of which one engine writes a log (of its first epoch: the run is without faults)."""
    run = Run(seed, events, calm=True)
    engine = run.network.engines[LOGGED]
    engine.life.desk.writer = Writer(folder, engine.life.leader.config, segment_bytes, keep)
    run.go()
    engine.life.desk.writer.flush()
    return run


@pytest.mark.parametrize("seed", range(1, 5))
def test_replay_decides_the_same_again(tmp_path: Path, seed: int) -> None:
    simulated(tmp_path, seed)
    found = replay(tmp_path)
    assert found.difference is None
    assert found.notes == []
    assert found.segments > 1
    assert found.steps > 100


def test_replay_is_the_same_under_another_hash_seed(tmp_path: Path) -> None:
    simulated(tmp_path, 5)
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "closeranks.cli.main", "replay", str(tmp_path)]
        assert subprocess.run(command, env=env, check=False, capture_output=True).returncode == 0


def test_every_segment_replays_by_itself(tmp_path: Path) -> None:
    simulated(tmp_path, 2, segment_bytes=1 << 13)
    parts = segments(tmp_path)
    assert len(parts) > 2
    for part in parts:
        assert replay(part).difference is None


def test_the_log_is_bounded_and_old_segments_go(tmp_path: Path) -> None:
    simulated(tmp_path, 2, segment_bytes=1 << 13, keep=3)
    parts = segments(tmp_path)
    assert [p.name for p in parts][-1] != "00000003.crlog"
    assert len(parts) == 3
    assert replay(tmp_path).difference is None


def test_a_changed_decision_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path, 3)
    from closeranks.engine.leader.core import Leader

    settle = Leader.settle

    def other(self: Leader, step: object) -> None:
        settle(self, step)  # type: ignore[arg-type]
        if self.steps.last >= 100:
            self.scheduler.slots.reverse()  # matters to engines of any role

    monkeypatch.setattr(Leader, "settle", other)
    found = replay(tmp_path)
    assert found.difference is not None
    assert found.steps >= 100
    assert cli.main(["replay", str(tmp_path)]) == 1


def test_a_crash_in_the_midst_of_a_write_costs_one_record(tmp_path: Path) -> None:
    simulated(tmp_path, 1)
    last = segments(tmp_path)[-1]
    whole = sum(1 for _ in read(last))
    data = last.read_bytes()
    for cut in (1, 5, 9, 30):
        last.write_bytes(data[:-cut])
        assert whole - 6 < sum(1 for _ in read(last)) < whole
        assert replay(tmp_path).difference is None
    last.write_bytes(data + b"\0" * 100)
    assert sum(1 for _ in read(last)) == whole


def test_what_is_missing_from_a_log_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A length that was damaged looks like a torn end; the core is not blamed for what follows it."""
    simulated(tmp_path, 1)
    first, *later = segments(tmp_path)
    assert later
    assert not replay(tmp_path).notes
    whole = first.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        whole[:3],
        whole[: len(MAGIC)],
        b"",
        whole[: len(whole) // 2] + b"\0" * 4096,
    ):
        first.write_bytes(damaged)
        found = replay(tmp_path)
        assert found.difference is None
        assert any(first.name in note for note in found.notes), found.notes
        assert cli.main(["replay", str(tmp_path)]) == 0
        assert f"note: {first.name}" in capsys.readouterr().out


def test_damage_in_the_midst_is_said_and_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated(tmp_path, 1)
    first = segments(tmp_path)[0]
    whole = first.read_bytes()
    for place in range(len(whole) // 2, len(whole) // 2 + 9):  # four bytes at most are a length
        data = bytearray(whole)
        data[place] ^= 0xFF
        first.write_bytes(data)
        with contextlib.suppress(Damaged):
            assert replay(tmp_path).notes, "a damaged length looks like a torn end"
            continue
        break
    with pytest.raises(Damaged, match="damaged"):
        replay(tmp_path)
    assert cli.main(["replay", str(tmp_path)]) == 3
    (tmp_path / "x.crlog").write_bytes(b"nonsense, not a log at all")
    assert cli.main(["replay", str(tmp_path / "x.crlog")]) == 3
    assert cli.main(["replay", str(tmp_path / "absent")]) == 2


def test_a_full_disk_is_counted_and_the_log_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config("e", "both", 1, 1)
    writer = Writer(tmp_path, config, 1 << 16, 4)
    writer.begin(0.0, 1.0, b"")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer.write(Tick(1.0))
    writer.flush()
    assert "No space left" in writer.trouble
    assert writer.lost > 0
    assert writer.full
    monkeypatch.setattr(os, "write", write)
    writer.begin(0.0, 3.0, b"")
    assert writer.trouble == ""
    assert isinstance(next(read(segments(tmp_path)[-1])), Header)


def test_service_goes_on_with_a_full_disk_and_the_next_segment_starts_from_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(3, 9000, calm=True)
    engine = run.network.engines[LOGGED]
    writer = engine.life.desk.writer = Writer(tmp_path, engine.life.leader.config, 1 << 20, 10)
    write, count = os.write, 0

    def sometimes_full(fd: int, data: bytes) -> int:
        nonlocal count
        count += 1
        if 10 < count < 20:
            write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", sometimes_full)
    run.go()
    writer.flush()
    assert writer.lost > 0
    assert writer.trouble == ""
    found = replay(tmp_path)
    assert found.difference is None
    assert any("lost" in note for note in found.notes)


def test_no_token_ids_in_the_log_unless_asked(tmp_path: Path) -> None:
    run = simulated(tmp_path, 1)
    records = [record for part in segments(tmp_path) for record in read(part)]
    assert records
    assert not [record for record in records if type(record).__name__ == "Words"]
    assert run.outcome()["done"] > 10


def test_a_requests_life_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulated(tmp_path, 1)
    ends = run.network.engines[LOGGED].life.witness.ends.values()
    words = ""
    for request in [x.room for x in ends if x.reason == "length"]:
        life = Life(str(request.id))
        assert replay(tmp_path, life).difference is None
        words = " / ".join(moment.what for moment in life.close())
        assert "Submitted" in words
        if "rows in steps" in words:
            break  # one whose only token came from prefill has none here
    assert "rows in steps" in words
    assert cli.main(["replay", str(tmp_path), "--request", f"{request.id:016x}", "--json"]) == 0
    assert cli.main(["replay", str(tmp_path), "--request", "nobody"]) == 1
    assert "no request nobody" in capsys.readouterr().out


def test_snapshot_of_a_snapshot_is_equal(tmp_path: Path) -> None:
    run = Run(6, 3000, calm=True)
    while run.world.events < 3000:
        run.world.step()
    for engine in run.network.engines.values():
        leader = engine.life.leader
        data = snapshot.take(leader)
        assert snapshot.take(snapshot.restore(leader.config, data)) == data


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xc1", b"\x91\x92\xa5Popen\x80", b"garbage"])
def test_rubbish_is_no_snapshot(data: bytes) -> None:
    with pytest.raises(snapshot.BadSnapshot):
        snapshot.restore(Config("e", "both", 1, 1), data)


def test_a_folder_above_the_log_names_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine's folder, say: the log lies in its epochs."""
    for epoch, age in ((1, 50), (2, 0)):
        file = tmp_path / str(epoch) / "log" / "00000001.crlog"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x")
        os.utime(file.parent, (1e9 - age, 1e9 - age))
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert str(tmp_path / "2" / "log") in capsys.readouterr().err
