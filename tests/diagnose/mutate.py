"""What happens to evidence on its way: cut, wrapped by a collector, merged, shuffled, renamed, ranks left out."""

import json
import random
import re
from collections.abc import Callable

from closeranks.diagnose import wrappers

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

# Prefixes that only a whole file gives away: they could be content.
AGREED: dict[str, Callable[[int, str], str]] = {
    "stern": lambda n, line: f"sgl-decode-0 main {line}",
    "kubetail": lambda n, line: f"[sgl-decode-0] {line}",
    "srun": lambda n, line: f"0: {line}",
    "numbered": lambda n, line: f"[{n + 80700}] {line}",
    "mpirun": lambda n, line: f"[1,0]<stdout>:{line}",
    "github": lambda n, line: f"decode\tRun server\t2026-08-17T21:39:40.1234567Z {line}",
    "compose, ray": lambda n, line: f"head-1  | \x1b[36m(SGLangEngine pid=3310, ip=10.0.0.8)\x1b[0m {line}",
}


def has_records(text: str) -> bool:
    """Whether lines of it show where records begin, which a wrapper is recognised by."""
    return len(text.split("\n")) > 2 and any(wrappers.begins(line) for line in text.split("\n")[:200])


def wrap_whole(text: str, wrapper: str) -> str:
    """A file in which every line has a prefix, or a table of them."""
    lines = text.split("\n")
    lines, rest = (lines[:-1], "\n") if not lines[-1] else (lines, "")
    if wrapper == "datadog":
        quoted = [line.replace('"', '""') for line in lines]
        rows = (f'2026-08-17T21:39:40.000Z,gpu7,sglang,"{line}"' for line in quoted)
        return "\n".join(["date,host,service,message", *rows]) + "\n"
    return "\n".join(AGREED[wrapper](n, line) for n, line in enumerate(lines)) + rest


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
