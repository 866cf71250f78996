"""A report as text, as JSON (schema 1) and as SARIF 2.1.0."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import closeranks
from closeranks.diagnose.audit.model import SEVERITIES, Finding, Report
from closeranks.diagnose.audit.rule import Rule
from closeranks.evidence.redact import redact

SCHEMA = 1
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON data; `docs/audit.md` describes it."""
    deployment = report.deployment
    return {
        "schema": SCHEMA,
        "findings": [
            {
                **{
                    name: getattr(f, name)
                    for name in ("id", "severity", "area", "title", "where", "detail", "why", "fix")
                },
                "refs": list(f.refs),
            }
            for f in report.findings
        ],
        "unjudged": [{"id": u.id, "where": u.where, "needs": u.needs} for u in report.unjudged],
        "engines": [
            {"label": e.label, "kind": e.kind, "version": e.version, "role": e.role, "tp_size": e.tp}
            for e in deployment.engines
        ],
        "models": [{"path": m.path, "model_type": m.model_type} for m in deployment.models],
        "installs": [
            {
                **{
                    name: getattr(i, name)
                    for name in ("name", "version", "site_packages", "files", "files_of", "problem")
                },
                **{name: getattr(i, name) for name in ("git_commit", "commits_ahead", "tag")},
                "changed": [{"path": c.path, "change": c.change, "area": c.area, "diff": c.diff} for c in i.changed],
            }
            for i in deployment.installs
        ],
        "patched_areas": report.patched_areas,
    }


def to_sarif(report: Report, rules: Sequence[Rule]) -> dict[str, Any]:
    """The report for code-scanning tools; severities map to SARIF's levels of the same names."""
    used = {finding.id for finding in report.findings}
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "closeranks audit",
                        "version": closeranks.__version__,
                        "rules": [
                            {
                                "id": rule.id,
                                "shortDescription": {"text": rule.title},
                                "fullDescription": {"text": rule.why},
                                "help": {"text": rule.fix},
                                "defaultConfiguration": {"level": rule.severity},
                                "properties": {"area": rule.area, "refs": list(rule.refs)},
                            }
                            for rule in rules
                            if rule.id in used
                        ],
                    }
                },
                "results": [_sarif_result(finding) for finding in report.findings],
            }
        ],
    }


def _sarif_result(finding: Finding) -> dict[str, Any]:
    return {
        "ruleId": finding.id,
        "level": finding.severity,
        "message": {"text": f"{finding.title}: {finding.detail}. {finding.fix}"},
        "locations": [_location(finding.where, place) for place in finding.places or [None]],
    }


def _location(where: str, place: tuple[str, int] | None) -> dict[str, Any]:
    """The engine or package, and its file: relative to where the audit ran if it lies there, as code scanning asks."""
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": where}]}
    if place is not None:
        path = Path(os.path.abspath(place[0]))
        here = Path.cwd()
        uri = quote(os.fsencode(path.relative_to(here))) if path.is_relative_to(here) else path.as_uri()
        region = {"region": {"startLine": max(1, place[1])}} if path.is_file() else {}
        location["physicalLocation"] = {"artifactLocation": {"uri": redact(uri)}, **region}
    return location


def to_text(report: Report, *, diffs: bool = False, width: int = 100) -> str:
    """For a terminal: errors first, each with what was seen, why it matters and what to do."""
    lines: list[str] = []
    for engine in report.deployment.engines:
        role = f", {engine.role}" if engine.role else ""
        lines.append(f"{engine.label}: {engine.kind or 'unknown engine'} {engine.version or '(version unknown)'}{role}")
    for install in report.deployment.installs:
        if install.files_of:
            lines.append(f"{install.name} {install.version}: its files are those of {install.files_of}")
            continue
        lines.append(f"{install.name} {install.version}: {install.files} files, {len(install.changed)} not upstream's")
    for finding in report.findings:
        lines += ["", f"{finding.severity.upper()} {finding.id} [{finding.area}] {finding.where}"]
        lines += _indented(f"{finding.title}: {finding.detail}", width)
        lines += _indented(f"why: {finding.why}", width)
        lines += _indented(f"fix: {finding.fix}", width)
        if finding.refs:
            lines += _indented(f"see: {', '.join(finding.refs)}", width)
    if report.unjudged:
        lines += ["", "Not judged:"]
        lines += [f"  {u.id} ({u.where}): needs {u.needs}" for u in report.unjudged]
    if diffs:
        for install in report.deployment.installs:
            lines += [line for changed in install.changed if changed.diff for line in ("", changed.diff)]
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in SEVERITIES}
    summary = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
    return "\n".join([*lines, "", summary])


def _indented(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
