"""The public cases, our own, and those after other threads, as (name, evidence, class, may_be_certain, must_not_match).

`threads.jsonl` has the format of the public cases. Its texts are re-created after the shape of the issue that `url`
names, or are look-alikes of such (no `url`); the answers are our own reading. Where more than one answer is honest, the
others stand in `also_right`, and in `also_right_if_not_shown` those that the evidence allows as likely at most.
"""

import json
from functools import cache
from pathlib import Path

from tests.diagnose import variants, variants_readers

CORPUS = Path(__file__).parent.parent / "corpus"
Case = tuple[str, list[tuple[str, str]], str, bool, tuple[str, ...]]


def _read(name: str) -> list[tuple[Case, dict[str, list[str]]]]:
    out = []
    for line in (CORPUS / name).read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        t = case["truth"]
        evidence = [(e["name"], e["text"]) for e in case["evidence"]]
        out.append(((case["id"], evidence, t["verdict_class"], t["may_be_certain"], tuple(t["must_not_match"])), t))
    return out


@cache
def public() -> tuple[Case, ...]:
    return tuple(case for case, _ in _read("hangs.jsonl"))


@cache
def threads() -> tuple[Case, ...]:
    return tuple(case for case, _ in _read("threads.jsonl"))


@cache
def also_right() -> dict[str, tuple[list[str], list[str]]]:
    """Case of `threads` → further right classes, and those that are right unless they are shown."""
    return {case[0]: (t["also_right"], t["also_right_if_not_shown"]) for case, t in _read("threads.jsonl")}


@cache
def own() -> tuple[Case, ...]:
    return tuple((*case, ()) for case in [*variants.cases(), *variants_readers.cases()])


def evidence_of(name: str) -> list[tuple[str, str]]:
    return next(evidence for n, evidence, *_ in (*public(), *own(), *threads()) if n == name)
