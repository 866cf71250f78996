"""`closeranks replay LOG`: re-run a leader's decisions from its step log, without ranks."""

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

HELP = "re-run a leader's step log without ranks; report the first difference, or a request's life"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", type=Path, metavar="LOG", help="folder of a step log (RUN/ENGINE/EPOCH/log) or a segment"
    )
    parser.add_argument(
        "--request", metavar="ID", type=_id, help="show the life of a request: its id, or its room in hex"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (schema 1)")


def _id(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("give the id of a request, or its room in hex")
    return text


def run(args: argparse.Namespace) -> int:
    """0: the core decides the same again; 1: a difference, or no such request; 3: the log cannot be read."""
    from closeranks.engine.leader.log import Damaged, segments
    from closeranks.engine.leader.replay import Life, replay

    if not args.log.exists():
        print(f"closeranks replay: {args.log}: no such file or folder", file=sys.stderr)
        return 2
    if not segments(args.log):
        below = sorted((p.parent for p in args.log.glob("*/**/*.crlog")), key=lambda p: p.stat().st_mtime)
        hint = f"; the newest below it is {below[-1]}" if below else ""
        print(f"closeranks replay: {args.log}: holds no step log (*.crlog){hint}", file=sys.stderr)
        return 2
    life = Life(args.request) if args.request else None
    try:
        found = replay(args.log, life)
    except (Damaged, OSError) as error:
        if args.json:
            print(json.dumps({"schema": 1, "error": str(error)}))
        else:
            print(f"closeranks replay: {error}", file=sys.stderr)
        return 3
    moments = life.close() if life is not None else []
    if args.json:
        result = msgspec.to_builtins(found)
        if life is not None:
            result["request"] = msgspec.to_builtins(moments)
        print(msgspec.json.encode(result).decode())
    else:
        if found.wall_time:
            began = datetime.fromtimestamp(found.wall_time, UTC).isoformat(timespec="seconds")
            print(f"engine {found.engine}, epoch {found.epoch}, from {began}")
        for note in found.notes:
            print(f"note: {note}")
        for moment in moments:
            print(f"{moment.after_s:+10.4f} s  {moment.room}  {moment.state:10} {moment.what}")
        if life is not None and not moments:
            print(f"no request {args.request} in this log")
        if found.difference is not None:
            d = found.difference
            print(f"first difference: event {d.number} of {d.segment} at {d.at:.6f}: {d.event}")
            print(f"  the log says {d.expected}, the core now says {d.found}: {d.effects}")
        else:
            print(f"{found.events} events, {found.steps} steps, {found.marks} answers: the same again")
    return 1 if found.difference is not None or (life is not None and not moments) else 0
