"""`python -m tests.simulation.breaches [--seeds N] [--only TEXT]`: which seeds find which breach, and how soon."""

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.breaches import LISTED, found_by
from tests.simulation.seeds import pool


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--only", default="", help="part of a breach's name")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    parser.add_argument("--table", action="store_true", help="as a table in Markdown")
    args = parser.parse_args()
    with pool(args.jobs) as run_each:
        return measure(args, run_each)


def measure(args: argparse.Namespace, run_each: Callable[..., Iterable[Any]]) -> int:
    missed = 0
    for name, breach in LISTED.items():
        if args.only not in name:
            continue
        words = list(run_each(functools.partial(found_by, name, events=args.events), range(1, args.seeds + 1)))
        hits = [(word, events) for word, events in words if word]
        missed += len(hits) < 0.9 * args.seeds
        middle = round(statistics.median(events for _, events in hits)) if hits else 0
        patched = f"{breach.cls.__name__}.{breach.attribute}"
        if args.table:
            print(f"| {name} | {breach.law} | `{patched}` | {len(hits)} of {len(words)} | {middle:,} |", flush=True)
        else:
            print(f"{len(hits):2}/{len(words)} {middle:7} {breach.law:12} {name}", flush=True)
            print(f"      {hits[0][0][:150] if hits else 'NOT FOUND'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
