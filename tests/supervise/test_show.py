"""Passing on what children write: whole lines, once, and never at the cost of who is supervised."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from closeranks.supervise import lines, show
from closeranks.supervise.child import Child


class Screen:
    def __init__(self, *logs: Path, render: show.Render | None = None) -> None:
        self.text = ""
        process = subprocess.Popen(["true"])
        process.wait()
        children = [Child(log.stem, log, process) for log in logs]
        self.show = show.Show(lambda: children, self._write, render)

    def _write(self, text: str) -> None:
        self.text += text

    def look(self) -> str:
        """What one look passes on."""
        self.text = ""
        self.show.now()
        return self.text


def test_whole_lines_are_passed_on_once_and_a_cut_log_from_its_new_beginning(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    screen = Screen(log)
    assert screen.look() == "", "there is none yet"
    log.write_text("one\ntw")
    assert screen.look() == "one\n"
    with log.open("a") as file:
        file.write("o\n")
    assert screen.look() == "two\n"
    assert screen.look() == ""
    log.write_text("[cut]\n")
    assert screen.look() == "[cut]\n"


def test_what_was_there_before_is_not_shown(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("earlier\n")
    screen = Screen(log)
    screen.show.skip(log)
    screen.show.skip(tmp_path / "none")
    with log.open("a") as file:
        file.write("now\n")
    assert screen.look() == "now\n"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES, errno.ENOTDIR, errno.ELOOP])
def test_a_log_that_cannot_be_read_is_said_once_and_read_when_it_can_be(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    bad.write_text("of the first\n")
    screen = Screen(bad, good)
    real, failing = Path.open, True

    def opened(path: Path, *args: object, **more: object) -> object:
        if failing and path == bad:
            raise OSError(number, os.strerror(number))
        return real(path, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    for n in range(3):
        with good.open("a") as file:
            file.write(f"{n}\n")
        assert screen.look() == f"{n}\n"
    said = "".join(capfd.readouterr())
    assert said.count("a log cannot be shown now") == 1
    assert os.strerror(number) in said
    failing = False
    assert screen.look() == "of the first\n"


def test_something_else_in_its_place_ends_nothing(tmp_path: Path) -> None:
    folder, below = tmp_path / "a.log", tmp_path / "file" / "b.log"
    folder.mkdir()
    below.parent.touch()
    assert Screen(folder, below).look() == ""


def test_a_flood_is_passed_on_in_parts_and_left_to_the_file_where_it_is_far_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "MOST", 100)
    monkeypatch.setattr(show, "FAR", 1000)
    log = tmp_path / "a.log"
    log.write_text("123456789\n" * 50)
    screen = Screen(log)
    assert [screen.look().count("123456789\n") for _ in range(6)] == [10] * 5 + [0]
    with log.open("a") as file:
        file.write("123456789\n" * 500)
    said = screen.look().splitlines()
    assert said[0] == f"[4900 bytes not shown: see {log}]"
    assert said[1:] == ["123456789"] * 10
    log.write_text("x" * 250)
    assert [screen.look() for _ in range(3)] == ["x" * 100, "x" * 100, ""], "a line without an end is not waited for"


def test_json_lines_take_the_shape_of_the_others_and_nothing_else_is_touched(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    event = {"event": "rank ready", "level": "info", "timestamp": "2026-11-30T16:45:29.1Z", "rank": 0, "page": "k, v"}
    odd = [
        {
            "event": "odd",
            "level": "loud",
            "exc_info": True,
            "exception": 5,
            "stack": None,
            "_record": 1,
            "z": {"a": []},
        },
        {"no event": 1},
        {"event": 5},
    ]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in [event, *odd]) + '{"event": "cut\n{}}\ntext\n')
    said = Screen(log, render=lines.for_people).look().splitlines()
    assert said[0].split() == ["2026-11-30T16:45:29.1Z", "[info", "]", "rank", "ready", "page='k,", "v'", "rank=0"]
    assert said[1].split() == ["odd", "z={'a':", "[]}"]
    assert '{"no event": 1}' in said
    assert '{"event": 5}' in said
    assert said[-3:] == ['{"event": "cut', "{}}", "text"]
