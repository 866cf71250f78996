"""The public corpus, through the scorer that anyone runs on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = [Path(os.environ["CLOSERANKS_DSML_CASES"])] if "CLOSERANKS_DSML_CASES" in os.environ else []
CORPUS += [ROOT / "tests" / "corpus" / "dsml.jsonl"]


def test_every_case_is_exact() -> None:
    """Exact under every chunking; no leak, no variance, no bad JSON."""
    file = next((path for path in CORPUS if path.exists()), None)
    if file is None:
        pytest.skip("no corpus here: set CLOSERANKS_DSML_CASES to a file of cases")
    command = [sys.executable, str(ROOT / "bench" / "score_dsml.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    score = json.loads(done.stdout.splitlines()[-1])
    assert score == {"cases": score["cases"], "exact": score["cases"], "leaks": 0, "chunk_variant": 0, "bad_json": 0}, (
        done.stdout
    )
    assert score["cases"] > 0
    assert done.returncode == 0
