"""What happens to evidence on its way: cut, wrapped by a collector, merged, shuffled, renamed, ranks left out."""

import json
import random
import re
from collections.abc import Callable

Evidence = list[tuple[str, str]]

WRAPPERS: tuple[Callable[[str], str], ...] = (
    lambda line: f"sglang-1  | {line}",
    lambda line: f"[pod/engine-0/main] {line}",
    lambda line: f"2026-06-17T21:34:46.123456789Z {line}",
    lambda line: f"2026-06-17T21:34:46.123456789Z stdout F {line}",
    lambda line: f"May 16, 2026 @ 20:44:54.728    {line}",
    lambda line: f"\x1b[36m{line}\x1b[0m",
    lambda line: f"Jun 17 21:34:46 host-1 docker[812]: {line}",
    lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-06-17T21:34:46.1Z"}),
)


def truncate(evidence: Evidence, rng: random.Random) -> Evidence:
    i = rng.randrange(len(evidence))
    name, text = evidence[i]
    at = rng.randrange(len(text) + 1)
    return [*evidence[:i], (name, text[:at] if rng.random() < 0.7 else text[at:]), *evidence[i + 1 :]]


def without_file(evidence: Evidence, rng: random.Random) -> Evidence:
    return rng.sample(evidence, len(evidence) - 1) if len(evidence) > 1 else evidence


def without_rank(evidence: Evidence, rng: random.Random) -> Evidence:
    i = rng.randrange(len(evidence))
    parts = re.split(r"(?m)^(?=Process \d+: )", evidence[i][1])
    if len(parts) > 2:
        parts.pop(rng.randrange(1, len(parts)))
    return [*evidence[:i], (evidence[i][0], "".join(parts)), *evidence[i + 1 :]]


def without_lines(evidence: Evidence, rng: random.Random) -> Evidence:
    return [(n, "\n".join(line for line in t.split("\n") if rng.random() > 0.1)) for n, t in evidence]


def wrap(evidence: Evidence, rng: random.Random) -> Evidence:
    wrapper = rng.choice(WRAPPERS)
    return [(n, "\n".join(wrapper(line) for line in t.split("\n"))) for n, t in evidence]


def merge(evidence: Evidence, rng: random.Random) -> Evidence:
    return [("all.txt", "".join(t if t.endswith("\n") else t + "\n" for _, t in evidence))]


def shuffle(evidence: Evidence, rng: random.Random) -> Evidence:
    return rng.sample(evidence, len(evidence))


def rename(evidence: Evidence, rng: random.Random) -> Evidence:
    return [(f"f{i}.txt", t) for i, (_, t) in enumerate(evidence)]


LOSSLESS = (wrap, merge, shuffle, rename)
LOSSY = (truncate, without_file, without_rank, without_lines)
