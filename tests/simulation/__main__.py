"""`python -m tests.simulation --seeds N --events M`: run seeds, print what was met.

Exit code 1 at the first violation, which is printed with its seed and a shortened trace.
"""

import argparse
import functools
import sys
import time
import traceback

from tests.simulation.run import Run
from tests.simulation.seeds import Result, one, pool
from tests.simulation.shorten import fails, kind_of, shorten


def tell(seed: int, args: argparse.Namespace, run: Run, error: BaseException) -> None:
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
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds")
    args = parser.parse_args()
    total = Result()
    seeds = range(args.first, args.first + args.seeds)
    started = time.perf_counter()
    with pool(args.jobs) as run_each:
        for result in run_each(functools.partial(one, args), seeds):
            if result.error:
                run = Run(result.seed, args.events, args.calm)
                error = fails(run)
                tell(result.seed, args, run, error or RuntimeError(f"not again: {result.error}"))
                return 1
            total.add(result)
            if time.perf_counter() - started > args.seconds:
                break
    seconds = time.perf_counter() - started
    if total.coverage is not None:
        print("\n".join(total.coverage.report(args.least)))
        if args.markdown:
            print("\n".join(total.coverage.markdown()))
    pace = f"{total.cpu:.0f} CPU seconds, {total.events / total.cpu:.0f} events each"
    print(f"{total.seeds} seeds, {total.events} events in {seconds:.0f} s ({pace}), no violation")
    print("requests:", dict(total.requests.most_common()))
    print("faults:", dict(total.faults.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
