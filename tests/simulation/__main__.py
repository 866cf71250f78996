"""`python -m tests.simulation --seeds N --events M`: run seeds, print what was met; exit 1 at the first violation."""

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.simulation.run import Run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds")
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--events", type=int, default=20_000, help="events per seed under load")
    parser.add_argument("--calm", action="store_true", help="without loss, damage and faults")
    parser.add_argument("--coverage", action="store_true", help="print the table of (state, happening) pairs")
    args = parser.parse_args()
    met: Counter[tuple[str, str]] = Counter()
    results: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    events = 0
    started = time.perf_counter()
    for seed in range(args.first, args.first + args.seeds):
        run = Run(seed, args.events, args.calm)
        try:
            run.go()
        except Exception:  # noqa: BLE001 - printed with its seed, ends the run
            print("\n".join(run.world.trace[-40:]))
            traceback.print_exc()
            print(f"seed {seed}: violated after {run.world.events} events at {run.world.now:.3f}", file=sys.stderr)
            return 1
        events += run.world.events
        met.update(run.coverage())
        results.update(run.results)
        for engine in run.network.engines.values():
            faults.update(engine.faults)
    seconds = time.perf_counter() - started
    print(f"{args.seeds} seeds, {events} events in {seconds:.1f} s ({events / seconds:.0f}/s), no violation")
    print("requests:", dict(results.most_common()))
    print("faults:", dict(faults.most_common()))
    if args.coverage:
        for (state, happening), count in sorted(met.items()):
            print(f"{state:10} {happening:10} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
