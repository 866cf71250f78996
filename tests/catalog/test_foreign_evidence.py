"""A known issue is never named for an engine that the evidence is not of, nor outside its versions or architecture."""

import re
from functools import cache

import pytest

from closeranks.catalog.known import shipped
from closeranks.diagnose.collect import collect
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.match import ENGINES
from closeranks.diagnose.scene import Scene
from closeranks.evidence.bundle import from_texts
from tests.diagnose.corpus import own, public

CASES = {n: e for n, e, *_ in (*public(), *own())}
TITLES = r"sglang(?:[_-]?\w+)?::schedul\w*?_?(?=TP|\b)|VLLM::(?:Worker|EngineCore)\w*?_?(?=TP|\b)"
BY_ID = {e.id: e for e in shipped()}


@cache
def of_case(name: str) -> set[str]:
    return named(CASES[name])


def named(evidence: list[tuple[str, str]]) -> set[str]:
    return {k.id for f in diagnose_texts(evidence).findings for k in f.known_issues}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_only_issues_of_the_evidences_engine(name: str) -> None:
    scene = Scene(collect(from_texts(CASES[name])).facts, [])
    for issue in of_case(name):
        entry = BY_ID[issue]
        assert entry.engine not in ENGINES or not scene.families or entry.engine in scene.families


def foreign(evidence: list[tuple[str, str]], engine: str) -> list[tuple[str, str]]:
    """The same frames and lines as another engine would show them."""
    to = "vllm" if engine == "sglang" else "sglang"
    title = "VLLM::Worker_" if to == "vllm" else "sglang::scheduler_"
    out = []
    for name, text in evidence:
        text = re.sub(TITLES, title, text)
        text = re.sub(r"(?i)\bsglang/srt/|\bvllm/v1/", f"{to}/x/", text)
        out.append((name, re.sub(rf"(?i){engine}", to, text)))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if {BY_ID[i].engine for i in of_case(n)} & {"sglang", "vllm"}])
def test_frames_of_another_engine_name_no_issue_of_this_one(name: str) -> None:
    for engine in ("sglang", "vllm"):
        changed = foreign(CASES[name], engine)
        scene = Scene(collect(from_texts(changed)).facts, [])
        for issue in named(changed):
            entry = BY_ID[issue]
            assert entry.engine not in ENGINES or not scene.families or entry.engine in scene.families, issue


@pytest.mark.parametrize("name", [n for n in CASES if any(BY_ID[i].versions for i in of_case(n))])
def test_a_version_outside_all_ranges_names_no_issue_with_a_range(name: str) -> None:
    strip = [(n, re.sub(r"(?i)(sglang|vllm|nccl)(==| version[ :=]+v?| v)\d[\w.+]*", "", t)) for n, t in CASES[name]]
    for version in ("0.0.1rc1", "99.0.0"):
        lines = "".join(f"{c}=={version}\n" for c in ("sglang", "vllm", "nccl", "torch", "nixl", "dynamo"))
        for issue in named([*strip, ("v.txt", lines)]):
            for component, wanted in BY_ID[issue].versions.items():
                below, above = "<" in wanted, ">" in wanted
                assert (below and not above) if version.startswith("0.0") else (above and not below), (issue, component)


@pytest.mark.parametrize("name", [n for n in CASES if any(BY_ID[i].arch for i in of_case(n))])
def test_another_architecture_names_no_issue_that_needs_one(name: str) -> None:
    changed = [(n, t.replace("aarch64", "x86_64")) for n, t in CASES[name]]
    found = named([*changed, ("uname.txt", "Linux host 6.8.0 x86_64 GNU/Linux\n")])
    assert not [i for i in found if BY_ID[i].arch == "aarch64"]


def test_versions_that_contradict_each_other_are_a_point_to_check() -> None:
    evidence = [*CASES["sgl-27489-hicache-writing-check"], ("v.txt", "sglang==0.5.13\nsglang==0.5.20\n")]
    match = next(k for k in diagnose_texts(evidence).main.known_issues if k.id == "sgl-project/sglang#27489")
    assert match.certainty == "likely"
    assert "0.5.20" in match.reason


def test_a_development_build_is_a_point_to_check() -> None:
    evidence = [*CASES["sgl-27489-hicache-writing-check"], ("v.txt", "sglang==0.5.13.dev44+g1a2b3c4d\n")]
    match = next(k for k in diagnose_texts(evidence).main.known_issues if k.id == "sgl-project/sglang#27489")
    assert match.certainty == "likely"
