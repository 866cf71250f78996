"""Evidence that was cut, wrapped, merged, shuffled or renamed: never an exception, never another certain verdict."""

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.diagnose import wrappers
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


@pytest.mark.parametrize("wrapper", [*mutate.AGREED, "datadog"])
def test_a_prefix_that_a_whole_file_shows_is_taken_off(wrapper: str) -> None:
    rng = random.Random(7)
    logs = [case for case in CASES if all(mutate.has_records(text) for _, text in case[1])]
    if "ray" in wrapper:  # vLLM's own prefix has Ray's shape and is left to it
        logs = [case for case in logs if all("[20" in text and "sglang" in text for _, text in case[1])]
    for name, evidence, *_ in rng.sample(logs, min(25, len(logs))):
        wrapped = [(n, mutate.wrap_whole(text, wrapper)) for n, text in evidence]
        assert all(wrappers.strip(text) != text for _, text in wrapped), name
        assert diagnose_texts(wrapped).main.cls == untouched(name).main.cls, name


def test_nothing_of_what_has_no_wrapper_is_taken_off() -> None:
    for name, evidence, *_ in CASES:
        assert all(wrappers.strip(text) == text for _, text in evidence), name


@pytest.mark.parametrize(
    "text",
    [
        "1: lo: <LOOPBACK,UP> mtu 65536\n2: eth0: <UP> mtu 1500\n3: ib0: <UP> mtu 2044\n4: docker0: <UP>\n",
        "[rank0]: Traceback (most recent call last):\n[rank0]:   File 'x', line 1\n[rank0]: RuntimeError: x\n",
        "(EngineCore_DP0 pid=9) INFO 08-17 21:34:00 [core.py:1] a\n" * 3,
        "name,line,count\na,b,1\nc,d,2\n",
        "[2026-08-17 21:34:00 TP0] a\n[2026-08-17 21:34:00 TP0] b\nProcess 1: x\n",
        "",
    ],
)
def test_what_only_looks_like_a_wrapper_stays(text: str) -> None:
    assert wrappers.strip(text) == text


def test_a_wrapper_is_taken_off_a_stream_too() -> None:
    text = "".join(f"0: [2026-08-17 21:34:0{n} TP0] a\n" for n in range(9))
    strip = wrappers.stripper(text)
    assert strip is not None
    assert strip(text.encode()) == text.replace("0: [", "[").encode()
    assert wrappers.stripper(text.replace("0: [", "[")) is None


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
