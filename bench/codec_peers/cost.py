#!/usr/bin/env python3
"""What streaming one long argument costs a parser in all: closeranks beside SGLang's released detector.

    CLOSERANKS_SGLANG_VENV=DIR/sglang python bench/codec_peers/cost.py [--kb 16 64] [--json]     (DIR: see setup.sh)

One call with one argument of so many KB, in deltas of four characters, as text: CPU seconds of the process for all
deltas together (median of three where that is less than a second). SGLang's is `FunctionCallParser(tools, "deepseekv4")
.parse_stream_chunk`, which reads the whole argument again with each delta.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = "def f(x: int) -> int:\n    return x << 2 if x < 10 else x  # <b>not</b> markup\n"
ITEMS = '{"step": "write code", "ratio": 0.25, "done": false}, '
OPENED = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="{}">'
KINDS = {"string": (OPENED.format("true"), SOURCE, "string"), "json": (OPENED.format("false") + "[", ITEMS, "array")}
WIDTH = 4


def closeranks(kind: str) -> Callable[[str], Any]:
    from closeranks.codec import Decoder

    return Decoder("v4", tools=["write"]).feed


def sglang(kind: str) -> Callable[[str], Any]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parameters = {"type": "object", "properties": {"text": {"type": KINDS[kind][2]}}}
    tool = Tool(type="function", function={"name": "write", "parameters": parameters})
    return FunctionCallParser([tool], "deepseekv4").parse_stream_chunk


MAKERS = {"closeranks": closeranks, "sglang": sglang}


def seconds(peer: str, kind: str, kb: int) -> float:
    """CPU seconds for the whole stream."""
    opener, unit, _ = KINDS[kind]
    size = kb * 1024
    text = (unit * (size // len(unit) + 1))[:size]
    pieces = [text[i : i + WIDTH] for i in range(0, size, WIDTH)]
    taken: list[float] = []
    while not taken or (len(taken) < 3 and sum(taken) < 1):
        feed = MAKERS[peer](kind)
        feed(opener)
        began = time.process_time()
        for piece in pieces:
            feed(piece)
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def measured(python: str, peer: str, sizes: list[int]) -> dict[tuple[str, int], float]:
    """The same, in a process of the peer's environment."""
    command = [python, str(Path(__file__).resolve()), "--only", peer, "--kb", *map(str, sizes)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {(row["kind"], row["kb"]): row["seconds"] for row in json.loads(lines[-1])}


def main() -> int:
    """Print one table, or with --only one peer's figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kb", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--only", choices=MAKERS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.only:
        rows = [
            {"kind": kind, "kb": kb, "seconds": seconds(options.only, kind, kb)} for kind in KINDS for kb in options.kb
        ]
        print(json.dumps(rows))
        return 0
    venv = os.environ.get("CLOSERANKS_SGLANG_VENV")
    if not venv:
        print("CLOSERANKS_SGLANG_VENV is not set: bench/codec_peers/setup.sh makes one", file=sys.stderr)
        return 2
    mine = measured(sys.executable, "closeranks", options.kb)
    theirs = measured(f"{venv}/bin/python", "sglang", options.kb)
    print(f"{'argument':<10}{'KB':>5}{'closeranks ms':>15}{'sglang ms':>12}{'ratio':>8}")
    for (kind, kb), value in mine.items():
        other = theirs[kind, kb]
        print(f"{kind:<10}{kb:>5}{value * 1000:>15.1f}{other * 1000:>12.0f}{other / value:>8.0f}")
    if options.json:
        rows = [{"kind": k, "kb": n, "seconds": v, "sglang_seconds": theirs[k, n]} for (k, n), v in mine.items()]
        print(json.dumps({"schema": 1, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
