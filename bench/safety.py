"""What the checks cost: throughput of a served pair with all of them beside all off, overlap on and off.

    python -m bench.safety                              SmolLM2, concurrency 8 (about 15 minutes on 2 cores)
    python -m bench.safety --model tiny --rounds 3 --output 32

Off: `--no-digest --no-checksums --no-step-log` and deadlines that never come (1e9 s). Two services differ in nothing
else; both run all the time, one works while the other idles, in an order that changes with every round. A round is
`--concurrency` prompts of random tokens at once, new ones each time, so that no prefix is cached; all of prefill,
hand-over (NIXL where it is installed) and decode counts. The ratio is of medians; the range is a 95 % bootstrap
interval over the rounds.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from tests.e2e import smollm, tiny
from tests.e2e.service import Served, serve

NEVER = "1e9"
DEADLINES = ("--step-deadline-s", "--transfer-stall-s", "--transfer-deadline-s", "--collective-deadline-s")
OFF = ("--no-digest", "--no-checksums", "--no-step-log", *(word for flag in DEADLINES for word in (flag, NEVER)))
SIDES: dict[str, tuple[str, ...]] = {"on": (), "off": OFF}
GOAL = 0.98


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int) -> None:
    body = {"model": "default", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    done = False
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            done = done or f'"completion_tokens":{count}'.encode() in line.replace(b" ", b"")
    assert done, "an answer is not whole"


async def work(url: str, prompts: Sequence[list[int]], count: int) -> float:
    """Output tokens per second of one round."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(ask(session, url, prompt, count) for prompt in prompts))
        return len(prompts) * count / (time.perf_counter() - begin)


def measure(services: dict[str, Served], args: argparse.Namespace, vocabulary: int) -> dict[str, list[float]]:
    draw = random.Random(args.seed)
    found: dict[str, list[float]] = {name: [] for name in services}
    for number in range(-1, args.rounds):  # the first round warms up
        names = list(services)
        draw.shuffle(names)
        for name in names:
            prompts = [[draw.randrange(5, vocabulary) for _ in range(args.input)] for _ in range(args.concurrency)]
            rate = asyncio.run(work(services[name].url, prompts, args.output))
            print(f"# round {number}, checks {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
            if number >= 0:
                found[name].append(rate)
    for served in services.values():
        served.assert_undisturbed()
    return found


def interval(on: Sequence[float], off: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians."""
    draw = random.Random(1)
    ratios = sorted(
        statistics.median(draw.choices(on, k=len(on))) / statistics.median(draw.choices(off, k=len(off)))
        for _ in range(draws)
    )
    return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="smollm2")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crsafe-") as place:
        small = args.model == "tiny"
        model = tiny.make(Path(place)) if small else smollm.folder(Path(place))
        vocabulary = tiny.VOCABULARY if small else 40000
        print("| model | overlap | checks on, tokens/s | off, tokens/s | on / off | 95 % of it | rounds |")
        print("|---|---|---|---|---|---|---|", flush=True)
        bad = False
        for overlap in ("on", "off"):
            flags = ["--threads", "1", "--tp-size", str(args.ranks), "--no-spares", "--num-pages", "600"]
            flags += ["--disable-overlap-schedule"] if overlap == "off" else []
            with ExitStack() as stack:
                services = {name: stack.enter_context(serve(model, *flags, *more)) for name, more in SIDES.items()}
                found = measure(services, args, vocabulary)
            on, off = statistics.median(found["on"]), statistics.median(found["off"])
            low, high = interval(found["on"], found["off"])
            bad = bad or on / off < GOAL
            cells = [args.model, overlap, f"{on:.1f}", f"{off:.1f}", f"{on / off:.3f}", f"{low:.3f} to {high:.3f}"]
            print(f"| {' | '.join([*cells, str(args.rounds)])} |", flush=True)
    return int(bad and not small)


if __name__ == "__main__":
    sys.exit(main())
