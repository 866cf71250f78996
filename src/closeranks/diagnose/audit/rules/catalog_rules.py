"""One rule per entry of `catalog/unsafe`: conditions on engine, version, flags, environment and model."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from closeranks.catalog.unsafe import Unsafe, load
from closeranks.diagnose.audit.model import Deployment, Engine, Severity
from closeranks.diagnose.audit.rule import Hit, Open, Rule
from closeranks.diagnose.audit.rules.parsers import models_of
from closeranks.diagnose.audit.versions import within

ANY, UNSET = "*", "-"


def from_catalog(extra: Path | None = None) -> list[Rule]:
    """The catalog's entries as rules. Raises `CatalogError`."""
    return [_rule(entry) for entry in load(extra)]


def _rule(entry: Unsafe) -> Rule:
    def check(deployment: Deployment) -> Iterable[Hit | Open]:
        for engine in deployment.engines:
            if engine.kind == entry.engine:
                yield from judge(entry, engine, deployment)

    fix = f"{entry.fix} Price: {entry.price}" if entry.price else entry.fix
    severity = cast(Severity, entry.severity)
    return Rule(entry.id, severity, entry.area, entry.title, entry.why, fix, check, entry.refs)


def judge(entry: Unsafe, engine: Engine, deployment: Deployment) -> Iterable[Hit | Open]:
    """One entry against one engine: a hit, an open question, or nothing."""
    unsafe = _in_range(entry, engine)
    model = _model(entry, engine, deployment)
    if unsafe is False or model is False:
        return
    seen = [f"{engine.kind} {engine.version}"] if entry.versions else []
    for name, wanted in entry.flags.items():
        if not _meets(engine.flag(name), wanted):
            return
        seen.append(_say(f"--{name}", engine.flag(name), name in engine.flags))
    for name, limit in entry.above.items():
        if not engine.number(name) > limit:
            return
        seen.append(_say(f"--{name}", engine.flag(name), name in engine.flags))
    for name, limit in entry.env_above.items():
        if not _number(engine.env.get(name)) > limit:
            return
        seen.append(f"{name}={engine.env[name]}")
    unknown = []
    for name, wanted in entry.env.items():
        if name not in engine.env and UNSET in wanted and not engine.complete_env:
            unknown.append(name)
        elif not _meets(engine.env.get(name), wanted):
            return
        else:
            seen.append(_say(name, engine.env.get(name), True))
    if unsafe is None:
        yield Open(engine.label, f"the version of {entry.engine} (unsafe: {entry.versions})")
    elif model is None:
        yield Open(engine.label, f"the model's folder or config.json (unsafe with: {', '.join(entry.model)})")
    elif unknown:
        yield Open(engine.label, f"the engine's environment ({', '.join(unknown)})")
    else:
        yield Hit(engine.label, ", ".join(seen))


def _in_range(entry: Unsafe, engine: Engine) -> bool | None:
    """Whether the version is one of the entry's; None when it is not known."""
    if not entry.versions:
        return True
    return within(engine.version, entry.versions) if engine.version else None


def _model(entry: Unsafe, engine: Engine, deployment: Deployment) -> bool | None:
    """Whether the model is one of the entry's; None when neither its folder nor its name tells."""
    if not entry.model:
        return True
    types = {model.model_type for model in models_of(engine, deployment) if model.model_type}
    return bool(types & set(entry.model)) if types else None


def _number(text: str | None) -> float:
    """A number, -inf for what is none."""
    try:
        return float(text or "-inf")
    except ValueError:
        return float("-inf")


def _meets(value: str | None, wanted: tuple[str, ...]) -> bool:
    if value is None or value == "false":
        return UNSET in wanted or value in wanted
    return ANY in wanted or value in wanted


def _say(name: str, value: str | None, given: bool) -> str:
    if value is None:
        return f"{name} not set"
    return f"{name} {value}" if given else f"{name} {value} (default)"
