#!/usr/bin/env python3
"""What a delta costs: time per fed delta while a tool call's arguments stream, by size and delta length.

    python bench/codec_cost.py [--quick] [--json]

Measured for closeranks and, where `deepseek-recipe` is installed (`pip install closeranks[recipe]`), for it: string
arguments (a source file with angle brackets and newlines), prose without markup, and JSON as an argument (which the
peer passes on unchecked): an array of objects, and one of short numbers, where every delta holds several tokens. A
figure is the median of its rounds in CPU time; the two take turns, and the ratio is the median of the rounds' ratios.
Memory is the growth of Python's heap (tracemalloc) over the stream, for a decoder whose events are thrown away. With
--json the last line printed is JSON.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from closeranks.codec import Decoder

SIZES = {"1 KB": 1024, "16 KB": 16 * 1024, "128 KB": 128 * 1024, "1 MB": 1024 * 1024}
SOURCE = "def f(x: int) -> int:\n    return x << 2 if x < 10 else x  # <b>not</b> markup\n"
PROSE = "The quick brown fox jumps over the lazy dog, 7 times; then it rests. "
ITEMS = '{"step": "write code", "ratio": 0.25, "done": false}, '
NUMBERS = "12,3,456,7,8.5,"
OPENED = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="{}">'
ARRAY = OPENED.format("false") + "["
KINDS = {
    "string": (OPENED.format("true"), SOURCE),
    "prose": ("", PROSE),
    "json": (ARRAY, ITEMS),
    "dense": (ARRAY, NUMBERS),
}

Feed = Callable[[str], Any]


def ours() -> Feed:
    """A fresh decoder's feed."""
    return Decoder("v4", tools=["write"]).feed


def recipe() -> Feed | None:
    """deepseek-recipe's processor, fed text; its chunks are rendered as JSON, which is how it is read."""
    try:
        import deepseek_recipe as peer
    except ImportError:
        return None
    conversation = peer.ConversationRequest(peer.Conversation(), peer.ModelVersion.DeepseekV4Pro)
    options = peer.ParsingOptions(
        parse_tool_calls=True, starts_in_tool_calls=False, thinking_initial_stage=None, stop_sequences=[]
    )
    processor = peer.StreamProcessor(peer.ChatCompletionRequest.chunk_generator(conversation, "id", "m"), options, None)
    push, text = processor.push, peer.InferenceChunk.text

    def feed(delta: str) -> list[str]:
        return [chunk.to_json() for chunk in push(text(delta, 1))]

    return feed


def deltas(kind: str, size: int, width: int) -> list[str]:
    """A stream of `size` characters in deltas of `width`."""
    unit = KINDS[kind][1]
    text = (unit * (size // len(unit) + 1))[:size]
    return [text[i : i + width] for i in range(0, size, width)]


def per_delta(make: Callable[[], Feed | None], kind: str, pieces: list[str]) -> float:
    """Microseconds per delta, over as many streams as take a while."""
    streams = max(1, 4096 // len(pieces))
    feeds = [feed for _ in range(streams) if (feed := make()) is not None]
    for feed in feeds:
        feed(KINDS[kind][0])
    gc.collect()
    gc.disable()
    start = time.process_time_ns()
    for feed in feeds:
        for piece in pieces:
            feed(piece)
    taken = (time.process_time_ns() - start) / len(pieces) / streams / 1000
    gc.enable()
    return taken


def growth(kind: str, pieces: list[str]) -> float:
    """Kilobytes by which the heap grew over the stream."""
    feed = ours()
    feed(KINDS[kind][0])
    feed(pieces[0])
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for piece in pieces:
        feed(piece)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown / 1024


def main() -> int:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 128 KB only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = {name: size for name, size in SIZES.items() if size <= 128 * 1024 or not options.quick}
    peer = recipe() is not None
    rows: list[dict[str, Any]] = []
    print(f"{'arguments':<10}{'size':>8}{'chars/delta':>13}{'us/delta':>10}{'recipe':>9}{'ratio':>7}{'heap KB':>9}")
    for kind in KINDS:
        for width in (1, 4):
            for name, size in sizes.items():
                pieces = deltas(kind, size, width)
                rounds = max(3, min(15, 200_000 // len(pieces)))
                taken = [
                    (per_delta(ours, kind, pieces), per_delta(recipe, kind, pieces) if peer else 0.0)
                    for _ in range(rounds)
                ]
                mine, theirs = (statistics.median(column) for column in zip(*taken, strict=True))
                ratio = statistics.median(a / b for a, b in taken) if peer else None
                row = {"kind": kind, "size": name, "width": width, "us": round(mine, 2)}
                row |= {"recipe_us": round(theirs, 2) if peer else None, "ratio": ratio and round(ratio, 2)}
                row["heap_kb"] = round(growth(kind, pieces[:100_000]), 1)
                rows.append(row)
                shown = f"{theirs:>9.2f}{ratio:>7.2f}" if ratio else f"{'-':>9}{'-':>7}"
                print(f"{kind:<10}{name:>8}{width:>13}{mine:>10.2f}{shown}{row['heap_kb']:>9.1f}", flush=True)
    for kind in KINDS:
        for width in (1, 4):
            figures = [row["us"] for row in rows if row["kind"] == kind and row["width"] == width]
            print(f"{kind}, {width}: largest size / smallest size = {figures[-1] / figures[0]:.2f}")
    if options.json:
        print(json.dumps({"schema": 1, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
