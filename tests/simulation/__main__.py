"""`python -m tests.simulation --seeds N --events M`: run seeds, print what was met.

Exit code 1 at the first violation, which is printed with its seed and a shortened trace.
"""

import argparse
import contextlib
import sys
import time
import traceback
from collections import Counter

from tests.simulation.coverage import Coverage, watching_pages
from tests.simulation.run import Run
from tests.simulation.shorten import kind_of, shorten


def tell(seed: int, args: argparse.Namespace, run: Run, error: Exception) -> None:
    """A failure: where, and the shortest story of it that is found within a minute."""
    traceback.print_exception(error)
    print(f"seed {seed}: {error!s:.600} (event {run.world.events}, {run.world.now:.3f} s); shortening …", flush=True)
    short, again, skip = shorten(
        lambda skip: Run(seed, args.events, args.calm, skip=skip), kind_of(error), run.choices, args.shorten
    )
    story = short.story(again, 80) if again is not None else run.story(error, 80)
    print("\n".join(story))
    print(f"seed {seed}: {again or error!s:.600}\n{run.choices - len(skip)} of {run.choices} choices needed")
    print(f"again: python -m tests.simulation --first {seed} --seeds 1 --events {args.events}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--events", type=int, default=20_000, help="events per seed under load")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further seed after so long")
    parser.add_argument("--calm", action="store_true", help="without loss, damage and faults")
    parser.add_argument("--coverage", action="store_true", help="print the tables of (state, event) pairs")
    parser.add_argument("--markdown", action="store_true", help="with --coverage: the tables in Markdown, too")
    parser.add_argument("--least", type=int, default=100, help="how often each possible pair should be met")
    parser.add_argument("--shorten", type=float, default=60.0, help="seconds spent on shortening a failure")
    args = parser.parse_args()
    coverage = Coverage() if args.coverage else None
    results: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    events = seeds = 0
    started, cpu = time.perf_counter(), time.process_time()
    with watching_pages(coverage) if coverage else contextlib.nullcontext():
        for seed in range(args.first, args.first + args.seeds):
            if time.perf_counter() - started > args.seconds:
                break
            run = Run(seed, args.events, args.calm, coverage)
            try:
                run.go()
            except Exception as error:  # noqa: BLE001 - told with its seed, ends the run
                tell(seed, args, run, error)
                return 1
            seeds += 1
            events += run.world.events
            results += run.outcome()
            faults += run.faults()
            if coverage is not None:
                for life in run.network.lives.values():
                    coverage.moves(life.leader)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if coverage is not None:
        print("\n".join(coverage.report(args.least)))
        if args.markdown:
            print("\n".join(coverage.markdown()))
    print(f"{seeds} seeds, {events} events in {seconds:.1f} s ({events / cpu:.0f} per CPU second), no violation")
    print("requests:", dict(results.most_common()))
    print("faults:", dict(faults.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
