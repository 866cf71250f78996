"""Known issues of engines and libraries, one YAML file each in `issues/`, and the loader that checks them.

An entry says by which evidence the issue is recognised: frames, the pair of places where ranks stand, log events,
versions, flags, architecture. It has no title, and nothing is ever matched by one: titles name what a reporter thought.
"""

import re
from collections.abc import Iterable
from datetime import date
from functools import cache
from pathlib import Path

import msgspec
import yaml

FOLDER = Path(__file__).parent / "issues"


class CatalogError(ValueError):
    """A data file is wrong. The message names the file and what to change."""


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions; all that are given must hold. Lists of `any_…` need one member, other lists need all."""

    frames: tuple[str, ...] = ()  # function names on main threads (of any rank of the finding's engine)
    any_frames: tuple[str, ...] = ()
    not_frames: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()  # places that ranks stand at, e.g. [hicache, loop_head]: the operation pair
    events: tuple[str, ...] = ()  # kinds of log events
    any_events: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()  # operations of collectives in watchdog or recorder lines
    kernels: tuple[str, ...] = ()  # expressions, searched in names of resident kernels
    flags: tuple[str, ...] = ()  # launch flags that must be set
    any_flags: tuple[str, ...] = ()
    env: tuple[str, ...] = ()  # environment variables; one of them must be set
    dp: bool | None = None  # data-parallel labels present, or absent
    pp: bool | None = None
    rule: str = ""  # the rule whose finding this is
    not_events: tuple[str, ...] = ()
    values: dict[
        str, str
    ] = {}  # kind of event and one of its values (`oom_kill.task`) → expression that one must match
    family: str = ""  # engine family of the ranks or of the log, if it matters


class KnownIssue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One known issue. `versions` maps a component to a range such as `<0.5.14` or `>=0.5.12,<0.5.19`."""

    id: str  # owner/repository#number
    also: tuple[str, ...] = ()  # the same defect elsewhere
    engine: str
    classes: tuple[str, ...]
    symptom: str
    match: Match
    versions: dict[str, str] = {}
    arch: str = ""
    workaround: str = ""
    price: str = ""
    fix: str = ""
    state: str  # open, merged, closed
    established: bool = False  # a maintainer, a merged fix or a measurement shows the cause
    checked: date
    case: str  # the case that tests this entry


_ID = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def load(folder: Path) -> list[KnownIssue]:
    """All entries of a folder (`*.yaml`). Raises `CatalogError` with the file's name."""
    out: list[KnownIssue] = []
    for path in sorted(folder.glob("*.y*ml")):
        try:
            entry = msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), KnownIssue, strict=False)
        except (yaml.YAMLError, msgspec.ValidationError, UnicodeDecodeError) as e:
            raise CatalogError(f"{path.name}: {e}") from e
        if not _ID.fullmatch(entry.id):
            raise CatalogError(f"{path.name}: id {entry.id!r} is not owner/repository#number")
        if entry.match == Match():
            raise CatalogError(f"{path.name}: no condition: the entry would match everything")
        for where, pattern in entry.match.values.items():
            if not re.fullmatch(r"\w+\.\w+", where):
                raise CatalogError(f"{path.name}: match.values: {where!r} is not like oom_kill.task")
            try:
                re.compile(pattern)
            except re.error as e:
                raise CatalogError(f"{path.name}: match.values.{where}: {e}") from e
        for component, wanted in entry.versions.items():
            for part in wanted.split(","):
                if not re.fullmatch(r"\s*(<|<=|>|>=|==)\s*\d[\w.]*\s*", part):
                    raise CatalogError(f"{path.name}: versions.{component}: {part!r} is not a range like <0.5.14")
        out.append(entry)
    return out


@cache
def shipped() -> tuple[KnownIssue, ...]:
    """The entries that come with closeranks."""
    return tuple(load(FOLDER))


def key(version: str) -> tuple[tuple[int, int], ...]:
    """An order of versions: `0.5.9rc1 < 0.5.9 < 0.5.9.post1 < 0.5.10`."""
    parts: list[tuple[int, int]] = []
    for word in re.findall(r"\d+|[a-z]+", version.lower().split("+")[0]):
        if word.isdecimal():
            parts.append((1, int(word)))
        elif word in ("rc", "a", "b", "alpha", "beta", "dev", "preview", "nightly"):
            parts.append((-1, 0))
        elif word in ("post",):
            parts.append((2, 0))
    return (*parts, (0, 0))


def in_range(version: str, wanted: str) -> bool:
    """Whether `version` lies in `wanted` (`>=0.5.12,<0.5.19`)."""
    for part in wanted.split(","):
        m = re.fullmatch(r"\s*(<=|>=|==|<|>)\s*(\S+)\s*", part)
        if m is None:
            return False
        a, b = key(version), key(m[2])
        if not {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b, "==": a == b}[m[1]]:
            return False
    return True


def merged(folders: Iterable[Path]) -> list[KnownIssue]:
    """Shipped entries and those of `folders`; a later entry with the same id replaces an earlier one."""
    by_id = {e.id: e for e in shipped()}
    for folder in folders:
        by_id.update({e.id: e for e in load(folder)})
    return list(by_id.values())
