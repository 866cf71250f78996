"""The watch on real wedges: each specimen is started, wedges, and is watched by `closeranks watch`, from outside.

    python bench/watch_specimens.py [--runs 10] [--minutes 60] [--watch-nice -5] [--keep DIR] [--cost] [NAME ...]

One row per specimen: seconds from the onset to the confirmation, to the stored bundle and to the verdict (median and
worst), whether the verdict is right; for look-alikes, whether it was confirmed, in how many seconds of watching.
Runs go round: each specimen once, then each again; `--minutes`: none begins after so long, and the table says how many
there were. `--cost`: CPU of watching eight processes, as a share of one core. The last line is JSON. Ends with 1 when a
verdict was wrong or missing or a look-alike was confirmed, else with 3 when a specimen never ran.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from closeranks.lab.specimens import SPECIMENS, SpecimenError, start

LOOKALIKE_S = 30.0
LIMIT_S = 60.0
START_S = 300.0


@contextlib.contextmanager
def watching(pids: list[int], bundles: Path, nice: int | None) -> Iterator["subprocess.Popen[str]"]:
    """`closeranks watch` of the engines that these processes belong to."""
    command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--json", "--bundle-dir", str(bundles)]
    command += ["--recorder-path", "/dump_flight_recorder", "--pid"]
    with (bundles.parent / "watch.log").open("w") as log:
        process = subprocess.Popen([*command, *map(str, pids)], stdout=subprocess.PIPE, stderr=log, text=True)
        if nice is not None:
            os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def next_incident(process: "subprocess.Popen[str]", limit_s: float) -> dict[str, Any] | None:
    """The next incident that the watch tells of, None within `limit_s`."""
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            return None
        line = process.stdout.readline()
        if not line:
            return None
        found: dict[str, Any] = json.loads(line)
        if found["event"] == "incident":
            return found
    return None


def one(name: str, folder: Path, nice: int | None) -> dict[str, Any] | None:
    """One run of one specimen; None when it did not wedge."""
    specimen = SPECIMENS[name]
    try:
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(start(name, folder=folder / "specimen", timeout=START_S))
            watch = stack.enter_context(watching([running.helpers["launcher"]], folder / "bundles", nice))
            onset = running.wait_onset(START_S)
            found = next_incident(watch, LOOKALIKE_S if specimen.healthy else LIMIT_S)
    except SpecimenError as error:  # it did not start, or its race did not come out as planned: not the watch's doing
        print(str(error).splitlines()[0], file=sys.stderr)
        return None
    if found is None:
        return {"confirmed": False}
    accepted = {specimen.verdict_class, *specimen.also}
    return {
        "confirmed": True,
        "confirmed_s": found["at"] - onset,
        "bundle_s": found["at"] + found["bundle_s"] - onset,
        "verdict_s": found["at"] + found["verdict_s"] - onset,
        "verdict": found["verdict"],
        "certainty": found["certainty"],
        "right": found["verdict"] in accepted,
        "stored": bool(found["bundle"]),
        "why": found["why"],
    }


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """A line of the Markdown table."""
    specimen = SPECIMENS[name]
    if specimen.healthy:
        wrong = sum(r["confirmed"] for r in runs)
        return f"| `{name}` | never confirmed | {wrong} of {len(runs)} confirmed in {LOOKALIKE_S:.0f} s | | | |"
    seen = [r for r in runs if r["confirmed"]]
    right = f"{sum(r['right'] for r in seen)}/{len(runs)}"
    verdicts = ", ".join(sorted({f"{r['verdict']} ({r['certainty']})" for r in seen}))
    times = []
    for key in ("confirmed_s", "bundle_s", "verdict_s"):
        values = [r[key] for r in seen]
        times.append(f"{statistics.median(values):.1f} / {max(values):.1f}" if values else "never")
    return f"| `{name}` | {' | '.join(times)} | {verdicts} | {right} |"


def cost(nice: int | None, seconds: float = 60.0) -> tuple[float, int]:
    """Share of one core that watching costs, and the number of processes watched."""
    with tempfile.TemporaryDirectory(prefix="watch-") as scratch, contextlib.ExitStack() as stack:
        running = stack.enter_context(start("idle", world=6, folder=Path(scratch) / "specimen"))
        count = len(running.pids) + len(running.helpers)
        with watching([running.helpers["launcher"]], Path(scratch) / "bundles", nice) as process:
            time.sleep(10)  # the start is not what watching costs
            before = _cpu(process.pid)
            time.sleep(seconds)
            used = _cpu(process.pid) - before
    return used / seconds, count


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which specimens (default: all)")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so long")
    parser.add_argument("--watch-nice", type=int, help="niceness of the watch, where it is to have another one")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and bundles")
    parser.add_argument("--cost", action="store_true", help="measure the cost of watching too")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.names or SPECIMENS}
    until = time.monotonic() + 60 * args.minutes
    for number, name in ((n, name) for n in range(args.runs) for name in results):
        if time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory(prefix="watch-") as scratch:
            folder = (args.keep or Path(scratch)) / name / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            found = one(name, folder, args.watch_nice)
            results[name].extend([found] if found is not None else [])
        load = os.getloadavg()[0]
        print(f"{number + 1} {name}, load {load:.1f}: {json.dumps(found)}", file=sys.stderr, flush=True)
    print("| specimen | confirmed after (median / worst s) | bundle after | verdict after | verdict | right |")
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        print(row(name, runs))
    wedges = [r for name, runs in results.items() if not SPECIMENS[name].healthy for r in runs]
    false = [name for name, runs in results.items() if SPECIMENS[name].healthy and any(r["confirmed"] for r in runs)]
    summary: dict[str, Any] = {
        "wedges": len(wedges),
        "confirmed": sum(r["confirmed"] for r in wedges),
        "right": sum(r.get("right", False) for r in wedges),
        "worst_verdict_s": round(max((r.get("verdict_s", 0.0) for r in wedges), default=0.0), 1),
        "worst_bundle_s": round(max((r.get("bundle_s", 0.0) for r in wedges), default=0.0), 1),
        "falsely_confirmed": false,
        "never_ran": [name for name, runs in results.items() if not runs],
    }
    if args.cost:
        share, count = cost(args.watch_nice)
        summary["cost_of_one_core"] = round(share, 4)
        summary["processes"] = count
    print(json.dumps(summary))
    if summary["right"] != len(wedges) or false:
        return 1
    return 3 if summary["never_ran"] else 0


if __name__ == "__main__":
    sys.exit(main())
