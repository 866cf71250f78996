#!/usr/bin/env python3
"""What `closeranks guard` costs: CPU per stream event over the same proxy that only passes on, and its memory.

    python bench/guard.py [--streams 1000] [--events 100] [--rounds 2]

A guard runs as a process of its own between an upstream and a client in this one. Both phases go through the same
server, connections and bytes; they differ in the path alone: `/v1/plain` is passed on, `/v1/chat/completions` watched.
CPU is the guard process's own (user + system), divided by the events. Texts: `prose` (plain words and newlines, the
usual case), `code` (full of `<`, backticks and bars, each of which holds text back for a moment) and `leak` (every
answer holds a leaked call). The last line printed is JSON.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
BLOCK = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
WORDS = [" the", " model", " writes", " a", " few", " words", " and", " goes", " on", " until", " it", " ends", "."]
CODE = ["if", " a", " <", " b", ":\n", "    ", "`x`", " |", " y", "->", " List", "<", "T", ">", " {\n", "}\n", "```\n"]


def texts(kind: str, events: int) -> list[str]:
    """Deltas of about one token each."""
    rng = random.Random(1)
    if kind == "code":
        return [rng.choice(CODE) for _ in range(events)]
    words = [rng.choice(WORDS) + ("\n\n" if rng.random() < 0.03 else "") for _ in range(events)]
    if kind == "prose":
        return words
    text = "".join(words[: events // 2]) + BLOCK.format("".join(words[events // 2 :]))
    size = max(1, len(text) // events)
    return [text[at : at + size] for at in range(0, len(text), size)][:events]


def events_of(kind: str, events: int) -> list[bytes]:
    """One HTTP chunk per event, as an engine writes them."""
    out = []
    for text in texts(kind, events):
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        top = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        data = b"data: " + json.dumps(top, ensure_ascii=False).encode() + b"\n\n"
        out.append(b"%x\r\n%s\r\n" % (len(data), data))
    return out


class Upstream:
    """Writes one event to every open stream, then the next: as an engine that steps its batch."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.events: list[bytes] = []
        self.waiting: list[asyncio.StreamWriter] = []
        self.all_there = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le"))
        await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.waiting.append(writer)
        if len(self.waiting) == self.streams:
            self.all_there.set()

    async def run(self) -> None:
        await self.all_there.wait()
        for event in self.events:
            for writer in self.waiting:
                writer.write(event)
            await asyncio.gather(*(writer.drain() for writer in self.waiting))
        for writer in self.waiting:
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
            writer.close()
        self.waiting.clear()
        self.all_there.clear()


async def client(port: int, path: str) -> int:
    """One request; returns the bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]
    body = json.dumps({"model": "m", "messages": [], "stream": True, "tools": tools}).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    total, tail = 0, b""
    while data := await reader.read(1 << 16):
        total += len(data)
        tail = (tail + data)[-16:]
        if tail.endswith(b"0\r\n\r\n"):
            break
    writer.close()
    return total


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident now, and its peak."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024, int(lines["VmHWM"].split()[0]) / 1024


async def phase(upstream: Upstream, port: int, pid: int, path: str) -> float:
    """Microseconds of the guard's CPU per event."""
    before = cpu_seconds(pid)
    clients = [asyncio.ensure_future(client(port, path)) for _ in range(upstream.streams)]
    await upstream.run()
    sizes = await asyncio.gather(*clients)
    assert min(sizes) > 100, "an answer was cut"
    return (cpu_seconds(pid) - before) / (upstream.streams * len(upstream.events)) * 1e6


def core_us(kind: str, events: int) -> float:
    """Microseconds of CPU per event of the guard's core alone, one event at a time, without sockets."""
    from closeranks.gateway.guard import Counters, StreamWatch, decoders
    from closeranks.gateway.guard.asked import Asked

    asked = Asked(({"type": "function", "function": {"name": "write"}},))
    stream = [event.partition(b"\r\n")[2][:-2] for event in events_of(kind, events)]
    best = float("inf")
    for _ in range(30):
        core = StreamWatch(lambda thinking: decoders()(asked, thinking), Counters())
        start = time.process_time()
        for event in stream:
            core.feed(event)
        best = min(best, (time.process_time() - start) / len(stream))
    return best * 1e6


async def main(args: argparse.Namespace) -> int:
    upstream = Upstream(args.streams)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, backlog=4096)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    command = [sys.executable, "-m", "closeranks.cli.main", "guard", url, "--port", "0", "--json"]
    guard = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert guard.stdout is not None
    results = []
    try:
        port = int(json.loads(await guard.stdout.readline())["listening"].rpartition(":")[2])
        upstream.events = events_of("prose", 20)
        await phase(upstream, port, guard.pid, "/v1/chat/completions")  # warm
        print(f"{args.streams} streams of {args.events} events; CPU of the guard per event, best of {args.rounds}")
        print(
            f"{'text':<8}{'passed on':>12}{'watched':>12}{'difference':>12}{'core alone':>12}{'RSS MiB':>10}{'peak':>8}"
        )
        for kind in ("prose", "code", "leak"):
            upstream.events = events_of(kind, args.events)
            plain, watched = [], []
            for _ in range(args.rounds):
                plain.append(await phase(upstream, port, guard.pid, "/v1/plain"))
                watched.append(await phase(upstream, port, guard.pid, "/v1/chat/completions"))
            now, peak = memory_mib(guard.pid)
            a, b, core = min(plain), min(watched), core_us(kind, args.events)
            print(
                f"{kind:<8}{a:>9.1f} us{b:>9.1f} us{b - a:>9.1f} us{core:>9.1f} us{now:>10.0f}{peak:>8.0f}", flush=True
            )
            results.append(
                {"text": kind, "passed_on_us": a, "watched_us": b, "over_us": b - a, "core_us": core, "peak_mib": peak}
            )
    finally:
        guard.terminate()
        await guard.wait()
        server.close()
    print(json.dumps({"streams": args.streams, "events": args.events, "results": results}))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--events", type=int, default=100, help="per stream")
    parser.add_argument("--rounds", type=int, default=2)
    sys.exit(asyncio.run(main(parser.parse_args())))
