"""Verdicts on the public cases and on our own."""

import re

import pytest

from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.rules import rules
from closeranks.diagnose.verdict import CLASSES
from tests.diagnose.corpus import also_right, own, public, threads


def numbers(ids: list[str]) -> set[str]:
    return {n for i in ids for n in re.findall(r"\d+", i)}


@pytest.mark.parametrize(
    ("name", "evidence", "cls", "may_be_certain", "forbidden"), public(), ids=[c[0] for c in public()]
)
def test_public_case(name: str, evidence: list, cls: str, may_be_certain: bool, forbidden: tuple[str, ...]) -> None:
    verdict = diagnose_texts(evidence)
    assert verdict.main.cls == cls, verdict.main
    assert may_be_certain or verdict.main.certainty != "shown"
    assert not numbers([k.id for f in verdict.findings for k in f.known_issues]) & set(forbidden)


@pytest.mark.parametrize(("name", "evidence", "cls", "may_be_certain", "forbidden"), own(), ids=[c[0] for c in own()])
def test_own_case(name: str, evidence: list, cls: str, may_be_certain: bool, forbidden: tuple[str, ...]) -> None:
    verdict = diagnose_texts(evidence)
    assert verdict.main.cls == cls, verdict.main
    assert may_be_certain or verdict.main.certainty != "shown"


@pytest.mark.parametrize(
    ("name", "evidence", "cls", "may_be_certain", "forbidden"), threads(), ids=[c[0] for c in threads()]
)
def test_case_after_a_thread(name: str, evidence: list, cls: str, may_be_certain: bool, forbidden: tuple) -> None:
    verdict = diagnose_texts(evidence)
    main, shown = verdict.main, verdict.main.certainty == "shown"
    right, unless_shown = also_right()[name]
    assert main.cls in (cls, *right) or (main.cls in unless_shown and not shown), main
    assert may_be_certain or not shown, main
    assert not numbers([k.id for f in verdict.findings for k in f.known_issues]) & set(forbidden)


def test_every_rule_fires_somewhere_and_says_what_it_claims() -> None:
    fired: dict[str, set[str]] = {}
    for _, evidence, *_rest in (*public(), *own(), *threads()):
        for f in diagnose_texts(evidence).findings:
            fired.setdefault(f.rule, set()).add(f.cls)
            assert f.cls in CLASSES
            assert f.certainty in ("shown", "likely", "undetermined")
            assert (f.cls == "UNDETERMINED") == (f.certainty == "undetermined")
            assert f.evidence or f.cls == "UNDETERMINED", f
    by_name = {r.name: r for r in rules()}
    for name, classes in fired.items():
        if name != "none":
            assert classes <= set(by_name[name].classes), f"{name} found {classes}"
    assert not set(by_name) - set(fired), f"no case makes these rules fire: {set(by_name) - set(fired)}"


def test_a_bundle_with_two_engines_gives_a_finding_for_each() -> None:
    evidence = next(
        e for n, e, *_ in public() if "decode" in " ".join(x for x, _ in e) and "prefill" in " ".join(x for x, _ in e)
    )
    found = {(f.engine, f.cls) for f in diagnose_texts(evidence).findings}
    assert ("decode", "DESYNC_DIFFERENT_COLLECTIVE") in found
    assert ("prefill", "SYMMETRIC_WAIT") in found


def test_no_rule_names_a_case_or_an_issue() -> None:
    from pathlib import Path

    import closeranks.diagnose

    folder = Path(closeranks.diagnose.__file__).parent
    ids = {n for n, *_ in public()}
    for path in [*folder.glob("*.py"), *folder.glob("rules/*.py"), *folder.glob("readers/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not [i for i in ids if i in text], path
        assert not re.findall(r"#\d{4,6}\b", text), f"{path}: an issue number belongs in the catalog"
