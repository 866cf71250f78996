"""`closeranks specimen`: list the specimens, or run one and keep it, or capture evidence of it."""

import argparse
import json
import math
import signal
import sys
from pathlib import Path

HELP = "run a small program that wedges, or seems to, for real: a test object for detectors and diagnoses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`closeranks specimen [NAME] [--world N] [--capture DIR] [--json]`."""
    parser.add_argument("name", nargs="?", help="which specimen to run; without it, list them")
    parser.add_argument("--world", type=int, help="number of ranks (default: the specimen's own)")
    parser.add_argument("--port", type=int, default=0, help="port of its HTTP endpoints (default: any)")
    parser.add_argument("--capture", type=Path, metavar="DIR", help="capture evidence into DIR and end")
    parser.add_argument("--once", action="store_true", help="no fault when it has struck before in this --folder")
    parser.add_argument("--folder", type=Path, help="keep log and sockets here (default: a temporary folder)")
    parser.add_argument("--fabric", type=Path, metavar="DIR", help="hand over through here (both of a pair: the same)")
    parser.add_argument(
        "--exec",
        action="store_true",
        help="become the engine's launcher, as if started by hand (with --folder, --port)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="until it is ready, and until it has set in (60 each)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def seconds(text: str) -> float:
    """A positive finite number. Raises `argparse.ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def run(args: argparse.Namespace) -> int:
    """List, or run until interrupted (or until captured). 2 for an unknown name, 3 when it did not set in."""
    from closeranks.lab.specimens import SPECIMENS, SpecimenError, become, start

    if args.name is None:
        for specimen in SPECIMENS.values():
            if args.json:
                fields = ("name", "engine", "verdict_class", "healthy", "title", "picture")
                print(json.dumps({field: getattr(specimen, field) for field in fields}))
            else:
                print(f"{specimen.name:22} {specimen.verdict_class:28} {specimen.title}")
        return 0
    if args.name not in SPECIMENS:
        print(f"no specimen {args.name!r}; known: {', '.join(SPECIMENS)}", file=sys.stderr)
        return 2
    if args.world is not None and not 2 <= args.world <= 16:
        print(f"--world {args.world}: a specimen has 2 to 16 ranks", file=sys.stderr)
        return 2
    if args.exec:
        if args.folder is None or not args.port or args.capture:
            print("--exec needs --folder and --port, and captures nothing", file=sys.stderr)
            return 2
        become(args.name, args.folder, args.port, args.once, args.fabric, args.world)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the `with` below ends the specimen's processes
    try:
        with start(
            args.name,
            world=args.world,
            folder=args.folder,
            port=args.port,
            once=args.once,
            fabric=args.fabric,
            timeout=args.wait,
        ) as running:
            _say(args.json, event="ready", pids=running.pids, helpers=running.helpers, port=running.port)
            onset = running.wait_onset(args.wait)
            _say(args.json, event="onset", t=onset, log=str(running.log), expected=running.specimen.verdict_class)
            if args.capture:
                _say(args.json, event="captured", folder=str(running.capture(args.capture)))
            else:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except SpecimenError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


def _say(as_json: bool, **fields: object) -> None:
    text = json.dumps(fields) if as_json else "  ".join(f"{name}={value}" for name, value in fields.items())
    print(text, flush=True)
