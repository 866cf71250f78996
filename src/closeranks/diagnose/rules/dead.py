# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Processes that are dead, stopped, killed, or refused a resource."""

from closeranks.diagnose.facts import Event, Process
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._life import several_hosts
from closeranks.diagnose.rules._make import (
    finding,
    places,
)
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


def absent_ranks(scene: Scene) -> list[str]:
    """Ranks that ought to be in the process list and are not. Of an engine on several hosts a list cannot tell."""
    if several_hosts(scene) or not scene.has("ps_listing"):
        return []
    alive = {
        p.who.tp
        for p in scene.processes
        if p.who and p.who.is_rank and p.who.tp is not None and not p.state.startswith("Z")
    }
    size = scene.flag_number("tp", "tp-size", "tensor-parallel-size") or (max(alive) + 1 if alive else 0)
    named = {f.who.tp for f in scene.facts if f.who and f.who.kind in ("scheduler", "worker") and f.who.tp is not None}
    wanted = set(range(min(size, 1024))) | named
    return [f"TP{i}" for i in sorted(wanted - alive)] if alive else []


@rule(
    6,
    "HEALTH_FALSE_OK_ENGINE_DEAD CRASH_LOOKS_LIKE_HANG DEAD_PEER MISSING_PARTICIPANT IPC_OR_EXTERNAL_LOST",
    "process list: engine core or ranks gone, zombies, or stopped",
)
def processes_gone(scene: Scene) -> Finding | None:
    zombies = [p for p in scene.processes if p.state.startswith("Z")]
    stopped = [p for p in scene.processes if p.who and p.who.is_rank and stays_stopped(scene, p.pid)]
    cores = [p for p in zombies if p.who and p.who.kind == "engine_core"]
    ok = [e for e in scene.events("http") if e.get("status") == 200]
    if cores:
        return _dead_behind_the_port(scene, cores, ok)
    ranks_gone = [p for p in zombies if (p.who and p.who.is_rank) or (p.who is None and scene.has("child_crashed"))]
    if ranks_gone:
        alive = [p for p in scene.processes if p.who and p.who.is_rank and not p.state.startswith("Z")]
        leaving = [r for g in scene.engines for r in g.at("exiting")]
        # A rank that was killed from outside did not crash; what its peers raise then is the echo of its absence.
        killed = [e for e in scene.events("child_crashed", "exit_code") if e.get("code") in _KILLED]
        if not alive and ok and not scene.has("rank_exception", "exception", "fatal", "child_crashed", "teardown"):
            return _dead_behind_the_port(scene, ranks_gone, ok)
        first = _died_silently(scene, ranks_gone)
        if (not alive or leaving) and not (killed and alive) and not first:
            echo = scene.has("peer_closed", "peer_lost") or killed
            return finding(
                "CRASH_LOOKS_LIKE_HANG",
                SHOWN if scene.has("rank_exception", "exception", "child_crashed", "fatal") and not echo else LIKELY,
                "The engine's ranks have crashed; the launcher still holds the port.",
                [*ranks_gone, *scene.events("rank_exception", "child_crashed", "exception")[:3]],
                mechanism="after a child's crash the launcher dumps and waits before it exits: the port accepts and nothing answers",
                next_checks=["the first exception in time over all ranks' logs"],
            )
        return finding(
            "DEAD_PEER",
            LIKELY,
            f"{labels_of(first or ranks_gone)} died; {'the others raised at its absence' if first else 'the other ranks wait'}.",
            [*ranks_gone, *scene.events("child_crashed", "exit_code", "peer_closed")[:2]],
            stage=21 if scene.has("gloo_size") else None,  # what killed it is in the log
            missing=list(dict.fromkeys(p.who.label for p in first or ranks_gone if p.who)),
            next_checks=["exit code and dmesg of the dead process"],
        )
    helpers = [
        p
        for p in scene.processes
        if p.who and p.who.kind in ("detokenizer", "dp_controller") and p.state[:1] in ("Z", "T", "t")
    ]
    if helpers and not stopped:
        return finding(
            "IPC_OR_EXTERNAL_LOST",
            LIKELY,
            f"The {helpers[0].who.kind if helpers[0].who else 'helper'} process is {'dead' if helpers[0].state[0] == 'Z' else 'stopped'}: what the ranks send it goes nowhere.",
            [*helpers, *scene.events("health_failed")[:2], *scene.batches[-1:]],
            mechanism="answers pass through that process; the ranks go on without noticing",
            next_checks=["its exit code, dmesg, who stopped it"],
        )
    if stopped:
        engines = sorted({scene.engine_of(p.pid) for p in stopped} - {""})
        own = [scene.only(e) for e in scene.engines if e.name in engines] or [scene]
        held = [e for p in stopped for e in _held_by(scene, p.pid)]
        traced = bool(held) and all(p.state[:1] == "t" for p in stopped)  # perhaps for the capture only
        how = (
            f"held by a debugger ({held[0].get('tool')} -p {held[0].get('pid')})"
            if held
            else "signalled, traced or frozen"
        )
        return finding(
            "MISSING_PARTICIPANT",
            LIKELY if traced or any(s.live for s in own) else SHOWN,
            f"{labels_of(stopped)}{f' of {engines[0]}' if len(engines) == 1 else ''} is stopped (state {'t' if traced else 'T'}): {how}; its peers wait for it.",
            [*stopped, *held[:1]],
            trigger=f"{held[0].get('tool')} was attached and left there" if held else "",
            likely=["that it was attached before the stop, and not to look into it"] if traced else [],
            engine=engines[0] if len(engines) == 1 else "",
            ranks=places(r for g in scene.engines if g.name in engines or not engines for r in g.ranks.values()),
            missing=list(dict.fromkeys(p.who.label for p in stopped if p.who)),
            mechanism="a stopped process takes part in nothing",
            next_checks=["who stopped it: a debugger, SIGSTOP, a cgroup freezer? SIGCONT lets it go on"],
        )
    return _core_not_listed(scene, ok) or _not_listed(scene)


def _core_not_listed(scene: Scene, ok: list[Event]) -> Finding | None:
    """vLLM's API process without its engine core in a list that shows other processes, too: it was not cut by a filter.

    Without titles the core is a child of multiprocessing, or a second line like the API's; then nothing is known.
    """
    api = [p for p in scene.processes if p.who and p.who.kind == "api" and p.who.family == "vllm"]
    parts = [p for p in scene.processes if p.who and (p.who.kind == "engine_core" or p.who.is_rank)]
    lists = [e for e in scene.events("ps_listing") if any(p.src.file == e.src.file for p in api)]
    if len({p.pid for p in api}) != 1 or parts or not lists or not ok or scene.engines:
        return None
    if not all(e.get("_foreign") and not e.get("_children") for e in lists):
        return None
    running = scene.requests[0]
    if not running or scene.live or not scene.batches or scene.batches[-1].num("gen"):
        return None
    return finding(
        "HEALTH_FALSE_OK_ENGINE_DEAD",
        LIKELY,
        f"The process list has vLLM's API process and no engine core; the API answered 200 on {ok[-1].get('path')}, and nothing is computed for {running:g} requests.",
        [*lists[:1], *api[:1], *scene.batches[-2:], *ok[-2:]],
        mechanism="the API process outlives its engine; its endpoints do not ask the engine",
        likely=["a list that was filtered, or of another container, lacks the core as well"],
        next_checks=[
            "the whole process list of that container",
            "dmesg and the core's own last lines",
            "a real completion",
        ],
        workaround="probe with a real completion instead of /health; restart",
    )


def _dead_behind_the_port(scene: Scene, dead: list[Process], ok: list[Event]) -> Finding:
    answers = f" while the API answered 200 on {ok[-1].get('path')}" if ok else ""
    return finding(
        "HEALTH_FALSE_OK_ENGINE_DEAD",
        LIKELY,
        f"The engine behind the API ({labels_of(dead)}) is dead (a zombie){answers}.",
        [*dead, *ok[:2], *scene.batches[-2:]],
        mechanism="the API process outlives its engine; its endpoints do not ask the engine, and a stream's 200 is sent before its first token",
        shown=[f"{p.src}: pid {p.pid} is a zombie" for p in dead],
        likely=["why it died is not in this evidence"],
        next_checks=["the dead process's own last lines, dmesg, its exit code"],
        workaround="probe with a real completion instead of /health; restart",
    )


def _not_listed(scene: Scene) -> Finding | None:
    """Ranks that wait in a collective beside one that the process list of their host lacks."""
    gone = absent_ranks(scene)
    waiting = [r for e in scene.engines for r in e.at("collective", "collective_device") if r.label not in gone]
    if not gone or not waiting or len(gone) >= len(waiting) or scene.live:
        return None
    return finding(
        "DEAD_PEER",
        LIKELY,
        f"{', '.join(gone[:8])} {'is' if len(gone) == 1 else 'are'} not in the process list; the other ranks wait.",
        [*scene.events("ps_listing")[:1], *(r.stacks[-1] for r in waiting[:2])],
        ranks=places(waiting),
        missing=gone,
        mechanism="the others wait for a rank that no longer exists",
        likely=["a list that was filtered, or of another host, lacks a rank as well"],
        next_checks=["the whole process list of that host, exit codes, dmesg"],
    )


def stays_stopped(scene: Scene, pid: int | None) -> bool:
    """Whether every reading finds this process stopped. One that is only traced (t) may just be read by a py-spy."""
    states = [p.state[:1] for p in scene.processes if p.pid == pid]
    held = "T" in states or len(states) > 1 or bool(_held_by(scene, pid))
    return bool(states) and all(s in "Tt" and s for s in states) and held


def _held_by(scene: Scene, pid: int | None) -> list[Event]:
    """Debuggers that the process list shows attached to this process."""
    return [e for e in scene.events("debugger") if e.get("pid") == pid]


_KILLED = frozenset({-9, -15, 137, 143})  # SIGKILL and SIGTERM come from outside: the kernel, an operator, a supervisor


_OWN_SIGNALS = frozenset(
    {"Segmentation fault", "Bus error", "Floating point exception", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
)


def labels_of(processes: list[Process]) -> str:
    """`TP1`, or the pid where the title does not tell; a process that was read several times once."""
    last = {p.pid: p.who.label if p.who else f"pid {p.pid}" for p in processes}
    return ", ".join(list(last.values())[:8])


@rule(6, "FRONTEND_OR_CPU_BOUND", "process list: the process that answers requests is stopped")
def frontend_stopped(scene: Scene) -> Finding | None:
    """Of an engine whose ranks are stopped as well, or dead, that is the finding."""
    heads = [p for p in scene.processes if p.who and p.who.kind in ("api", "launcher") and stays_stopped(scene, p.pid)]
    if not heads:
        return None
    side = scene.role_of(heads[-1])
    ranks = [p for p in scene.processes if p.who and p.who.is_rank and scene.role_of(p) == side]
    if any(p.state.startswith("Z") or stays_stopped(scene, p.pid) for p in ranks):
        return None
    return finding(
        "FRONTEND_OR_CPU_BOUND",
        SHOWN if ranks else LIKELY,
        f"The process that answers requests{f' of {side}' if side else ''} is stopped (state T): signalled, traced or frozen. {'Its engine lives, and nobody can ask it.' if ranks else 'What its engine does is not in view.'}",
        [*heads, *scene.events("health_failed")[:1]],
        engine=side,
        ranks={"api": "stopped"},
        mechanism="requests, answers and probes all pass through that process; open streams stand although their tokens are computed",
        decoys=["the engine's own counters are read through that process, too: their silence says nothing about it"],
        next_checks=["who stopped it: a debugger, SIGSTOP, a cgroup freezer? SIGCONT lets it go on"],
    )


@rule(7, "HEALTH_FALSE_OK_ENGINE_DEAD", "the engine core reported its own death and the API answers on")
def engine_dead_api_alive(scene: Scene) -> Finding | None:
    dead = scene.events("engine_dead")
    if not dead or scene.has("worker_died"):
        return None
    ok = [e for e in scene.events("http") if e.get("status") == 200 and scene.role_of(e) == scene.role_of(dead[0])]
    ok = [e for e in ok if _after(dead[0], e)]
    stack_causes = [
        e
        for e in scene.events("rank_exception", "exception", "fatal")
        if str(e.get("cause", "")) not in ("engine_dead", "cancelled")
    ]
    if not ok:
        return None
    return finding(
        "HEALTH_FALSE_OK_ENGINE_DEAD",
        LIKELY,
        "The engine core died; the API process still answers 200.",
        [*dead[:2], *ok[-2:], *stack_causes[:2]],
        mechanism="the API process outlives its engine",
        next_checks=["the first exception of the engine core or a worker before this line"],
        workaround="probe with a real completion; restart",
    )


def _after(first: Event, then: Event) -> bool:
    """Whether `then` came after `first`, as far as clocks or the order in one file can tell."""
    if first.time is not None and then.time is not None:
        return then.time >= first.time
    return then.src.file != first.src.file or then.src > first.src


@rule(8, "STARTUP", "a port was taken, and the rank that needed it did not come up")
def port_in_use(scene: Scene) -> Finding | None:
    taken = scene.events("port_in_use")
    if not taken or any(e.time and taken[-1].time and e.time > taken[-1].time for e in scene.events("started")):
        return None
    if any(b.src.file == taken[-1].src.file and b.src > taken[-1].src for b in scene.batches):
        return None  # it came up all the same
    wedged = _stands_already(scene, taken)
    port = next((e.get("port") for e in taken if e.get("port") is not None), None)
    who = next((e.who.label for e in taken if e.who), "")
    return finding(
        "STARTUP",
        LIKELY if wedged else SHOWN,
        f"{who or 'A process'} could not listen{f' on port {port}' if port else ''}: the address is in use"
        + (", as it would be by the engine that stands there." if wedged else "."),
        [*taken[:2], *scene.events("rank_exception")[:1]],
        stage=47 if wedged else None,  # a second start beside an engine that stands is no cause of its standing
        trigger="a port was taken between being chosen and being bound, or a former process still holds it",
        mechanism="the rank fails in rendezvous while the others wait for it or load on",
        shown=[f"{taken[0].src}: address already in use"],
        decoys=["'[Gloo] Rank 0 is connected to 0 peer ranks' is normal for a group of one"],
        next_checks=[
            f"ss -ltnp 'sport = :{port}'" if port else "ss -ltnp",
            "processes left over from an earlier start",
        ],
        workaround="start again; keep fixed ports outside net.ipv4.ip_local_port_range; one instance per port range",
    )


def _died_silently(scene: Scene, gone: list[Process]) -> list[Process]:
    """Those that raised nothing, when others raised because a connection to a rank closed."""
    raised = {e.who.label for e in scene.events("rank_exception") if e.who}
    silent = [p for p in gone if p.who and p.who.label not in raised]
    return silent if raised and scene.has("peer_closed") else []


def _stands_already(scene: Scene, taken: list[Event]) -> bool:
    """Whether the evidence holds an engine that had come up: its own log has batches, or its ranks are past the start."""
    files = {e.src.file for e in taken}
    served = [b for b in scene.batches if b.src.file not in files]
    past = [r for e in scene.engines for r in e.ranks.values() if r.at.kind != "unknown" and r.at.site != "startup"]
    return bool(served) or bool(past)


@rule(13, "CRASH_LOOKS_LIKE_HANG", "a helper process of SGLang raised, and the engine was not ended with it")
def helper_raised(scene: Scene) -> Finding | None:
    raised = scene.events("helper_exception")
    if not raised:
        return None
    e = raised[-1]
    over = [*scene.events("teardown", "started"), *(h for h in scene.events("http") if h.get("status") == 200)]
    if any(o.src.file == e.src.file and o.src > e.src for o in over):
        return None  # the launcher ended it, or what answers now is another life
    part = {"Detokenizer": "detokenizer", "Tokenizer": "tokenizer"}.get(str(e.get("part")), "data-parallel controller")
    refused = [h for h in scene.events("http", "health_failed") if h.get("status", 503) == 503 and h.src > e.src]
    causes = [x for x in scene.events("exception") if x.src.file == e.src.file and x.src > e.src]
    kind = causes[0].get("type") if causes else ""
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        LIKELY,
        f"The {part} process raised{f' {kind}' if kind else ''}, and the engine was not ended with it.",
        [e, *causes[:2], *refused[:2]],
        mechanism="every answer passes through that process; ranks and port stay, and probes fail for good",
        missing=[part],
        decoys=["503 looks like a start that goes on; it will not end"] if refused else [],
        next_checks=["the traceback under this line", "the process list: is the helper gone?"],
        workaround="a liveness probe that restarts after prolonged 503",
    )


@rule(
    46, "CRASH_LOOKS_LIKE_HANG", "a container or process ended by a signal of its own fault, and nothing else is said"
)
def ended_by_own_signal(scene: Scene) -> Finding | None:
    own = {
        **{139: "SIGSEGV", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 132: "SIGILL"},
        **{-11: "SIGSEGV", -6: "SIGABRT", -7: "SIGBUS", -8: "SIGFPE", -4: "SIGILL"},
    }
    ended = [e for e in scene.events("exit_code") if e.get("code") in own]
    if not ended or scene.engines or scene.live:  # ranks that stand, or work, are of a life that goes on
        return None
    later = [f for f in [*scene.events("started"), *scene.batches] if f.src.file == ended[-1].src.file]
    if any(f.src > ended[-1].src for f in later):
        return None
    name = own[int(ended[-1].get("code", 0))]
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        LIKELY,
        f"A process ended with code {ended[-1].get('code')}, that is {name}: a crash of native code, of which the log keeps nothing.",
        [*ended[-2:], *scene.batches[-1:]],
        mechanism="a crash in native code ends the process without a Python traceback; clients and peers see silence",
        likely=["where it crashed is not in this evidence"],
        next_checks=[
            "dmesg (segfault at ...)",
            "PYTHONFAULTHANDLER=1, or a core dump: which frame?",
            "kubectl logs --previous",
        ],
    )


@rule(12, "DEAD_PEER", "an executor or launcher reports that a worker died")
def worker_died(scene: Scene) -> Finding | None:
    died = scene.events("worker_died")
    killed = [e for e in scene.events("child_crashed") if e.get("code") in _KILLED or e.get("signal") in (9, 15)]
    if (not died and not killed) or (not killed and any(e.get("what") in _OWN_SIGNALS for e in scene.events("fatal"))):
        return None  # a signal that its own fault brought is why, and stands in the log
    e = (died or killed)[0]
    rank = e.get("rank", e.get("index"))
    part = str(e.get("part") or "scheduler")
    named = f"rank {rank}" if rank is not None else "a worker" if part == "scheduler" else f"the {part}"
    side = scene.role_of(e)
    return finding(
        "DEAD_PEER",
        LIKELY,
        f"{named[:1].upper()}{named[1:]}{f' of {side}' if side else ''} died; why is not in this log.",
        [*died[:2], *killed[:2], *scene.events("shm_wait")[:1]],
        engine=side,
        missing=[named] if rank is not None else [],
        mechanism="the others wait for a rank that no longer exists",
        shown=[f"{e.src}: {named} died"],
        decoys=["'No available shared memory broadcast block' is a symptom: someone does not read"]
        if scene.has("shm_wait")
        else [],
        next_checks=["the worker's own log, raylet.out, dmesg, exit code of the container"],
        workaround="readiness by a real completion, not by /v1/models",
    )
