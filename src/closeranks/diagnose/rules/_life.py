"""Whether something that happened concerns the engine in this evidence: its processes, and their present life."""

from closeranks.diagnose.facts import Event
from closeranks.diagnose.scene import EngineView, Scene

# What survivors log of a death. Not what any delay brings about as well.
_DEATHS = ("worker_died", "child_crashed", "engine_dead", "teardown", "peer_closed", "peer_lost", "store_lost", "fatal")


def several_hosts(scene: Scene) -> bool:
    """Whether the engine's ranks are on more hosts than one: a list of one host then lacks some by right."""
    return (scene.flag_number("nnodes") or 1) > 1


def concerns(scene: Scene, e: Event) -> bool:
    """Whether the death of a process may be that of a rank of this engine, in this life of it.

    It may not if the engine came up after it; nor if every rank that this host should have was seen alive, under a
    number of its own, and nobody logged a death. The kernel's log is the host's and reaches back to its start: it tells
    of other containers, and of lives that are over.
    """
    pid = e.get("pid")
    if pid is not None and pid in _pids(scene):
        return True
    if e.time is not None and any(up.time is not None and up.time > e.time for up in scene.events("started")):
        return False
    return not (scene.engines and all(_all_seen(scene, x) for x in scene.engines) and not scene.has(*_DEATHS))


def _pids(scene: Scene) -> set[int]:
    """Numbers under which processes of the engine are known: of dumps, lists and log lines."""
    seen = {p.pid for p in scene.processes if p.who} | {s.pid for s in scene.stacks if s.pid is not None}
    return seen | {int(n) for e in scene.events("stack_dump", "child_crashed", "worker_died") if (n := e.num("pid"))}


def _all_seen(scene: Scene, engine: EngineView) -> bool:
    """Whether each rank that this host should have was dumped, and none of them on its way out."""
    if any(r.at.kind == "exiting" for r in engine.ranks.values()):
        return False
    n = sum(r.who.kind != "engine_core" for r in engine.ranks.values())
    size = scene.flag_number("tp", "tp-size", "tensor-parallel-size")
    if size:
        return n >= max(size // (scene.flag_number("nnodes") or 1), 1)
    return not engine.missing and n > 1 and n & (n - 1) == 0  # a group is as large as a power of two, as a rule
