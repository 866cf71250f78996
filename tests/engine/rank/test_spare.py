"""A spare rank waits without a role; its word makes it a rank like any other, with its output in its epoch's log."""

import json
import subprocess
import sys
from pathlib import Path

SPARE = ["-m", "closeranks.engine.rank", "--spare"]


def test_a_spare_obeys_its_word(tmp_path: Path) -> None:
    log, settings = tmp_path / "rank0.log", tmp_path / "rank0.settings.json"
    settings.write_text('{"run_dir": "x", "engine": "decode", "colour": 1}')
    word = json.dumps({"settings": str(settings), "log": str(log)}) + "\n"
    ran = subprocess.run([sys.executable, *SPARE], input=word, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2, "as a rank that is started with a wrong file"
    assert "colour" in log.read_text()
    assert (ran.stdout, ran.stderr) == ("", "")


def test_a_loaded_spare_has_what_the_first_grammar_needs_and_ends_without_a_word() -> None:
    """Imported while serving, it holds the interpreter for as long as a step may take."""
    argv = [sys.executable, "-X", "importtime", *SPARE]
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, "its supervisor closed the pipe"
    times = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    assert any(" xgrammar." in line for line in times), "modules of it among those imported"
    assert (ran.stdout, len(ran.stderr.splitlines())) == ("", len(times)), "nothing else is said"
