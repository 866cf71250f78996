"""The public cases and our own, as (name, evidence, class, may_be_certain, must_not_match)."""

import json
from functools import cache
from pathlib import Path

from tests.diagnose import variants

PUBLIC = Path(__file__).parent.parent / "corpus" / "hangs.jsonl"


@cache
def public() -> tuple[tuple[str, list[tuple[str, str]], str, bool, tuple[str, ...]], ...]:
    out = []
    for line in PUBLIC.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        t = case["truth"]
        evidence = [(e["name"], e["text"]) for e in case["evidence"]]
        out.append((case["id"], evidence, t["verdict_class"], t["may_be_certain"], tuple(t["must_not_match"])))
    return tuple(out)


@cache
def own() -> tuple[tuple[str, list[tuple[str, str]], str, bool, tuple[str, ...]], ...]:
    return tuple((*case, ()) for case in variants.cases())


def evidence_of(name: str) -> list[tuple[str, str]]:
    return next(evidence for n, evidence, *_ in (*public(), *own()) if n == name)
