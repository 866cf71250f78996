"""The incident, from wedge to serving again, as a recording: an asciicast (version 2) and an animated SVG.

    python -m bench.record_incident docs/incident            # starts both engines and the watch (8 ranks), records them
    python -m bench.record_incident docs/incident --log L    # from the log of a watch that was run with --json

Two specimens of four ranks each, `/health` 200, wedge after a mass abort; `closeranks watch --act` knows nothing of
them. What is shown are its own log lines, shortened, with the seconds since the first.
"""

import argparse
import datetime
import json
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.recording import wrapped, write

COMMAND = [sys.executable, "-m", "closeranks.cli.main"]


def told(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """(colour, text) of a log record of the watch; None for one that is not shown."""
    event, level = record["event"], str(record.get("level", "info"))
    if event == "engine state":
        if record["before"] == "unknown":
            return None
        why = "; ".join(record["why"])
        why = why if record["phase"] == "confirmed" else textwrap.shorten(why, 80, placeholder=" …")
        return ("good" if record["phase"] == "healthy" else level), f"{record['engine']}: {record['phase']}  {why}"
    if event == "incident":
        return level, f"{record['engine']}: {record['verdict']} ({record['certainty']}): {record['summary']}"
    if event == "recovery step" and record["result"] != "begin":
        took = f"{record['took_s']:.2f} s"
        line = f"  {record['kind']:6} {record['engine']:28} {took:>8}  {record['says']}"
        return ("info" if record["result"] == "done" else "error"), line
    if event == "recovery over":
        return ("good" if record["status"] == "recovered" else "error"), f"{record['status']}: {record['says']}"
    return None


def lines_of(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, str, str]]:
    """(seconds since the first, colour, text), wrapped to the width."""
    first = None
    for record in records:
        found = told(record)
        if found is None:
            continue
        at = datetime.datetime.fromisoformat(record["timestamp"]).timestamp()
        first = at if first is None else first
        colour, text = found
        head = f"{at - first:6.1f} s  "
        for part in wrapped(head, text):
            yield at - first, colour, part


def run(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Start the pair and the watch; its log records until the recovery is over."""
    ports = [_free(), _free()]
    engines = []
    for name, port in zip(("incident_prefill", "incident_decode"), ports, strict=True):
        command = [*COMMAND, "specimen", name, "--exec", "--once", "--port", str(port), "--fabric", str(folder)]
        engines.append(subprocess.Popen([*command, "--folder", str(folder / name)], start_new_session=True))
    try:
        yield from _watched(folder, ports)
    finally:
        _end(ports, engines)


def _watched(folder: Path, ports: list[int]) -> Iterator[Mapping[str, Any]]:
    """The watch's log records until it has recovered from something."""
    command = [*COMMAND, "watch", "--act", "--json", "--wait-s", "300", "--state-dir", str(folder / "state")]
    command += ["--bundle-dir", str(folder / "bundles"), "--verify-s", "60"]
    command += [word for port in ports for word in ("--url", f"http://127.0.0.1:{port}")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stderr is not None
        for line in watch.stderr:
            record = json.loads(line)
            yield record
            if record["event"] == "recovery over":
                break
        watch.terminate()
        watch.stderr.read()


def _end(ports: list[int], engines: list["subprocess.Popen[bytes]"]) -> None:
    from closeranks.supervise.platforms import processes
    from closeranks.watch.discover import Finder

    for engine in Finder(wanted_ports=ports).find():
        processes.end(processes.known(p.pid for p in engine.procs), 20)
    for process in engines:
        process.wait()


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="OUT.cast and OUT.svg are written")
    parser.add_argument("--log", type=Path, help="JSON lines of a watch's standard error")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="incident-") as folder:
        records = map(json.loads, args.log.read_text().splitlines()) if args.log else run(Path(folder))
        lines = list(lines_of(records))
    command = "closeranks watch --act"
    print(write(args.out, lines, command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
