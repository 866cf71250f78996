"""`closeranks audit`: its outputs, exit codes and what they never hold."""

import json
import re
from pathlib import Path

import pytest

import closeranks
from closeranks.cli.main import main
from closeranks.diagnose.audit.model import Deployment, Engine

SECRET = "sk-planted-7f3a91"
BAD = ["sglang==0.5.14", "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl", "--tp", "4"]


def test_findings_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--", *BAD, "--api-key", SECRET]) == 1
    out = capsys.readouterr().out
    assert "ERROR sglang-nixl-abort-kills-bootstrap" in out
    assert "1 error," in out
    assert SECRET not in out


def test_notes_alone_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--", "sglang==0.5.23", "--model-path", "m"]) == 0
    assert "0 errors, 0 warnings, 1 note" in capsys.readouterr().out


def test_a_command_line_may_begin_with_a_program_that_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("python3.11", "vllm"):
        (tmp_path / name).touch()
    words = [str(tmp_path / "python3.11"), str(tmp_path / "vllm"), "serve", "m", "--tensor-parallel-size", "2"]
    assert main(["audit", "--json", "--", *words]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["tp_size"] == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", "--", *BAD, "--api-key", SECRET]) == 1
    out = capsys.readouterr().out
    data = json.loads(out)
    assert data["schema"] == 1
    assert data["findings"][0]["id"] == "sglang-nixl-abort-kills-bootstrap"
    assert set(data["findings"][0]) == {"id", "severity", "area", "title", "where", "detail", "why", "fix", "refs"}
    assert data["engines"] == [
        {"label": "command line", "kind": "sglang", "version": "0.5.14", "role": "prefill", "tp_size": 4}
    ]
    assert data["patched_areas"] == {}
    assert SECRET not in out


def test_sarif(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--sarif", "--", *BAD, "--api-key", SECRET]) == 1
    out = capsys.readouterr().out
    [run] = json.loads(out)["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == rules
    assert {result["level"] for result in run["results"]} <= {"error", "warning", "note"}
    assert SECRET not in out


def test_a_pair_of_files_and_a_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for role, size in (("prefill", 16), ("decode", 64)):
        line = f"python -m sglang.launch_server --disaggregation-mode {role} --page-size {size} --port {size}"
        (tmp_path / f"{role}.txt").write_text(line)
    assert main(["audit", str(tmp_path), "--engine-version", "0.5.23", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in data["findings"] if f["severity"] == "error"] == ["pair-other-kv-layout"]
    assert {engine["version"] for engine in data["engines"]} == {"0.5.23"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "nothing to audit"),
        (["/nonesuch"], 2, "no such file"),
        (["http://127.0.0.1:1"], 2, "no engine answers"),
    ],
)
def test_wrong_usage(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == code
    assert message in capsys.readouterr().err


def test_what_is_not_recognised_is_not_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "poem.txt").write_text("nothing here starts an engine\n")
    assert main(["audit", str(tmp_path)]) == 3
    assert "no engine, model or installation was recognised" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["closeranks", ""])
def test_an_engine_that_no_rule_speaks_of_is_not_sound(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Deployment(engines=(Engine("http://host:1", kind, "0.1.0"),))
    monkeypatch.setattr("closeranks.diagnose.audit.sources.collect", lambda *_: answers)
    assert main(["audit", "http://host:1"]) == 3
    said = capsys.readouterr()
    assert (kind or "unknown engine") in said.err
    assert "Not judged" in said.out


def test_texts_name_only_commands_that_there_are() -> None:
    """`closeranks X` in code (a span, or an indented line) is a command; so it is in the catalog's fixes."""
    root = Path(closeranks.__file__).parent
    commands = {path.stem for path in (root / "cli").glob("[a-z]*.py")} - {"main"}
    for page in [*root.glob("diagnose/**/*.py"), *root.parent.parent.glob("docs/*.md")]:
        named = set(re.findall(r"(?m)(?:`|^ {4})closeranks ([a-z]+)\b", page.read_text(encoding="utf-8")))
        assert named <= commands, f"{page.name}: {sorted(named - commands)}"
    for page in root.rglob("*.yaml"):
        named = set(re.findall(r"\bcloseranks ([a-z]+)\b", page.read_text(encoding="utf-8")))
        assert named <= commands, f"{page.name}: {sorted(named - commands)}"


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--rules", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(listed) >= 60
    assert {"id", "severity", "area", "title", "refs"} == set(listed[0])


def test_a_faulty_catalog_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("id: x\n")
    assert main(["audit", "--catalog", str(tmp_path), "--rules"]) == 2
    assert "x.yaml" in capsys.readouterr().err


def test_sarif_names_files_and_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "run.sh").write_text("#!/bin/sh\npython -m sglang.launch_server --tp 2 --api-key k\n")
    assert main(["audit", "--sarif", "a b"]) == 1
    [run] = json.loads(capsys.readouterr().out)["runs"]
    [place] = {json.dumps(r["locations"][0]["physicalLocation"]) for r in run["results"]}
    assert json.loads(place) == {"artifactLocation": {"uri": "a%20b/run.sh"}, "region": {"startLine": 2}}
    monkeypatch.chdir("/")
    main(["audit", "--sarif", str(tmp_path / "a b" / "run.sh")])
    uri = json.loads(capsys.readouterr().out)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert uri["artifactLocation"]["uri"].endswith("/a%20b/run.sh")


SECRET_FLAGS = [
    "--model-path https://h/m?X-Amz-Signature={}&e=1",
    "--model-path redis://:{}@h/m",
    "--api-key A,{}",
    "--api-key A {}",
    "--tokenizer-path https://{}@h/t",
    "--webhook https://hooks.slack.com/services/T0/B0/{}",
    "--headers 'Cookie: a=1; b={}'",
]


@pytest.mark.parametrize("form", [[], ["--json"], ["--sarif"]])
def test_no_secret_of_a_flag_is_said(form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in SECRET_FLAGS:
        for role, value in (("prefill", SECRET), ("decode", SECRET + "x")):
            line = (
                f"A=redis://:{SECRET}@h HF_AUTH={SECRET} python -m sglang.launch_server --disaggregation-mode {role} "
            )
            (tmp_path / f"{role}.sh").write_text(line + given.format(value) + "\n")
        main(["audit", *form, str(tmp_path)])
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err, given


def test_what_could_not_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.yaml").write_text("a: &x [*x]")
    assert main(["audit", str(tmp_path)]) == 3
    assert "source (loop.yaml): needs YAML without an alias that holds itself" in capsys.readouterr().out
