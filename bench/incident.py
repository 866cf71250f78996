"""The incident, replayed: the same mass aborts against the old design and against closeranks, with a protocol of each.

    python -m bench.incident                 4+4 ranks of the double, 2+2 of closeranks over NIXL, a minute each
    python -m bench.incident --seconds 20 --tp-size 2
    python -m bench.incident --record docs/replay   docs/replay.cast and .svg, too

Bursts of 64 streaming clients, 65 % of which leave at one random moment. The double (`closeranks.lab.specimens.double`)
wedges by itself and is shown as an operator would find it; closeranks gets the same bursts until the time is up. Exit
code 0: the one wedged, the other did not and has no residue.
"""

import argparse
import asyncio
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from bench.recording import Line, wrapped, write
from closeranks.lab.specimens.double import Double, start
from tests.e2e import tiny
from tests.e2e.reference import Expected, Reference
from tests.e2e.service import Served, serve
from tests.e2e.storm import CUT, GROUP, agent, survivor

OUTPUT = 20
PATIENCE_S = 10.0
"""A burst that shows nothing for so long is looked at."""


FLAGS = ("--tp-size", 2, "--num-pages", 1500, "--threads", 1, "--disaggregation-transfer-backend", "nixl")
"""Of closeranks' engines."""


class Wedged(Exception):
    """These engines stand still with requests open."""

    def __init__(self, engines: list[str]) -> None:
        super().__init__(", ".join(engines))
        self.engines = engines


async def burst(session: aiohttp.ClientSession, url: str, pool: Sequence[Expected], draw: random.Random, span: float,
                exact: bool, look: Callable[[], list[str]] | None) -> tuple[int, int]:  # fmt: skip
    """One group of clients; (left, stayed). Raises Wedged, or AssertionError at a wrong answer."""
    cut = asyncio.Event()
    leaving: list[asyncio.Task[bool]] = []
    staying: list[asyncio.Task[object]] = []
    for _ in range(GROUP):
        expected = draw.choice(pool)
        if draw.random() < CUT:
            tail = [draw.randrange(5, 500) for _ in range(8)]
            leaving.append(asyncio.create_task(agent(session, url, expected.prompt + tail, OUTPUT * 4, cut)))
        elif exact:
            staying.append(asyncio.create_task(survivor(session, url, expected)))
        else:
            staying.append(asyncio.create_task(agent(session, url, expected.prompt, OUTPUT, asyncio.Event())))
    asyncio.get_running_loop().call_later(draw.random() * span, cut.set)
    await asyncio.gather(*leaving)
    open_ = set(staying)
    while open_:
        done, open_ = await asyncio.wait(open_, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        standing = [] if done or look is None else await asyncio.to_thread(look)
        if standing:
            for task in open_:
                task.cancel()
            await asyncio.wait(open_)
            raise Wedged(standing)
    return sum(task.result() for task in leaving), len(staying)


async def storm(url: str, pool: Sequence[Expected], seconds: float, seed: int, exact: bool,
                look: Callable[[], list[str]] | None, say: Callable[[str], None]) -> None:  # fmt: skip
    """Bursts until the time is up. Raises Wedged."""
    draw = random.Random(seed)
    begin, span = time.monotonic(), 1.0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        number = 0
        while time.monotonic() - begin < seconds:
            number += 1
            at = time.monotonic()
            left, stayed = await burst(session, url, pool, draw, span, exact, look)
            span = 0.7 * span + 0.3 * (time.monotonic() - at)
            say(f"burst {number}: {left} clients left at once, {stayed} stayed and were served")


def expectations(model: Path, seed: int = 7) -> list[Expected]:
    draw, reference = random.Random(seed), Reference(model)
    lengths = range(50, 1400)
    return [
        reference.continue_([draw.randrange(5, 500) for _ in range(draw.choice(lengths))], OUTPUT) for _ in range(12)
    ]


def calm(double: Double, pool: Sequence[Expected]) -> None:
    """As many clients, none of whom leaves: it serves."""

    async def run() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            never = asyncio.Event()
            await asyncio.gather(*(agent(session, double.url, e.prompt, OUTPUT, never) for e in pool))

    asyncio.run(run())


def against_double(double: Double, pool: Sequence[Expected], seconds: float, say: Callable[[str], None]) -> list[str]:
    """Storm the double; the engines that stand still, empty if none does."""
    try:
        asyncio.run(storm(double.url, pool, seconds, 1, False, double.stands, say))
    except Wedged as wedged:
        return wedged.engines
    return []


def picture(double: Double, engine: str) -> list[str]:
    """Where each rank is: the collective, and what called it."""
    lines = []
    for rank, names in enumerate(double.stacks(engine)):
        shown = [name for name in names if name not in ("wrapper", "decorate_context")][:4]
        lines.append(f"{engine} TP{rank}: {' < '.join(shown)}")
    return lines


def against_closeranks(served: Served, pool: Sequence[Expected], seconds: float, say: Callable[[str], None]) -> None:
    """The same storm. Raises AssertionError at a wrong answer, residue, or an engine that was replaced."""
    asyncio.run(storm(served.url, pool, seconds, 1, True, None, say))
    served.assert_no_residue()
    served.assert_undisturbed()


def thinned(record: Sequence[Line], keep: int = 3) -> list[Line]:
    """Of a run of bursts the first and the last few only."""
    shown: list[Line] = []
    for bursts, group in itertools.groupby(record, key=lambda line: " burst " in line[2]):
        lines = list(group)
        if bursts and len(lines) > 2 * keep:
            lines[keep:-keep] = [(lines[keep][0], "info", f"          … {len(lines) - 2 * keep} bursts more")]
        shown += lines
    return shown


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tp-size", type=int, default=4, help="of the double's engines")
    parser.add_argument("--record", type=Path, metavar="OUT", help="write what is said as OUT.cast and OUT.svg, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cri-") as place:
        folder = Path(place) / "double"
        folder.mkdir()
        model = tiny.make(Path(place))
        pool = expectations(model)
        record: list[Line] = []
        zero = time.monotonic()

        def say(text: str, colour: str = "info") -> None:
            at = time.monotonic() - zero
            print(f"[{at:6.1f} s] {text}", flush=True)
            record.extend((at, colour, part) for part in wrapped(f"{at:6.1f} s  ", text))

        with start(folder, args.tp_size) as double:
            say(f"the old design serves, {args.tp_size} + {args.tp_size} ranks")
            calm(double, pool)
            say(f"{len(pool)} clients, none of whom left, were served")
            standing = against_double(double, pool, args.seconds, say)
            if standing:
                say(f"wedged: {' and '.join(standing)}; /health says {double.health()}", "error")
            for line in (line for engine in double.pids for line in picture(double, engine)):
                say("  " + line, "warning")
            errors = [line for line in double.log.splitlines() if "Unexpected transfer worker error" in line]
            for line in errors[:3]:
                say("  " + line, "warning")
        with serve(model, *FLAGS) as served:
            say("closeranks serves, 2 + 2 ranks, NIXL")
            against_closeranks(served, pool, args.seconds, say)
            say("no engine was replaced, every answer right, no page or room left", "good")
    if args.record:
        print(write(args.record, thinned(record), "python -m bench.incident"))
    return 0 if standing else 1


if __name__ == "__main__":
    sys.exit(main())
