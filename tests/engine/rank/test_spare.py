"""A spare rank waits without a role; its word makes it a rank like any other, with its output in its epoch's log."""

import json
import subprocess
import sys
from pathlib import Path


def spare() -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "closeranks.engine.rank", "--spare"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_spare_obeys_its_word_or_ends(tmp_path: Path) -> None:
    log, settings = tmp_path / "rank0.log", tmp_path / "rank0.settings.json"
    settings.write_text('{"run_dir": "x", "engine": "decode", "colour": 1}')
    wanted, unwanted = spare(), spare()
    assert wanted.stdin is not None
    wanted.stdin.write(json.dumps({"settings": str(settings), "log": str(log)}) + "\n")
    wanted.stdin.flush()
    out, err = wanted.communicate(timeout=120)
    assert wanted.returncode == 2, "as a rank that is started with a wrong file"
    assert "colour" in log.read_text()
    assert (out, err) == ("", "")
    out, err = unwanted.communicate(timeout=120)
    assert (unwanted.returncode, out, err) == (0, "", ""), "its supervisor closed the pipe"


def test_a_loaded_spare_has_what_the_first_grammar_needs() -> None:
    """Imported while serving, it holds the interpreter for as long as a step may take."""
    argv = [sys.executable, "-X", "importtime", "-m", "closeranks.engine.rank", "--spare"]
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True)
    assert " xgrammar." in ran.stderr, "modules of it among those imported"
