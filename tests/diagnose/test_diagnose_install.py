"""Patched areas of an install in verdict, reports and matches; the environment in an upstream report."""

import hashlib
import json
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from closeranks.cli.main import main
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.report import json_report, markdown, page
from tests.diagnose.corpus import evidence_of

HICACHE = "sgl-27489-hicache-writing-check"
ISSUE = "sgl-project/sglang#27489"


def audit(areas: dict[str, list[str]], version: str = "0.5.13") -> tuple[str, str]:
    changed = [{"path": p, "change": "modified", "area": a, "diff": ""} for a, paths in areas.items() for p in paths]
    install = {"name": "sglang", "version": version, "site_packages": "/opt/x", "changed": changed}
    return "audit.json", json.dumps({"schema": 1, "findings": [], "installs": [install], "patched_areas": areas})


def match(evidence: list[tuple[str, str]]):
    return next(k for k in diagnose_texts(evidence).main.known_issues if k.id == ISSUE)


def test_a_patched_area_is_named_and_lowers_a_match_in_it() -> None:
    sound = match([*evidence_of(HICACHE), audit({})])
    assert sound.certainty == "shown"
    verdict = diagnose_texts([*evidence_of(HICACHE), audit({"HiCache": ["a.py", "b.py"]})])
    assert verdict.patched == {"HiCache": "2 files of sglang 0.5.13"}
    lowered = match([*evidence_of(HICACHE), audit({"HiCache": ["a.py", "b.py"]})])
    assert lowered.certainty == "likely"
    assert "HiCache: 2 files of sglang 0.5.13 differ" in lowered.reason
    for text in (json_report.render(verdict), markdown.render(verdict), markdown.issue(verdict), page.render(verdict)):
        assert "HiCache" in text
        assert "2 files of sglang 0.5.13" in text
    assert verdict.main.cls == diagnose_texts(evidence_of(HICACHE)).main.cls


def test_a_patch_elsewhere_lowers_nothing() -> None:
    assert match([*evidence_of(HICACHE), audit({"parser": ["p.py"]})]).certainty == "shown"


@pytest.mark.parametrize(
    "areas",
    [{"HiCache": "x"}, {"Ign<script>": ["x"]}, {"HiCache": []}, {}, {"other": [1, 2]}],
)
def test_an_odd_report_names_no_area_of_its_own(areas: dict) -> None:
    text = json.dumps({"patched_areas": areas, "installs": [{"changed": [7, {"area": "sk-secret"}]}, 3]})
    found = diagnose_texts([*evidence_of(HICACHE), ("a.json", text)]).patched
    assert set(found) <= {"other"}


def test_site_packages_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "site" / "sglang" / "srt" / "mem_cache" / "hiradix_cache.py"
    file.parent.mkdir(parents=True)
    file.write_text("changed = 1\n")
    info = tmp_path / "site" / "sglang-0.5.13.dist-info"
    info.mkdir()
    digest = urlsafe_b64encode(hashlib.sha256(b"as released\n").digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"sglang/srt/mem_cache/hiradix_cache.py,sha256={digest},12\n")
    case = tmp_path / "case"
    case.mkdir()
    for name, text in evidence_of(HICACHE):
        (case / name.replace("/", "_")).write_text(text)
    assert main(["diagnose", "--json", "--site", str(tmp_path / "site"), str(case)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["patched_areas"] == {"HiCache": "1 file of sglang 0.5.13"}
    assert main(["diagnose", "--site", str(tmp_path / "none"), str(case)]) == 2


FLAGS = (
    "python3 -m sglang.launch_server --model-path /secret/model --tp-size 4 --disaggregation-mode decode "
    "--api-key sk-9\n"
)


def test_a_report_for_upstream_tells_versions_flags_and_topology() -> None:
    text = markdown.issue(
        diagnose_texts([*evidence_of(HICACHE), ("f.txt", FLAGS), ("v.txt", "sglang==0.5.13\ntorch==2.9.1\n")])
    )
    assert text.index("### Describe the bug") < text.index("### Reproduction") < text.index("### Environment")
    for wanted in ("sglang 0.5.13", "torch 2.9.1", "--tp-size 4", "--disaggregation-mode decode", "Topology:"):
        assert wanted in text
    assert "sk-9" not in text
    assert "/secret/model" not in text
    assert "please add" not in text or "versions" not in text.split("please add")[1]


def test_the_form_is_the_engines_own() -> None:
    vllm = markdown.issue(diagnose_texts(evidence_of("vllm-19036-idle-yield")))
    assert vllm.index("### Your current environment") < vllm.index("### 🐛 Describe the bug")
    assert "### What happens" in markdown.issue(diagnose_texts([("x", "nothing\n")]))
