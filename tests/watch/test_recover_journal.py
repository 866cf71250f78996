"""The journal: what was appended is read back, cut anywhere it reads as a beginning, and it never takes half a line."""

import errno
import json
import os
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.watch import recover_journal
from closeranks.watch.recover_journal import (
    KEPT,
    Entry,
    Journal,
    JournalDamaged,
    Now,
    episodes,
    read,
    restarts,
    unfinished,
)
from closeranks.watch.recover_state import Action, Case, Plan, Policy, Side, plan

NOW = Now(1000.0, 50.0, "boot-a")
LADDER = plan(
    Case(blamed=("decode-1",), verdict="DEAD_PEER"),
    [Side(name="decode-1", kind="sglang", role="decode"), Side(name="prefill-1", kind="sglang", role="prefill")],
    Policy(),
)
END = Action("end", "decode-1", ("decode-1",), 5.0, "why")


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine loses its power here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def entries(count: int = 6) -> list[Entry]:
    assert isinstance(LADDER, Plan)
    made = [Entry(at=NOW, plan="p1", event="planned", ladder=LADDER)]
    for step in range(count):
        event = ("begin", "done", "failed")[step % 3]
        made.append(Entry(at=NOW, plan="p1", event=event, step=step, action=END, says="gé \n {}"))  # type: ignore[arg-type]
    return made


def written(path: Path, given: list[Entry]) -> bytes:
    journal = Journal(path)
    journal.open()
    for entry in given:
        journal.append(entry)
    journal.close()
    return path.read_bytes()


def test_cut_at_every_byte_it_reads_as_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    given = entries(3)
    data = written(path, given)
    counts = set()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        found = read(path)
        assert found == given[: len(found)]
        counts.add(len(found))
    assert counts == set(range(len(given) + 1))


def test_after_a_torn_line_appending_goes_on_where_the_last_sound_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    given = entries(3)
    data = written(path, given)
    path.write_bytes(data[:-7])
    more = written(path, [given[-1]])
    assert read(path) == given
    assert more == data


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_byte_is_never_read_as_something_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("j") / "journal"
    given = entries(3)
    raw = bytearray(written(path, given))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        found = read(path)
    except JournalDamaged:
        return
    assert found == given[: len(found)]
    assert len(found) >= len(given) - 1, "more than the last line was lost in silence"


def line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


@pytest.mark.parametrize("many", [0, KEPT])
def test_lines_of_another_version_stay_whole(tmp_path: Path, many: int) -> None:
    """With a field that this one does not know, encoded in another way than this one would."""
    path = tmp_path / "journal"
    known = json.loads(msgspec.json.encode(entries(1)[1]))
    foreign = line(json.dumps({**known, "host": "a", "says": "\u00e9"}, indent=None).encode())
    path.write_bytes(foreign * (many + 2))
    added = entries(2)[2]
    data = written(path, [added])
    assert data == foreign * (many or 2) + line(msgspec.json.encode(added))
    assert read(path)[-1] == added


def test_a_whole_line_that_cannot_be_read_is_not_taken_for_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = written(path, entries(1)) + line(b'{"event":"an event of a later version"}')
    path.write_bytes(data)
    with pytest.raises(JournalDamaged, match="line 3: whole, but of another version"):
        Journal(path).open()
    assert path.read_bytes() == data


def test_damage_in_the_middle_is_no_torn_write(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = written(path, entries(3)).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[2:]]))
    with pytest.raises(JournalDamaged, match="line 2"):
        read(path)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    before = written(path, entries(1))
    journal = Journal(path)
    journal.open()
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[:10], offset)  # the kernel takes what fits

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError) as raised:
        journal.append(entries(1)[0])
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    monkeypatch.undo()
    journal.append(entries(1)[0])
    journal.close()
    assert len(read(path)) == 3


def test_a_long_journal_is_shortened(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    entry = Entry(at=NOW, plan="p", event="begin", step=0, action=END)
    journal = Journal(path)
    journal.open()
    journal.close()
    path.write_bytes(recover_journal._line(entry) * (KEPT + 5))
    journal.open()
    journal.close()
    assert len(read(path)) == KEPT
    assert path.stat().st_mode & 0o077 == 0


def test_a_plan_that_is_tried_for_days_is_not_forgotten(tmp_path: Path) -> None:
    assert isinstance(LADDER, Plan)
    path = tmp_path / "journal"
    start = next(n for n, a in enumerate(LADDER.actions) if a.kind == "start")
    ends = [n for n, a in enumerate(LADDER.actions) if a.kind == "end"]
    made = [Entry(at=NOW, plan="p", event="planned", ladder=LADDER)]
    made += [Entry(at=NOW, plan="p", event=e, step=n) for n in ends for e in ("begin", "done")]  # type: ignore[arg-type]
    for _ in range(KEPT):
        made += [Entry(at=NOW, plan="p", event=e, step=start) for e in ("begin", "failed")]  # type: ignore[arg-type]
    before = unfinished(made)
    path.write_bytes(b"".join(recover_journal._line(entry) for entry in made))
    journal = Journal(path)
    journal.open()
    journal.close()
    assert len(journal.entries) == KEPT + 1 + 2 * len(ends)
    assert unfinished(read(path)) == before
    assert before is not None
    assert before.down
    over = Entry(at=NOW, plan="p", event="over")
    path.write_bytes(b"".join(recover_journal._line(entry) for entry in [*made, over]))
    journal.open()
    journal.close()
    assert len(journal.entries) == KEPT


def test_ages_by_the_clock_that_nobody_sets(tmp_path: Path) -> None:
    entry = Entry(at=NOW, plan="p", event="begin", step=0, action=END)
    assert entry.age_s(Now(99999.0, 60.0, "boot-a")) == 10.0  # the wall clock jumped
    assert entry.age_s(Now(1100.0, 3.0, "boot-b")) == 100.0
    assert entry.age_s(Now(10.0, 3.0, "boot-b")) == 0.0  # back in time: just now, so recovery waits


def test_restarts_are_counted_once_however_often_a_step_was_begun(tmp_path: Path) -> None:
    twice = [Entry(at=NOW, plan=p, event="begin", step=s, action=END) for p, s in (("p", 1), ("p", 1), ("q", 1))]
    later = Now(1010.0, 60.0, "boot-a")
    assert [(r.engine, r.age_s) for r in restarts(twice, later)] == [("decode-1", 10.0)] * 2


def test_the_open_plan_is_the_last_one_unless_it_is_over() -> None:
    given = entries(3)
    left = unfinished(given)
    assert left is not None
    assert left.results == {1: "done", 2: "failed"}
    assert unfinished([*given, Entry(at=NOW, plan="p1", event="over", says="recovered: x")]) is None
    assert unfinished([]) is None
    assert [name for name, _ in episodes(given)] == ["p1"]
