"""Every entry of unsafe configurations against its own lines, and files that say less than they must."""

from pathlib import Path

import pytest

from closeranks.catalog.unsafe import CatalogError, Unsafe, load
from closeranks.diagnose.audit import Deployment
from closeranks.diagnose.audit.model import ModelFolder
from closeranks.diagnose.audit.rule import Hit, Open
from closeranks.diagnose.audit.rules.catalog_rules import judge
from closeranks.diagnose.audit.sources import flags

ENTRIES = {entry.id: entry for entry in load()}


def found(entry: Unsafe, line: str) -> list[Hit | Open]:
    engine = flags.parse(flags.split_line(line), "line")
    models = (ModelFolder("m", engine.env["model"]),) if "model" in engine.env else ()
    assert engine.kind == entry.engine, f"{line!r} is no line of {entry.engine}"
    return list(judge(entry, engine, Deployment((engine,), models)))


@pytest.mark.parametrize("name", ENTRIES)
def test_finds_and_passes_its_own_lines(name: str) -> None:
    entry = ENTRIES[name]
    for line in entry.finds:
        assert [type(r) for r in found(entry, line)] == [Hit], line
    for line in entry.passes:
        assert not [r for r in found(entry, line) if isinstance(r, Hit)], line


@pytest.mark.parametrize("name", ENTRIES)
def test_file_is_named_after_its_entry(name: str) -> None:
    import closeranks.catalog.unsafe as package

    assert (Path(package.__file__).parent / f"{name}.yaml").is_file()


def test_there_are_enough() -> None:
    assert len(ENTRIES) >= 25


def test_an_unknown_version_leaves_the_question_open() -> None:
    entry = ENTRIES["sglang-hicache-writing-check"]
    engine = flags.parse(["python", "-m", "sglang.launch_server", "--tp", "2", "--enable-hicache"], "line")
    [result] = judge(entry, engine, Deployment((engine,)))
    assert isinstance(result, Open)
    assert "version" in result.needs


GOOD = """
id: own
severity: note
area: x
engine: sglang
title: t
why: w
fix: f
checked: 2026-11-29
finds: [sglang==1.0 --a b]
passes: [sglang==1.0 --a c]
when: {flags: {a: [b]}}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("severity: note", "severity: loud"), "severity 'loud'"),
        (("fix: f\n", ""), "'fix' is missing"),
        (("area: x", "aera: x"), "unknown key 'aera'"),
        (("flags:", "flag:"), "unknown condition 'flag'"),
        (("id: own", "id: [own"), "not YAML"),
        ((GOOD, "- a\n- b\n"), "not a mapping"),
    ],
)
def test_a_faulty_entry_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "own.yaml").write_text(GOOD.replace(*change))
    with pytest.raises(CatalogError, match=message):
        load(tmp_path)


def test_own_entries_join_and_may_not_take_an_id(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(GOOD)
    assert "own" in {entry.id for entry in load(tmp_path)}
    (tmp_path / "own.yaml").write_text(GOOD.replace("id: own", "id: sglang-metrics-off"))
    with pytest.raises(CatalogError, match="two entries"):
        load(tmp_path)
