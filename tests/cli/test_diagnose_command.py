"""`closeranks diagnose`: exit codes, forms of output, the schema."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from closeranks.cli.main import main
from closeranks.diagnose.report import json_report
from closeranks.diagnose.verdict import CLASSES
from tests.diagnose.corpus import evidence_of, own, public


def write(folder: Path, name: str) -> str:
    for file, text in evidence_of(name):
        (folder / file).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("case", "code"),
    [("seed-004-pd-nixl-abort", 1), ("vllm-19036-idle-yield", 0), ("own-false-alarm", 0), ("sgl-29123-gloo-7200s", 3)],
)
def test_exit_codes(case: str, code: int, tmp_path: Path, capsys) -> None:
    assert main(["diagnose", write(tmp_path, case)]) == code
    assert "Verdict" in capsys.readouterr().out


def test_usage_errors(tmp_path: Path, capsys) -> None:
    assert main(["diagnose"]) == 2
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2
    assert main(["diagnose", "--catalog", str(tmp_path / "nowhere"), str(tmp_path)]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_standard_input(tmp_path: Path, capsys, monkeypatch) -> None:
    import io
    import sys

    text = dict(evidence_of("dynamo-13088-no-handler"))["worker.log"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["diagnose", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["class"] == "ROUTER"


def check(schema: dict, found: object, at: str = "$") -> None:
    """Enough of JSON Schema for our own file: type, enum, const, required, properties, items, additionalProperties."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if "type" in schema:
        assert isinstance(found, kinds[schema["type"]]), at
    assert found in schema.get("enum", [found]), at
    assert found == schema.get("const", found), at
    if isinstance(found, dict):
        assert set(schema.get("required", ())) <= set(found), at
        for k, v in found.items():
            inner = schema.get("properties", {}).get(k, schema.get("additionalProperties", {}))
            assert inner is not False, f"{at}.{k} is not in the schema"
            check(inner, v, f"{at}.{k}")
    if isinstance(found, list):
        assert len(found) >= schema.get("minItems", 0), at
        for i, v in enumerate(found):
            check(schema.get("items", {}), v, f"{at}[{i}]")


def test_json_follows_the_schema() -> None:
    from closeranks.diagnose.judge import diagnose_texts

    schema = json.loads(json_report.SCHEMA_FILE.read_text())
    assert tuple(schema["properties"]["findings"]["items"]["properties"]["class"]["enum"]) == CLASSES
    for _, evidence, *_ in [*public()[::4], *own()[::6]]:
        check(schema, json.loads(json_report.render(diagnose_texts(evidence))))


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "circle", "line", "br"):
            self.open.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_self_contained(tmp_path: Path, capsys) -> None:
    out = tmp_path / "page.html"
    folder = tmp_path / "in"
    folder.mkdir()
    main(["diagnose", "--html", "-o", str(out), write(folder, "seed-004-pd-nixl-abort")])
    page = Page()
    page.feed(out.read_text())
    assert not page.open
    assert not page.outside
    assert "script" not in page.tags
    assert {"svg", "table"} <= page.tags


def test_issue_names_no_address_and_no_host_path(tmp_path: Path, capsys) -> None:
    main(["diagnose", "--issue", write(tmp_path, "sgl-27944-gloo-read-timeout")])
    text = capsys.readouterr().out
    assert "### Describe the bug" in text
    assert not re.search(r"\b10\.0\.0\.1\b", text)
    assert "ip-1" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("option", ["--rules", "--readers"])
def test_lists(option: str, capsys) -> None:
    assert main(["diagnose", option]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) > 20
    assert main(["diagnose", option, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[option.strip("-")]) == len(lines)


def test_every_class_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
    assert [c for c in CLASSES if c not in text] == []


def test_every_rule_is_documented() -> None:
    from closeranks.diagnose.rules import rules

    text = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
    assert [r.name for r in rules() if f"`{r.name}`" not in text] == []


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "closeranks.cli.main", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=120, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("to", "message"),
    [("nowhere/x", "No such file"), (".", "Is a directory"), ("/dev/full", "No space left")],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_that_cannot_be_written_is_said_and_no_finding(
    to: str, message: str, form: list[str], tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *form, "-o", to, write(tmp_path, "seed-004-pd-nixl-abort")]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert to in said.err
    assert not said.out


@pytest.mark.parametrize("command", [["diagnose"], ["diagnose", "--html"], ["audit"], ["audit", "--json"]])
def test_a_full_or_closed_standard_output_is_said(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python -m sglang.launch_server --tp 2\n")
    with open("/dev/full", "w") as full:
        ran = run(*command, str(tmp_path), stdout=full)
    assert (ran.returncode, ran.stderr.count(b"\n")) == (2, 1), ran.stderr
    assert b"standard output cannot be written: No space left" in ran.stderr
    ran = run(*command, str(tmp_path), preexec_fn=lambda: os.close(1))
    assert (ran.returncode, ran.stderr.count(b"\n")) == (2, 1), ran.stderr
    assert b"standard output is closed" in ran.stderr


def test_a_closed_standard_input_is_said() -> None:
    ran = run("diagnose", "-", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(0))
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert b"standard input is closed" in ran.stderr


def test_a_pipe_of_a_shell_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text(dict(evidence_of("dynamo-13088-no-handler"))["worker.log"])
    shell = f"{sys.executable} -m closeranks.cli.main diagnose --json <(cat {tmp_path}/worker.log)"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, check=False, timeout=120)
    assert json.loads(ran.stdout)["findings"][0]["class"] == "ROUTER", ran.stderr


def test_names_of_any_bytes_are_printed(tmp_path: Path, capsys) -> None:
    (tmp_path / os.fsdecode(b"bad\xff.log")).write_text(dict(evidence_of("dynamo-13088-no-handler"))["worker.log"])
    for form in ([], ["--json"], ["--markdown"], ["--issue"], ["--html"]):
        assert main(["diagnose", *form, str(tmp_path)]) == 1
        assert r"bad\xff.log" in capsys.readouterr().out.replace("\\\\", "\\")
    assert main(["diagnose", ""]) == 2


def test_an_output_that_knows_no_unicode_gets_escapes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = run("diagnose", write(tmp_path, "seed-004-pd-nixl-abort"), stdout=subprocess.PIPE, env=environment)
    assert ran.returncode == 1, ran.stderr
    assert b"Verdict" in ran.stdout
