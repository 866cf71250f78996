"""The incident, from wedge to serving again, as a recording: an asciicast (version 2) and an animated SVG.

    python bench/record_incident.py docs/incident            # starts both engines and the watch (8 ranks), records them
    python bench/record_incident.py docs/incident --log L    # from the log of a watch that was run with --json

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
from html import escape
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "closeranks.cli.main"]
WIDTH, LINE, CHAR = 118, 18, 7.9
COLOURS = {"error": "#ff6b68", "warning": "#e5c07b", "info": "#d7dae0", "good": "#98c379", "command": "#61afef"}
RIGHTS = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px"


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
        indent = " " * (len(text) - len(text.lstrip()))
        for number, part in enumerate(textwrap.wrap(text, WIDTH - len(head), subsequent_indent=indent + "  ")):
            yield at - first, colour, (" " * len(head) if number else head) + part


def cast(lines: list[tuple[float, str, str]], command: str) -> str:
    """asciicast v2."""
    codes = {"error": "31", "warning": "33", "info": "0", "good": "32", "command": "36"}
    out = [json.dumps({"version": 2, "width": WIDTH, "height": 40, "title": "closeranks watch --act"})]
    out.append(json.dumps([0.0, "o", f"\x1b[36m$ {command}\x1b[0m\r\n"]))
    out += [json.dumps([round(t, 2), "o", f"\x1b[{codes[c]}m{text}\x1b[0m\r\n"]) for t, c, text in lines]
    return "\n".join(out) + "\n"


def svg(lines: list[tuple[float, str, str]], command: str, speed: float = 4.0) -> str:
    """A picture whose lines appear in their order, `speed` times as fast as it was; whole where nothing is animated."""
    shown = [(0.0, "command", f"$ {command}"), *lines]
    height, width = LINE * (len(shown) + 2), int(CHAR * WIDTH) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>@keyframes in{from{opacity:0}to{opacity:1}}text{white-space:pre;" + RIGHTS + "}"
        "@media(prefers-reduced-motion:no-preference){text{opacity:0;animation:in .2s forwards}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e222a"/>',
    ]
    for number, (at, colour, text) in enumerate(shown):
        y, delay = LINE * (number + 2) - 4, at / speed
        parts.append(
            f'<text x="12" y="{y}" fill="{COLOURS[colour]}" style="animation-delay:{delay:.2f}s">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


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
    args.out.with_suffix(".cast").write_text(cast(lines, command))
    args.out.with_suffix(".svg").write_text(svg(lines, command))
    print(f"{len(lines)} lines, {lines[-1][0]:.0f} s: {args.out}.cast, {args.out}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
