"""What can be ended by itself, of a `closeranks serve`: one engine, its gateway, or the whole service.

Its supervisor starts an engine or a gateway again as soon as it is gone, and the gateway keeps clients' streams open
while an engine is replaced. So a wedged engine is ended alone, without the gateway; a frozen gateway alone, without the
engines; and only a supervisor that stands itself makes it necessary to end everything and start the service anew.

    engine    leader and ranks       the supervisor starts the next epoch; open streams go on
    gateway   its process            the supervisor starts it; its open streams are lost
    service   all of it              started like any other program: by its unit, its container, its command line

Other engines are units by themselves.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from closeranks.watch import procfs
from closeranks.watch.snapshot import EngineSeen, Proc, State

OWN_ROLES = ("leader", "rank")


def units_of(engines: Sequence[EngineSeen]) -> tuple[EngineSeen, ...]:
    """Everything that can be named and ended by itself: the engines, and gateways and services of closeranks."""
    found = [_alone(engine) for engine in engines]
    for key, own in _services(engines).items():
        shared = {p.role: p for engine in own for p in engine.shared}
        if "gateway" in shared:
            found.append(_unit(f"gateway-{key}", own, (shared["gateway"],)))
        if "supervisor" in shared:
            head = msgspec.structs.replace(shared["supervisor"], role="launcher")
            rest = [p for engine in own for p in engine.procs if p.role in OWN_ROLES]
            gateway = [shared["gateway"]] if "gateway" in shared else []
            found.append(_unit(f"service-{key}", own, (head, *gateway, *rest)))
    return tuple(found)


def is_service(unit: EngineSeen) -> bool:
    """Whether it is a whole `closeranks serve`, and so nobody's child that would be started again."""
    return unit.kind == "closeranks" and unit.launcher is not None


def is_own_engine(unit: EngineSeen) -> bool:
    """Whether it is one engine of closeranks', without what it shares with others."""
    return unit.kind == "closeranks" and any(p.role in OWN_ROLES for p in unit.procs) and unit.launcher is None


def to_blame(
    names: Iterable[str], engines: Sequence[EngineSeen], states: Mapping[str, State] | None = None
) -> tuple[str, ...]:
    """The units that have to be ended for these engines to serve again; names of units stay as they are.

    Told by which of the processes are stopped now, and by which ones the watch's evidence (`states`) names.
    """
    by_name = {engine.name: engine for engine in engines}
    services = {engine.name: key for key, own in _services(engines).items() for engine in own}
    found: dict[str, None] = {}
    for name in names:
        engine = by_name.get(name)
        if engine is None or name not in services:
            found[name] = None
            continue
        state = (states or {}).get(name)
        named = {e.rank for e in state.why if e.rank} if state is not None and state.phase == "confirmed" else set()
        standing = named | {p.label for p in engine.procs if _stopped(p)}
        shared = standing & {p.label for p in engine.shared}
        if "supervisor" in shared:
            found[f"service-{services[name]}"] = None
            continue
        if "gateway" in shared:
            found[f"gateway-{services[name]}"] = None
        if standing - shared or not shared:
            found[name] = None
    whole = {name for name in found if name.startswith("service-")}
    covered = {e for e, key in services.items() if f"service-{key}" in whole}
    covered |= {f"gateway-{services[e]}" for e in covered}
    return tuple(sorted(set(found) - covered))


def services_of(engines: Iterable[EngineSeen]) -> dict[str, str]:
    """Engine of closeranks → the unit of its whole service, where its supervisor is seen."""
    return {
        engine.name: f"service-{key}"
        for key, own in _services(engines).items()
        for engine in own
        if any(p.role == "supervisor" for p in engine.shared)
    }


def _services(engines: Iterable[EngineSeen]) -> dict[str, list[EngineSeen]]:
    """Engines of closeranks by their service, which its port names, or else its first process."""
    by_process: dict[int, list[EngineSeen]] = {}
    for engine in engines:
        if engine.kind == "closeranks" and engine.shared:
            first = min(engine.shared, key=lambda p: (p.role != "supervisor", p.pid))
            by_process.setdefault(first.pid, []).append(engine)
    found: dict[str, list[EngineSeen]] = {}
    for pid, own in by_process.items():
        port = next((p for e in own if (p := (e.url or "").rpartition(":")[2]).isdecimal()), "")
        found[port if port and port not in found else f"pid{pid}"] = own
    return found


def _alone(engine: EngineSeen) -> EngineSeen:
    if engine.kind != "closeranks":
        return engine
    return msgspec.structs.replace(engine, procs=tuple(p for p in engine.procs if p.role in OWN_ROLES))


def _unit(name: str, own: Sequence[EngineSeen], procs: Sequence[Proc]) -> EngineSeen:
    placed = tuple(msgspec.structs.replace(p, engine=name) for p in procs)
    return msgspec.structs.replace(own[0], name=name, role="both", procs=placed, world=0)


def _stopped(process: Proc) -> bool:
    now = procfs.main_thread(process.pid)
    return now is not None and now.start_time == process.start_time and now.state == "T"
