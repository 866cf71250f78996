"""All rules over one deployment."""

from pathlib import Path

from closeranks.diagnose.audit.model import SEVERITIES, Deployment, Finding, Report, Unjudged
from closeranks.diagnose.audit.rule import RULES, Hit, Rule
from closeranks.diagnose.audit.rules import from_catalog
from closeranks.evidence.redact import redact


def all_rules(catalog: Path | None = None) -> list[Rule]:
    """The rules in Python and those in the catalog, and in a folder of one's own. Raises `CatalogError`."""
    return [*RULES.values(), *from_catalog(catalog)]


def audit(deployment: Deployment, catalog: Path | None = None) -> Report:
    """Every rule's findings, errors first, and what could not be judged. Pure but for reading the catalog."""
    findings: list[Finding] = []
    unjudged: list[Unjudged] = []
    for rule in all_rules(catalog):
        for result in rule.check(deployment):
            if isinstance(result, Hit):
                severity = result.severity or rule.severity
                findings.append(
                    Finding(
                        *(rule.id, severity, rule.area, rule.title, redact(result.where), redact(result.detail)),
                        *(rule.why, rule.fix, rule.refs, _places(deployment, result)),
                    )
                )
            else:
                unjudged.append(Unjudged(rule.id, redact(result.where), redact(result.needs)))
    unjudged += [Unjudged("source", redact(one.label), redact(one.needs)) for one in deployment.unread]
    for engine in deployment.engines:
        if not engine.judged:
            what = f"{engine.kind}: no rule speaks of it" if engine.kind else "which engine this is"
            unjudged.append(Unjudged("engine", redact(engine.label), what))
    findings.sort(key=lambda f: (SEVERITIES.index(f.severity), f.area, f.id, f.where))
    return Report(tuple(findings), tuple(sorted(unjudged, key=lambda u: (u.id, u.where))), deployment)


def _places(deployment: Deployment, hit: Hit) -> tuple[tuple[str, int], ...]:
    """Files and lines: what the hit names itself, else where its engines were read, else the model's folder."""
    if hit.files:
        return tuple((file, 0) for file in hit.files)
    named = {hit.where, *hit.where.split(" / ")}
    found = [(e.file, e.line) for e in deployment.engines if e.label in named and e.file]
    return tuple(found + [(m.path, 0) for m in deployment.models if m.path in named])
