"""The verdict as JSON, schema 1 (`schema/diagnose-1.json`)."""

from pathlib import Path
from typing import Any

import msgspec

from closeranks.diagnose.verdict import Finding, Verdict
from closeranks.evidence.redact import redact

SCHEMA = 1
SCHEMA_FILE = Path(__file__).parent.parent / "schema" / "diagnose-1.json"


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """The document of schema 1, redacted."""
    document = {
        "schema": SCHEMA,
        "findings": [_finding(f) for f in verdict.findings],
        "patched_areas": verdict.patched,
        "coverage": verdict.coverage,
        "files": verdict.files,
        "notes": verdict.notes,
    }
    clean: dict[str, Any] = _clean(document)
    return clean


def render(verdict: Verdict) -> str:
    """The document as text."""
    return msgspec.json.format(msgspec.json.encode(as_dict(verdict)), indent=2).decode()


def _finding(f: Finding) -> dict[str, Any]:
    return {
        "class": f.cls,
        "certainty": f.certainty,
        "engine": f.engine,
        "ranks": f.ranks,
        "known_issues": [k.id for k in f.known_issues],
        "summary": f.summary,
        "rule": f.rule,
        "missing": f.missing,
        "ahead": f.ahead,
        "trigger": f.trigger,
        "mechanism": f.mechanism,
        "shown": f.shown,
        "likely": f.likely,
        "decoys": f.decoys,
        "next_checks": f.next_checks,
        "workaround": f.workaround,
        "evidence": [{"file": e.file, "line": e.line, "says": e.says} for e in f.evidence],
        "matches": [
            {"id": k.id, "certainty": k.certainty, "reason": k.reason, "workaround": k.workaround, "price": k.price}
            | {"fix": k.fix, "checked": k.checked}
            for k in f.known_issues
        ],
    }


def _clean(found: Any) -> Any:
    if isinstance(found, str):
        return redact(found)
    if isinstance(found, dict):
        return {redact(str(k)): _clean(v) for k, v in found.items()}
    if isinstance(found, list):
        return [_clean(v) for v in found]
    return found
