"""Growth of the served engine with concurrency and with context, and overlap on beside overlap off, in one run.

    python bench/serve_growth.py [--model-path FOLDER] [--rounds 3] [--threads 2]

Two services of the same weights stand at once, one with `--disable-overlap-schedule`; one works at a time, in turn,
while the other idles. Random prompts, new ones each time, so that no prefix cache helps. Figures are medians over the
rounds. Prints two Markdown tables: output tokens per second against concurrency (128 in, 64 out), and time to the
first token and per further token against context (one stream), each with the ratio of overlap on over off.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import aiohttp
from serve_throughput import Server, free_port, prompts

VARIANTS = {"overlap on": [], "overlap off": ["--disable-overlap-schedule"]}


@dataclass(frozen=True)
class Stream:
    """Seconds to the first token and per further one, of one request alone."""

    first_s: float
    further_s: float


async def stream(server: Server, prompt: list[int], count: int) -> Stream:
    body = {"model": server.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    begin = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session,
        session.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
    if tokens != count:
        raise SystemExit(f"{server.name}: asked for {count} tokens, got {tokens}")
    return Stream(first - begin, (last - first) / (count - 1))


def ratio(values: dict[str, float]) -> str:
    on, off = (values[name] for name in VARIANTS)
    return f"{on / off:.2f}"


async def concurrency_table(servers: dict[str, Server], args: argparse.Namespace) -> None:
    print(f"| concurrency | {' | '.join(f'{n}, output tokens/s' for n in VARIANTS)} | on/off | per stream, on |")
    print("|---|---|---|---|---|")
    for concurrency in args.concurrency:
        rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for r in range(args.rounds):
            for i, (name, server) in enumerate(servers.items()):
                taken = await server.measure(prompts(concurrency, 128, 1000 * concurrency + 10 * r + i), args.output)
                rates[name].append(concurrency * args.output / taken)
        median = {name: statistics.median(v) for name, v in rates.items()}
        cells = " | ".join(f"{median[n]:.1f}" for n in VARIANTS)
        print(f"| {concurrency} | {cells} | {ratio(median)} | {median['overlap on'] / concurrency:.1f} |", flush=True)


async def context_table(servers: dict[str, Server], args: argparse.Namespace) -> None:
    print("\n| context, tokens | first token, s (on) | first token, s (off) | per token, ms (on) | per token, ms (off) "
          "| on/off per token |\n|---|---|---|---|---|---|")  # fmt: skip
    for context in args.context:
        found: dict[str, list[Stream]] = {name: [] for name in VARIANTS}
        for r in range(args.rounds):
            for i, (name, server) in enumerate(servers.items()):
                (prompt,) = prompts(1, context, 7 * context + 10 * r + i)
                found[name].append(await stream(server, prompt, args.output))
        first = {n: statistics.median(s.first_s for s in v) for n, v in found.items()}
        further = {n: 1000 * statistics.median(s.further_s for s in v) for n, v in found.items()}
        cells = " | ".join(f"{first[n]:.2f}" for n in VARIANTS) + " | "
        cells += " | ".join(f"{further[n]:.1f}" for n in VARIANTS)
        print(f"| {context} | {cells} | {ratio(further)} |", flush=True)


async def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="", help="left out: the embedded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096])
    args = parser.parse_args()
    servers: dict[str, Server] = {}
    try:
        for name, flags in VARIANTS.items():
            port, folder = free_port(), tempfile.mkdtemp(prefix="crb-")
            argv = [sys.executable, "-m", "closeranks.cli.main", "serve", "--disaggregation-mode", "null"]
            argv += ["--port", str(port), "--run-dir", folder, "--threads", str(args.threads), *flags]
            if args.model_path:
                argv += ["--model-path", args.model_path]
            servers[name] = Server(name.replace(" ", "-"), argv, port, "default", {})
            await servers[name].ready("/ready")
            print(f"# {name}: {' '.join(argv)}", file=sys.stderr)
            await servers[name].measure(prompts(1, 16, 1), 4)
        await concurrency_table(servers, args)
        await context_table(servers, args)
    finally:
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
