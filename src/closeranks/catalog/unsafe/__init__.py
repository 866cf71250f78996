"""Unsafe configurations and versions: one YAML file each, with its own test lines.

    id: sglang-nixl-abort-kills-bootstrap
    severity: error                      # error, warning, note
    area: disaggregation
    engine: sglang
    versions: ">=0.5.13.post1,<0.5.16"   # left out: every version
    when:                                # all must hold; left out: always
      flags: {disaggregation-mode: [prefill], hicache-size: "*"}   # a list of values; "*": set; "-": not set
      env: {SYNC_TOKEN_IDS_ACROSS_TP: ["-", "0"]}
      above: {tp-size: 1}                # a flag's number that must be exceeded
      env_above: {SGLANG_REQ_WAITING_TIMEOUT: 0}   # a variable's
      model: [deepseek_v32, deepseek_v4] # model_type of the model folder
    title: ...
    why: ...
    fix: ...
    refs: [sglang#30352]
    checked: 2026-11-29
    finds:  ["sglang==0.5.14 --disaggregation-mode prefill ..."]    # lines that must be found: the entry's test
    passes: ["sglang==0.5.16 --disaggregation-mode prefill ..."]    # lines that must not

Entries are data: a mistake in one is an error that names the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

_KEYS = {
    *("id", "severity", "area", "engine", "versions", "when", "title", "why", "fix", "price", "refs"),
    *("checked", "finds", "passes"),
}
_REQUIRED = {"id", "severity", "area", "engine", "title", "why", "fix", "checked", "finds", "passes"}
_CONDITIONS = {"flags", "env", "above", "env_above", "model"}


class CatalogError(ValueError):
    """A catalog file that does not say what it must; names file and key."""


@dataclass(frozen=True)
class Unsafe:
    """One entry. `flags` and `env` map a name to accepted values, or to ("*",) or ("-",)."""

    id: str
    severity: str
    area: str
    engine: str
    title: str
    why: str
    fix: str
    versions: str = ""
    price: str = ""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    env: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    above: Mapping[str, float] = field(default_factory=dict)
    env_above: Mapping[str, float] = field(default_factory=dict)
    model: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    checked: str = ""
    finds: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()


def load(extra: Path | None = None) -> list[Unsafe]:
    """All entries that ship, and those of a folder of one's own. Raises `CatalogError`."""
    own = [path for path in files(__name__).iterdir() if path.name.endswith(".yaml") and not path.name.startswith("_")]
    entries = [_parse(path.name, path.read_text(encoding="utf-8")) for path in sorted(own, key=lambda p: p.name)]
    for path in sorted(extra.glob("*.yaml")) if extra else ():
        entries.append(_parse(str(path), path.read_text(encoding="utf-8")))
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            raise CatalogError(f"two entries have the id {entry.id!r}")
        seen.add(entry.id)
    return entries


def families() -> dict[str, dict[str, Any]]:
    """Model families: which parsers, tokens and template words belong to which models (`_families.yaml`)."""
    data: dict[str, dict[str, Any]] = yaml.safe_load(files(__name__).joinpath("_families.yaml").read_text("utf-8"))
    return data


def _parse(name: str, text: str) -> Unsafe:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CatalogError(f"{name}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise CatalogError(f"{name}: not a mapping")
    when = data.get("when") or {}
    for what, found, allowed in (("key", data, _KEYS), ("condition", when, _CONDITIONS)):
        if unknown := set(found) - allowed:
            raise CatalogError(f"{name}: unknown {what} {sorted(unknown)[0]!r}; known: {', '.join(sorted(allowed))}")
    if missing := _REQUIRED - {key for key in data if data[key]}:
        raise CatalogError(f"{name}: {sorted(missing)[0]!r} is missing")
    if data["severity"] not in ("error", "warning", "note"):
        raise CatalogError(f"{name}: severity {data['severity']!r}; known: error, warning, note")
    return Unsafe(
        **{key: str(data[key]).strip() for key in ("id", "severity", "area", "engine", "title", "why", "fix")},
        versions=str(data.get("versions") or ""),
        price=str(data.get("price") or ""),
        flags=_values(when.get("flags")),
        env=_values(when.get("env")),
        above={str(k): float(v) for k, v in (when.get("above") or {}).items()},
        env_above={str(k): float(v) for k, v in (when.get("env_above") or {}).items()},
        model=tuple(when.get("model") or ()),
        refs=tuple(str(ref) for ref in data.get("refs") or ()),
        checked=str(data["checked"]),
        finds=tuple(data["finds"]),
        passes=tuple(data["passes"]),
    )


def _values(given: dict[str, Any] | None) -> dict[str, tuple[str, ...]]:
    listed = {str(k): v if isinstance(v, list) else [v] for k, v in (given or {}).items()}
    return {
        k: tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in v) for k, v in listed.items()
    }
