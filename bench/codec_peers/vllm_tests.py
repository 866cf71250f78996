#!/usr/bin/env python3
"""vLLM's own tests of its DSML parsers, run against closeranks; every deviation has its reason.

    CLOSERANKS_VLLM_VENV=DIR/vllm python bench/codec_peers/vllm_tests.py SDIST [-v]

SDIST: the unpacked source distribution of the installed vLLM (`vllm-0.32.0`), which has the tests. Fails if a test
fails that `vllm_deviations.json` does not list, or if a listed one passes. The last line is JSON.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = [
    "tests/parser/engine/test_deepseek_v4.py",
    "tests/parser/engine/test_deepseek_v32.py",
    "tests/parser/engine/test_deepseek_v41.py",
    "tests/tool_parsers/test_deepseekv32_tool_parser.py",
    "tests/tool_parsers/test_deepseekv4_tool_parser.py",
]
INI = """[pytest]
markers =
    skip_global_cleanup
    slow_test
    cpu_test
"""


def run(sdist: Path, python: str, verbose: bool) -> tuple[dict[str, str], str]:
    """Outcome (`passed`, `failed`, `error`) of each test, and pytest's output."""
    with tempfile.TemporaryDirectory() as folder:
        # A copy of the tests alone: beside the sources of vllm they would import those, not the installed package.
        shutil.copytree(sdist / "tests", Path(folder) / "tests")
        (Path(folder) / "tests" / "conftest.py").unlink()  # for tests of whole engines; needs their dependencies
        (Path(folder) / "pytest.ini").write_text(INI)
        paths = [str(HERE.parent.parent / "src"), str(HERE), folder]
        command = [python, "-m", "pytest", "-p", "vllm_adapter", "-p", "no:cacheprovider", "-q", "-rA", *TESTS]
        if not verbose:
            command.append("--tb=no")
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    found = re.findall(r"^(PASSED|FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    outcomes = {name.removeprefix("tests/"): outcome.lower() for outcome, name in found}
    return outcomes, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sdist", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    venv = os.environ.get("CLOSERANKS_VLLM_VENV")
    if not venv:
        print("CLOSERANKS_VLLM_VENV names no environment with vLLM (bench/codec_peers/setup.sh)", file=sys.stderr)
        return 2
    outcomes, output = run(options.sdist, str(Path(venv) / "bin" / "python"), options.verbose)
    if options.verbose or not outcomes:
        print(output)
    if not outcomes:
        return 3
    reasons: dict[str, str] = json.loads((HERE / "vllm_deviations.json").read_text())
    failed = {name for name, outcome in outcomes.items() if outcome != "passed"}
    listed = {name for name in outcomes if any(name.startswith(prefix) for prefix in reasons)}
    for name in sorted(failed - listed):
        print(f"not listed, but fails: {name}")
    for name in sorted(listed - failed):
        print(f"listed, but passes: {name}")
    summary = {"tests": len(outcomes), "passed": len(outcomes) - len(failed), "deviations": len(failed & listed)}
    print(json.dumps(summary))
    return 0 if failed == listed else 1


if __name__ == "__main__":
    sys.exit(main())
