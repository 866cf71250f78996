"""Answers of the served model against `transformers`, over the product of everything that must not change them.

    python -m tests.e2e.exactness            the full product on the tiny model (prints one line a combination)
    python -m tests.e2e.exactness --cover    a cover of it in which every pair of values meets
    python -m tests.e2e.exactness --smollm2  such a cover on the default model, 1 to 3,000 tokens, several languages
    python -m tests.e2e.exactness --seeded   drawn tokens in place of the likeliest ones, every request with a seed,
                                             temperature and cuts, on the cover; or with --smollm2

A combination is one `closeranks serve`; within it the same prompts go one by one and then 32 at once.
"""

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from tests.e2e import smollm, tiny
from tests.e2e.reference import Expected, Reference, Tally, compare
from tests.e2e.service import Served, serve

AXES: dict[str, tuple[str, ...]] = {
    "ranks": ("both 1", "both 2", "pair 1+1", "pair 2+2", "pair 2+1", "pair 4+4"),
    "backend": ("shm", "nixl"),
    "overlap": ("on", "off"),
    "radix": ("on", "off"),
    "chunk": ("64", "512"),
    "retraction": ("forced", "none"),
}
SMOLLM2 = ("both 1", "both 2", "pair 1+1", "pair 2+2", "pair 2+1")
"""What its 3 KV heads allow."""
Combination = tuple[str, ...]
AT_ONCE = 32
OUTPUT = 96
"""Tokens per answer: six pages of growth where admission leaves one to spare, so that few pages do force retraction."""

SHORT = 32
"""Tokens per answer where no retraction is wanted."""


def product() -> list[Combination]:
    """Every combination; without a hand-over (role both) there is one backend only."""
    return [c for c in itertools.product(*AXES.values()) if not (c[0].startswith("both") and c[1] == "nixl")]


def cover(ranks: Sequence[str] = AXES["ranks"]) -> list[Combination]:
    """A small part of the product in which every two values of different axes meet (greedy, deterministic)."""
    left = [c for c in product() if c[0] in ranks]
    pairs = {pair for c in left for pair in itertools.combinations(enumerate(c), 2)}
    chosen: list[Combination] = []
    while pairs:
        best = max(left, key=lambda c: sum(pair in pairs for pair in itertools.combinations(enumerate(c), 2)))
        pairs -= set(itertools.combinations(enumerate(best), 2))
        chosen.append(best)
    return chosen


def flags(combination: Combination, tight: int = 120, ample: int = 2000) -> list[str]:
    """The command line of a combination; `tight` pages force retraction, `ample` ones never do."""
    ranks, backend, overlap, radix, chunk, retraction = combination
    mode, sizes = ranks.split()
    out = ["--chunked-prefill-size", chunk, "--disaggregation-transfer-backend", backend]
    if mode == "both":
        out += ["--disaggregation-mode", "null", "--tp-size", sizes]
    else:
        prefill, decode = sizes.split("+")
        out += ["--prefill-tp-size", prefill, "--decode-tp-size", decode]
    if overlap == "off":
        out.append("--disable-overlap-schedule")
    if radix == "off":
        out.append("--disable-radix-cache")
    out += ["--num-pages", str(tight if retraction == "forced" else ample), "--threads", "1", "--no-spares"]
    return out


def prompts() -> list[list[int]]:
    """Lengths from 1 to 300, on and beside page and chunk borders, a third of them with a common prefix."""
    draw = random.Random(7)
    shared = [draw.randrange(5, tiny.VOCABULARY) for _ in range(100)]
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 300]
    lengths += [draw.randrange(1, 300) for _ in range(AT_ONCE - len(lengths))]
    found = []
    for i, length in enumerate(lengths):
        tail = [draw.randrange(5, tiny.VOCABULARY) for _ in range(length)]
        found.append((shared + tail)[:300] if i % 3 == 0 else tail)
    return found


def seeded(number: int) -> dict[str, object]:
    """Sampling parameters of the request of that number: pure draws, and every kind of cut."""
    cuts: tuple[dict[str, object], ...] = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    )
    return {"seed": 1000 + number, **cuts[number % len(cuts)]}


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: list[int], count: int, **more: object
) -> list[int]:
    """Token ids of a completion. Raises AssertionError with the server's words on anything but 200."""
    body = {"model": "default", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more}  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, f"{answer.status}: {text}"
        found: list[int] = (await answer.json())["choices"][0]["token_ids"]
        return found


async def hold_against(served: Served, expected: Sequence[Expected], tally: Tally, at_once: int) -> None:
    """Send every prompt, `at_once` at a time, and compare."""
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(e: Expected) -> list[int]:
            async with gate:
                return await complete(session, served.url, e.prompt, len(e.tokens), **e.asked)

        left = list(expected)
        while left:
            answers = await asyncio.gather(*(one(e) for e in left))
            settled = [compare(e, got, tally) for e, got in zip(left, answers, strict=True)]
            left = [e.rest(done) for e, done in zip(left, settled, strict=True) if done < len(e.tokens)]


def check(
    combination: Combination,
    model: Path | str,
    expected: Sequence[Expected],
    tight: int = 120,
    ample: int = 2000,
    crowd: Sequence[Expected] = (),
) -> Tally:
    """Run one combination. Raises AssertionError naming the first difference.

    The tiny model's 32 sequences of up to 396 tokens take 590 pages together. `crowd`: sent as well where retraction is
    forced and many run at once, for prompts that do not fill the pool of themselves.
    """
    tally = Tally()
    if combination[5] == "none":
        expected = [e.first(SHORT) for e in expected]
    with serve(model, *flags(combination, tight, ample)) as served:
        asyncio.run(hold_against(served, expected, tally, 1))
        at_once = [*expected, *crowd] if combination[5] == "forced" else expected
        asyncio.run(hold_against(served, at_once, tally, AT_ONCE))
        served.assert_undisturbed()
        engines = served.assert_no_residue()
        if combination[5] == "forced":
            assert sum(e["counters"]["retracted"] for e in engines.values()) > 0, "nothing was retracted"
    tally.check()
    return tally


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", action="store_true")
    parser.add_argument("--from", type=int, default=0, dest="first", help="skip this many combinations")
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--seeded", action="store_true")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="crt-"))
    model: Path | str
    if args.smollm2:
        tokenizer = Tokenizer.from_file(str(smollm.folder(place) / "tokenizer.json"))
        reference = Reference(place)
        given = smollm.prompts(lambda text: tokenizer.encode(text).ids)
        # together 380 pages: 200 hold the longest alone (194), but not all at once
        model, combinations, pages = "", cover(SMOLLM2), (200, 700)
    else:
        model = tiny.make(place)
        reference = Reference(model)
        given = prompts()
        combinations, pages = (cover() if args.cover or args.seeded else product()), (120, 2000)
    crowd: list[Expected] = []
    expected = [reference.continue_(p, OUTPUT, seeded(i) if args.seeded else None) for i, p in enumerate(given)]
    if args.smollm2:
        crowd = [e for e in expected if len(e.prompt) < 1000] * 2
    total, failed, begin = Tally(), 0, time.monotonic()
    for i, combination in enumerate(combinations[args.first :], args.first + 1):
        try:
            tally = check(combination, model, expected, *pages, crowd)
        except AssertionError as error:
            failed += 1
            print(f"{i}/{len(combinations)} {' | '.join(combination)}: DIFFERS: {error}", flush=True)
            continue
        total.positions += tally.positions
        total.ties += tally.ties
        print(f"{i}/{len(combinations)} {' | '.join(combination)}: equal, {tally.ties} ties", flush=True)
    took = time.monotonic() - begin
    print(f"{len(combinations)} combinations, {failed} differ, {took:.0f} s")
    print(f"{total.positions} positions, {total.ties} near ties")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
