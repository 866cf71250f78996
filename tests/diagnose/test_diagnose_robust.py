"""Evidence that was cut, wrapped, merged, shuffled or renamed: never an exception, never another certain verdict."""

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.diagnose.collect import NOT_READ
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.report import json_report, markdown, page
from closeranks.diagnose.verdict import Verdict
from tests.diagnose import mutate
from tests.diagnose.corpus import own, public, threads

CASES = [*public(), *own(), *threads()]


@cache
def untouched(name: str) -> Verdict:
    return diagnose_texts(next(evidence for n, evidence, *_ in CASES if n == name))


@pytest.mark.parametrize("change", mutate.LOSSLESS, ids=lambda f: f.__name__)
def test_what_loses_nothing_changes_nothing(change) -> None:
    rng = random.Random(5)
    for name, evidence, *_ in rng.sample(CASES, 40):
        before, after = untouched(name).main, diagnose_texts(change(evidence, rng)).main
        if after.cls != before.cls:
            # Ranks that only a file's name told apart may be lost with it; then the verdict must not be certain.
            assert change in (mutate.merge, mutate.rename), f"{name}: {before.cls} → {after.cls}"
            assert after.certainty != "shown", f"{name}: {before.cls} → {after.cls}"


@pytest.mark.parametrize("wrapper", mutate.WRAPPERS)
def test_a_document_of_one_line_is_read_in_every_wrapper(wrapper) -> None:
    evidence = next(e for n, e, *_ in CASES if n == "fr-all-alike")
    wrapped = [(n, "\n".join(map(wrapper, text.split("\n")))) for n, text in evidence]
    assert diagnose_texts(wrapped).main.cls == untouched("fr-all-alike").main.cls


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 10**9),
    steps=st.lists(st.sampled_from((*mutate.LOSSY, *mutate.LOSSLESS)), min_size=1, max_size=4),
)
def test_loss_never_makes_another_verdict_certain(case, seed: int, steps) -> None:
    rng = random.Random(seed)
    evidence = case[1]
    allowed = {f.cls for f in untouched(case[0]).findings}
    for step in steps:
        evidence = step(evidence, rng)
    verdict = diagnose_texts(evidence)
    assert verdict.main.certainty != "shown" or verdict.main.cls in allowed, (case[0], verdict.main)
    assert not [note for note in verdict.notes if NOT_READ in note]
    json_report.render(verdict)
    markdown.render(verdict)
    markdown.issue(verdict)
    page.render(verdict)


@pytest.mark.parametrize("seed", range(5))
def test_frames_lost_from_a_dump_are_no_shown_desync(seed: int) -> None:
    """Ranks in one operation, whose callers differ only since lines of their stacks are missing."""
    case = next(case for case in CASES if case[0] == "sgl-34582-mlpsync-symmetric")
    assert diagnose_texts(mutate.without_lines(case[1], random.Random(seed))).main.certainty != "shown"


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9))
def test_lines_of_all_cases_in_one_pot_never_raise(seed: int) -> None:
    rng = random.Random(seed)
    pot = [line for case in rng.sample(CASES, 6) for _, text in case[1] for line in text.split("\n")]
    rng.shuffle(pot)
    assert not [n for n in diagnose_texts([("pot.txt", "\n".join(pot[:400]))]).notes if NOT_READ in n]


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 10**9),
    steps=st.lists(st.sampled_from((*mutate.LOSSY, *mutate.LOSSLESS)), min_size=1, max_size=4),
)
def test_loss_never_makes_another_verdict_certain_many_times(case, seed: int, steps) -> None:
    rng = random.Random(seed)
    evidence = case[1]
    for step in steps:
        evidence = step(evidence, rng)
    verdict = diagnose_texts(evidence)
    allowed = {f.cls for f in untouched(case[0]).findings}
    assert verdict.main.certainty != "shown" or verdict.main.cls in allowed, (case[0], verdict.main)
