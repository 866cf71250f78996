"""Faults made in engines of the real SGLang (TP 2) and vLLM (a pair), and what must be said of them.

`tests/corpus/real/cases.json`: folder → engine and its version, what was done, the classes that are right for the main
finding, and optionally the engine or words that it must name, further classes that are right of a part of the evidence
(`parts`), known issues that it must not be called (`not_known`), and whether nothing was wrong, or had passed, when the
evidence was taken (`sound`). The evidence was taken with the commands of
docs/diagnose.md, "Capture by hand", then redacted and shortened: log tails, counters without histogram buckets.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from closeranks.diagnose.judge import diagnose_paths, diagnose_texts
from closeranks.diagnose.verdict import SOUND, Verdict
from tests.diagnose import mutate

REAL = Path(__file__).parent.parent / "corpus" / "real"
CASES: dict[str, dict[str, Any]] = json.loads((REAL / "cases.json").read_text(encoding="utf-8"))


def texts(name: str) -> list[tuple[str, str]]:
    folder = REAL / name
    return [
        (str(f.relative_to(folder)), f.read_text(encoding="utf-8")) for f in sorted(folder.rglob("*")) if f.is_file()
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_a_real_engine_is_named(name: str) -> None:
    verdict: Verdict = diagnose_paths([REAL / name])
    case = CASES[name]
    assert verdict.main.cls in case["classes"], verdict.main.summary
    assert case.get("engine", "") in (verdict.main.engine, ""), verdict.main.summary
    for word in case.get("says", ()):
        assert word in verdict.main.summary
    assert not [k.id for f in verdict.findings for k in f.known_issues if k.id in case.get("not_known", ())]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_a_real_engine_is_never_called_health_nor_surely_another(name: str) -> None:
    rng = random.Random(name)
    for _ in range(4):
        evidence = texts(name)
        for step in rng.sample((*mutate.LOSSY, *mutate.LOSSLESS), 2):
            evidence = step(evidence, rng)
        main = diagnose_texts(evidence).main
        allowed = {*CASES[name]["classes"], *CASES[name].get("parts", ())}
        assert main.certainty != "shown" or main.cls in allowed, main.summary
        assert main.cls not in SOUND or CASES[name].get("sound"), main.summary


def test_every_folder_has_its_case_and_is_small() -> None:
    folders = {f.name for f in REAL.iterdir() if f.is_dir()}
    assert folders == set(CASES)
    for folder in folders:
        assert sum(len(text) for _, text in texts(folder)) < 60_000, folder
