"""Diagnoses of specimens: each is started, captured with real py-spy and diagnosed, several times over.

    python bench/specimens.py [--runs 10] [--keep DIR] [NAME ...]

Prints one row per specimen and, as its last line, JSON with `runs`, `right`, `certain_and_wrong` and `wrong` (by name).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from closeranks.lab.specimens import SPECIMENS, SpecimenError, start


def diagnose(folder: Path) -> tuple[str, str]:
    """Class and certainty of the main finding, from the command that a user would run."""
    command = [sys.executable, "-m", "closeranks.cli.main", "diagnose", "--json", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    try:
        findings = json.loads(ran.stdout)["findings"]
    except ValueError:
        return "no answer", ran.stderr.strip().rpartition("\n")[2][:80]
    return (findings[0]["class"], findings[0]["certainty"]) if findings else ("none", "undetermined")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which specimens (default: all)")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the captures")
    args = parser.parse_args()
    right = total = 0
    wrong: dict[str, list[str]] = {}
    certain = 0
    print(f"{'specimen':22} {'expected':30} {'right':>7}  {'s/run':>5}  others")
    for name in args.names or SPECIMENS:
        specimen, began, answers = SPECIMENS[name], time.monotonic(), Counter[tuple[str, str]]()
        for number in range(args.runs):
            with tempfile.TemporaryDirectory(prefix="specimen-") as scratch:
                folder = (args.keep or Path(scratch)) / name / str(number)
                try:
                    with start(name, folder=folder) as running:
                        running.wait_onset()
                        answers[diagnose(running.capture())] += 1
                except SpecimenError as error:  # a machine so busy: no answer of diagnose, and counted as none
                    print(f"{name}, run {number}: {error}", file=sys.stderr)
                    answers["did not start", "undetermined"] += 1
        accepted = {specimen.verdict_class, *specimen.also}
        good = sum(n for (verdict, _), n in answers.items() if verdict in accepted)
        bad = {key: n for key, n in answers.items() if key[0] not in accepted}
        certain += sum(n for (_, certainty), n in bad.items() if certainty == "shown")
        right, total = right + good, total + args.runs
        if bad:
            wrong[name] = sorted({verdict for verdict, _ in bad})
        others = ", ".join(f"{n} x {verdict} ({certainty})" for (verdict, certainty), n in bad.items())
        seconds = (time.monotonic() - began) / args.runs
        print(f"{name:22} {specimen.verdict_class:30} {good:3}/{args.runs:<3}  {seconds:5.1f}  {others}", flush=True)
    print(json.dumps({"runs": total, "right": right, "certain_and_wrong": certain, "wrong": wrong}))
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())
