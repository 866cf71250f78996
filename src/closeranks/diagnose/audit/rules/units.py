"""How the engine is started and ended: systemd units, containers, and what stands on the command line."""

import re
from collections.abc import Iterable

from closeranks.diagnose.audit.model import Deployment
from closeranks.diagnose.audit.rule import Hit, Open, rule
from closeranks.diagnose.audit.sources.flags import HIDDEN

STOP_SECONDS = 120.0
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}


def _last(unit: dict[str, tuple[str, ...]], name: str) -> str:
    return (unit.get(name) or ("",))[-1]


def seconds(text: str) -> float | None:
    """systemd's time spans as seconds (`5min 20s`, `infinity`); None when it is none."""
    if text.strip() == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if not parts or any(unit not in _UNITS for _, unit in parts):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


@rule(
    "unit-leaves-ranks",
    "error",
    "supervision",
    "Stopping the unit leaves rank processes alive",
    why="Only the launcher is killed. Schedulers live on under PID 1 with their GPU memory and ports, and the restart "
    "fails or pairs with their remains.",
    fix="Remove KillMode=, or set KillMode=control-group.",
    refs=("sglang#23627", "sglang#31645"),
)
def unit_leaves_ranks(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        mode = _last(dict(engine.unit or {}), "killmode")
        if mode in ("process", "none"):
            yield Hit(engine.label, f"KillMode={mode}")


@rule(
    "unit-no-restart",
    "warning",
    "supervision",
    "Nobody restarts the engine",
    why="After a crash, and after the engine's own watchdog ended it, it stays down.",
    fix="Set Restart=always (or on-failure) with a RestartSec= of some seconds.",
)
def unit_no_restart(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        if engine.unit is not None and _last(dict(engine.unit), "restart") in ("", "no"):
            yield Hit(engine.label, "Restart= is not set")
        if engine.container is not None and engine.container.get("restart") in ("", "no", "Never"):
            yield Hit(engine.label, "no restart policy")


@rule(
    "unit-slow-stop",
    "warning",
    "supervision",
    "Stopping a wedged engine takes minutes",
    why="A wedged rank ignores SIGTERM; until SIGKILL comes the restart waits.",
    fix=f"Set TimeoutStopSec= to what a healthy drain needs, below {STOP_SECONDS:.0f} s.",
)
def unit_slow_stop(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        given = _last(dict(engine.unit or {}), "timeoutstopsec")
        span = seconds(given) if given else None
        if span is not None and (span > STOP_SECONDS or span == 0):
            yield Hit(engine.label, f"TimeoutStopSec={given}")


@rule(
    "unit-restart-storm",
    "note",
    "supervision",
    "Restarts are not limited",
    why="A deterministic crash is then repeated for ever, each time against the peer that it pairs with.",
    fix="Leave StartLimitIntervalSec= and StartLimitBurst= at limits that an operator notices.",
)
def unit_restart_storm(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        unit = dict(engine.unit or {})
        if _last(unit, "restart") == "always" and _last(unit, "startlimitintervalsec") == "0":
            yield Hit(engine.label, "Restart=always, StartLimitIntervalSec=0")


@rule(
    "unit-no-ptrace",
    "warning",
    "observability",
    "The unit's sandbox forbids taking stacks",
    why="The engine's own watchdog calls py-spy from inside the unit; without ptrace it logs an error, not stacks.",
    fix="Allow ptrace in SystemCallFilter= and CAP_SYS_PTRACE in CapabilityBoundingSet=.",
)
def unit_no_ptrace(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        unit = engine.unit or {}
        for value in unit.get("systemcallfilter", ()):
            if value.startswith("~") and re.search(r"@debug|\bptrace\b", value):
                yield Hit(engine.label, f"SystemCallFilter={value}")
        for value in unit.get("capabilityboundingset", ()):
            if value.startswith("~") == ("CAP_SYS_PTRACE" in value):
                yield Hit(engine.label, f"CapabilityBoundingSet={value}")


@rule(
    "container-no-ptrace",
    "warning",
    "observability",
    "Stacks cannot be taken inside the container",
    why="py-spy needs SYS_PTRACE; without it a wedge leaves no stacks, and the engine's own watchdog fails to dump.",
    fix="Add cap_add: [SYS_PTRACE] (Kubernetes: securityContext.capabilities.add).",
    refs=("sglang#7783",),
)
def container_no_ptrace(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        if engine.container is None or engine.container.get("privileged") == "true":
            continue
        caps = engine.container.get("cap_add", "").upper()
        if "SYS_PTRACE" not in caps and "ALL" not in caps.split():
            yield Hit(engine.label, f"capabilities added: {caps or 'none'}")


@rule(
    "secret-on-command-line",
    "warning",
    "security",
    "A secret stands on the command line",
    why="Every user of the host reads it with ps, and every bundle of evidence would hold it.",
    fix="Give it by a file or by the environment.",
)
def secret_on_command_line(deployment: Deployment) -> Iterable[Hit | Open]:
    for engine in deployment.engines:
        hidden = sorted(name for name, value in engine.flags.items() if value == HIDDEN)
        if hidden:
            yield Hit(engine.label, ", ".join(f"--{name}" for name in hidden))
