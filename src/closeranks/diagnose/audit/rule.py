"""What a rule is, and the list of all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from closeranks.diagnose.audit.model import Deployment, Severity


@dataclass(frozen=True)
class Hit:
    """A rule's yes: where, and the values seen. `severity` where a case is milder than the rule; `files` that show it,
    where `where` does not name an engine."""

    where: str
    detail: str
    severity: Severity | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Open:
    """A rule's "cannot tell": where, and what would decide it."""

    where: str
    needs: str


Check = Callable[[Deployment], Iterable[Hit | Open]]


@dataclass(frozen=True)
class Rule:
    """A pure function of a deployment with what its findings have in common."""

    id: str
    severity: Severity
    area: str
    title: str
    why: str
    fix: str
    check: Check
    refs: tuple[str, ...] = ()


RULES: dict[str, Rule] = {}
"""The rules written in Python, by id; `catalog/unsafe` adds those that are data."""


def rule(
    id: str, severity: Severity, area: str, title: str, *, why: str, fix: str, refs: tuple[str, ...] = ()
) -> Callable[[Check], Check]:
    """Register the decorated check. Raises `ValueError` for an id that is taken."""

    def register(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"two rules have the id {id!r}")
        RULES[id] = Rule(id, severity, area, title, why, fix, check, refs)
        return check

    return register
