"""The catalog: every entry loads, names the case that tests it, and is found there; versions and flags exclude."""

from pathlib import Path

import pytest

from closeranks.catalog.known import CatalogError, in_range, load, merged, shipped
from closeranks.diagnose.judge import diagnose_texts
from tests.diagnose.corpus import evidence_of


@pytest.mark.parametrize("entry", shipped(), ids=lambda e: e.id)
def test_entry_is_found_in_its_case(entry) -> None:
    verdict = diagnose_texts(evidence_of(entry.case))
    found = {k.id: k for k in verdict.main.known_issues}
    assert entry.id in found, verdict.main
    assert found[entry.id].reason
    assert entry.workaround
    assert entry.symptom


def test_ids_are_unique_and_one_per_file() -> None:
    ids = [e.id for e in shipped()]
    assert len(set(ids)) == len(ids)


def test_a_version_outside_the_range_excludes() -> None:
    evidence = evidence_of("sgl-27489-hicache-writing-check")
    assert "sgl-project/sglang#27489" in [k.id for k in diagnose_texts(evidence).main.known_issues]
    newer = [*evidence, ("v.txt", "sglang==0.5.20\n")]
    assert "sgl-project/sglang#27489" not in [k.id for k in diagnose_texts(newer).main.known_issues]
    older = diagnose_texts([*evidence, ("v.txt", "sglang==0.5.13.post1\n")]).main.known_issues
    assert next(k for k in older if k.id == "sgl-project/sglang#27489").certainty == "shown"


def test_another_architecture_excludes() -> None:
    evidence = [(n, t.replace("aarch64", "x86_64")) for n, t in evidence_of("sgl-33289a-gb10-nccl-proxy")]
    assert not diagnose_texts(evidence).main.known_issues


def test_titles_match_nothing() -> None:
    """A log that quotes an issue's title and number is no evidence for it."""
    text = (
        "[2026-06-05 04:06:58 TP0] INFO see https://github.com/sgl-project/sglang/issues/26454 overlap hang copy_done\n"
    )
    assert not diagnose_texts([("notes.txt", text)]).main.known_issues


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("0.5.13", "<0.5.14", True),
        ("0.5.14", "<0.5.14", False),
        ("0.5.13.post1", ">0.5.13,<0.5.14", True),
        ("0.5.14rc1", "<0.5.14", True),
        ("2.29.3", "<2.29.3", False),
        ("0.5.9", "<0.5.10", True),
        ("0.5.12+cu13", "==0.5.12", True),
    ],
)
def test_ranges(version: str, wanted: str, inside: bool) -> None:
    assert in_range(version, wanted) is inside


ENTRY = """id: me/mine#1
engine: mine
classes: [DEAD_PEER]
symptom: x
match: {events: [worker_died]}
workaround: y
state: open
checked: 2026-11-29
case: none
"""


def test_own_folder_adds_and_replaces(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(ENTRY)
    assert "me/mine#1" in [e.id for e in merged([tmp_path])]
    found = diagnose_texts(evidence_of("own-worker-died"), [tmp_path]).main.known_issues
    assert "me/mine#1" in [k.id for k in found]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("me/mine#1", "mine"), "owner/repository"),
        (("{events: [worker_died]}", "{}"), "no condition"),
        (("events", "titles"), "titles"),
        (("state: open", "versions: {a: new}\nstate: open"), "range"),
        (("id:", "id: ["), "a.yaml"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    (tmp_path / "a.yaml").write_text(ENTRY.replace(*change))
    with pytest.raises(CatalogError, match=says):
        load(tmp_path)
