# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Processes that are dead, stopped, blocked on themselves, or refused a resource."""

import re

from closeranks.diagnose.facts import Event, Process
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding, places
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.stacks import position
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding

_RANK_TASK = re.compile(r"^(sglang::sched|VLLM::Work|VLLM::Engine|ray::|vllm|trtllm|mpi4py)")
_OTHER_TASK = re.compile(
    r"^(lmcache|mooncake|etcd|redis|nats|infinistore|memcached|minio|aibrix|dynamo|consul|kvstore|lm_?server)"
)
_PYTHON = re.compile(r"^(python|pt_main|pt_)")


@rule(
    2, "GIL_DEADLOCK", "the main thread waits for the GIL: its own, or one held by a thread in a blocking native call"
)
def gil_deadlock(scene: Scene) -> Finding | None:
    for s in scene.stacks:
        main = s.main
        at = position(main)
        if main is None:
            continue
        waiting = [
            t
            for t in s.threads
            if any(f.name in ("take_gil", "PyEval_AcquireThread", "PyEval_RestoreThread") for f in t.frames[:4])
        ]
        if at.kind == "gil":
            holder = next((t for t in s.threads if t.gil), None)
            owns = holder is not None and holder in waiting
            inner = next((f.name for f in main.frames if "::" in f.name or "rofil" in f.name), "")
            if not owns and len(waiting) < 2 and holder is None:
                continue
            if holder is not None and not owns and not _blocked_native(holder.frames[0].name if holder.frames else ""):
                continue
            what = (
                "the thread that holds the GIL waits for it as well"
                if owns
                else (
                    f"the GIL's holder is blocked in {holder.frames[0].name}"
                    if holder and holder.frames
                    else f"{len(waiting)} threads wait for the GIL and none runs"
                )
            )
            return finding(
                "GIL_DEADLOCK",
                SHOWN if owns else LIKELY,
                f"Deadlock on Python's GIL: {what}.",
                [s],
                ranks={s.who.label if s.who else f"pid {s.pid}": at.where},
                mechanism=f"{len(waiting)} of {len(s.threads)} threads are in take_gil{f', entered through {inner}' if inner else ''}",
                trigger="a profiler was started" if "rofil" in " ".join(f.name for f in main.frames[:12]) else "",
                shown=[f"{len(waiting)} threads wait in take_gil, the main thread among them"],
                next_checks=["py-spy dump --native twice, 5 s apart: the same frames on all threads confirm it"],
                workaround="start the profiler without stacks (with_stack=0)" if "rofil" in inner else "",
            )
    stuck = scene.events("watchdog_stuck")
    if stuck and not scene.engines:
        return None
    return None


def _blocked_native(name: str) -> bool:
    return bool(
        re.search(
            r"ynchronize|cuMemcpy|cudaMemcpy|futex|pthread_|cond_wait|sem_wait|nccl|poll|read|__lll|cuCtx|cuEvent|cuStream|lock|wait",
            name,
        )
    )


@rule(
    4,
    "DEAD_PEER IPC_OR_EXTERNAL_LOST",
    "the kernel killed a process for memory: a rank, or a server that the engine depends on",
)
def killed_for_memory(scene: Scene) -> Finding | None:
    kills = scene.events("oom_kill")
    killed = [e for e in kills if e.get("task")]
    for e in killed:
        task = str(e.get("task"))
        if _OTHER_TASK.match(task):
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                SHOWN,
                f"{task} (pid {e.get('pid')}), which the engine depends on, was killed for memory.",
                [e, *scene.stacks[:2], *_waiting(scene)],
                ranks={r.label: r.at.where for g in scene.engines for r in g.ranks.values()},
                trigger=f"out of memory: {task} killed",
                mechanism="a completion that the dead server owed never arrives; the request stays parked and the ranks stay idle",
                shown=[f"{e.src}: the kernel killed {task}"],
                decoys=["the ranks' stacks look idle: with a request waiting that is a lost message, not health"],
                next_checks=["is that process running again, and did the engine reconnect to it?"],
                workaround=f"restart {task} and the engine; give {task} a memory limit of its own",
            )
        if _RANK_TASK.match(task) or _PYTHON.match(task):
            gone = _absent_ranks(scene)
            known = bool(_RANK_TASK.match(task))
            pool = scene.events("host_pool")
            asked = sum(p.num("gb") or 0 for p in pool)
            size = scene.flag_number("tp", "tp-size")
            absent = f": {', '.join(gone)}" if gone else ""
            note = f" {len(pool)} ranks had asked for {asked:g} GB of host memory" if pool else ""
            note += f", {size} were to" if pool and size and size > len(pool) else ""
            return finding(
                "DEAD_PEER",
                SHOWN if known or gone else LIKELY,
                f"A rank was killed for memory ({task}, pid {e.get('pid')}){absent}.{note}",
                [e, *pool[:2], *scene.events("ps_listing")],
                missing=gone,
                trigger="out of memory",
                mechanism="the others wait for a rank that no longer exists",
                shown=[f"{e.src}: the kernel killed {task}"]
                + ([f"{', '.join(gone)} absent from the process list"] if gone else []),
                next_checks=[
                    "memory limit of the container against host pools, pinned buffers and weights of all ranks"
                ],
                workaround="a smaller host pool (--hicache-size, --hicache-ratio) or a larger memory limit",
            )
    if kills and (scene.has("exit_code") or not scene.stacks):
        return finding("DEAD_PEER", LIKELY, "A process was killed for memory; which one is not in the evidence.", kills)
    for e in scene.events("exit_code"):
        if e.get("reason") == "OOMKilled":
            return finding(
                "DEAD_PEER",
                LIKELY,
                "A container of the engine was killed for memory.",
                [e],
                trigger="out of memory",
                next_checks=["kubectl describe pod, dmesg: which process, which limit"],
            )
    return None


def _waiting(scene: Scene) -> list[Event]:
    return [b for b in scene.batches[-1:] if (b.num("waiting") or b.num("queue") or 0) > 0]


def _absent_ranks(scene: Scene) -> list[str]:
    """Ranks that ought to be in the process list and are not."""
    if not scene.has("ps_listing"):
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
    "HEALTH_FALSE_OK_ENGINE_DEAD CRASH_LOOKS_LIKE_HANG DEAD_PEER MISSING_PARTICIPANT",
    "process list: engine core or ranks gone, zombies, or stopped",
)
def processes_gone(scene: Scene) -> Finding | None:
    zombies = [p for p in scene.processes if p.state.startswith("Z")]
    stopped = [p for p in scene.processes if p.state[:1] in ("T", "t") and p.who and p.who.is_rank]
    cores = [p for p in zombies if p.who and p.who.kind == "engine_core"]
    ok = [e for e in scene.events("http") if e.get("status") == 200]
    if cores:
        ok_words = f" while the API answered 200 on {ok[-1].get('path')}" if ok else ""
        return finding(
            "HEALTH_FALSE_OK_ENGINE_DEAD",
            LIKELY,
            f"The engine core is dead (a zombie){ok_words}.",
            [*cores, *ok[:2], *scene.batches[-2:]],
            mechanism="the API process outlives its engine; its endpoints do not ask the engine, and a stream's 200 is sent before its first token",
            shown=[f"{c.src}: pid {c.pid} is a zombie" for c in cores],
            likely=["why the engine core died is not in this evidence"],
            next_checks=["the engine core's own last lines, dmesg, its exit code"],
            workaround="probe with a real completion instead of /health; restart",
        )
    ranks_gone = [p for p in zombies if (p.who and p.who.is_rank) or (p.who is None and scene.has("child_crashed"))]
    if ranks_gone:
        alive = [p for p in scene.processes if p.who and p.who.is_rank and not p.state.startswith("Z")]
        leaving = [r for g in scene.engines for r in g.at("exiting")]
        if not alive or leaving:
            return finding(
                "CRASH_LOOKS_LIKE_HANG",
                SHOWN if scene.has("rank_exception", "exception", "child_crashed", "fatal") else LIKELY,
                "The engine's ranks have crashed; the launcher still holds the port.",
                [*ranks_gone, *scene.events("rank_exception", "child_crashed", "exception")[:3]],
                mechanism="after a child's crash the launcher dumps and waits before it exits: the port accepts and nothing answers",
                next_checks=["the first exception in time over all ranks' logs"],
            )
        return finding(
            "DEAD_PEER",
            LIKELY,
            f"{labels_of(ranks_gone)} died; the other ranks wait.",
            [*ranks_gone, *scene.events("child_crashed", "exit_code")[:2]],
            missing=[p.who.label for p in ranks_gone if p.who],
            next_checks=["exit code and dmesg of the dead process"],
        )
    if stopped:
        return finding(
            "MISSING_PARTICIPANT",
            SHOWN,
            f"{labels_of(stopped)} is stopped (state T): signalled, traced or frozen; its peers wait for it.",
            [*stopped],
            ranks=places(r for g in scene.engines for r in g.ranks.values()),
            missing=[p.who.label for p in stopped if p.who],
            mechanism="a stopped process takes part in nothing",
            next_checks=["who stopped it: a debugger, SIGSTOP, a cgroup freezer? SIGCONT lets it go on"],
        )
    return None


def labels_of(processes: list[Process]) -> str:
    """`TP1`, or the pid where the title does not tell."""
    return ", ".join(p.who.label if p.who else f"pid {p.pid}" for p in processes[:8])


@rule(7, "HEALTH_FALSE_OK_ENGINE_DEAD", "the engine core reported its own death and the API answers on")
def engine_dead_api_alive(scene: Scene) -> Finding | None:
    dead = scene.events("engine_dead")
    if not dead or scene.has("worker_died"):
        return None
    t = dead[0].time
    ok = [e for e in scene.events("http") if e.get("status") == 200 and (t is None or e.time is None or e.time >= t)]
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


@rule(8, "STARTUP", "a port was taken, and the rank that needed it did not come up")
def port_in_use(scene: Scene) -> Finding | None:
    taken = scene.events("port_in_use")
    if not taken or any(e.time and taken[-1].time and e.time > taken[-1].time for e in scene.events("started")):
        return None
    port = next((e.get("port") for e in taken if e.get("port") is not None), None)
    who = next((e.who.label for e in taken if e.who), "")
    return finding(
        "STARTUP",
        SHOWN,
        f"{who or 'A process'} could not listen{f' on port {port}' if port else ''}: the address is in use.",
        [*taken[:2], *scene.events("rank_exception")[:1]],
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


@rule(12, "DEAD_PEER", "an executor or launcher reports that a worker died")
def worker_died(scene: Scene) -> Finding | None:
    died = scene.events("worker_died")
    killed = [e for e in scene.events("child_crashed") if e.get("code") in (-9, 137, -15)]
    if not died and not killed:
        return None
    e = (died or killed)[0]
    rank = e.get("rank", e.get("index"))
    named = f"rank {rank}" if rank is not None else "a worker"
    return finding(
        "DEAD_PEER",
        LIKELY,
        f"{named[:1].upper()}{named[1:]} died; why is not in this log.",
        [*died[:2], *killed[:2], *scene.events("shm_wait")[:1]],
        missing=[named] if rank is not None else [],
        mechanism="the others wait for a rank that no longer exists",
        shown=[f"{e.src}: {named} died"],
        decoys=["'No available shared memory broadcast block' is a symptom: someone does not read"]
        if scene.has("shm_wait")
        else [],
        next_checks=["the worker's own log, raylet.out, dmesg, exit code of the container"],
        workaround="readiness by a real completion, not by /v1/models",
    )


@rule(
    13, "RUNTIME_LIBRARY_DEADLOCK", "a main thread spins or waits inside a communication library, not in the operation"
)
def library_deadlock(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        inside = engine.at("nccl_internal")
        if not inside:
            continue
        r = inside[0]
        names = [f.name for t in r.stacks[-1].threads for f in t.frames]
        spins = "ncclLocalOpAppend" in names
        asleep = "ncclProxyGetPostedOps" in names
        version = scene.version("nccl")
        arch = scene.arch()
        old = version is not None and _older(version.value, (2, 29, 3))
        why = "its own progress thread sleeps waiting for operations" if asleep else "inside NCCL"
        return finding(
            "RUNTIME_LIBRARY_DEADLOCK",
            SHOWN if spins and asleep and old and arch == "aarch64" else LIKELY,
            f"{r.label} waits inside NCCL ({r.at.op}); {why}. The other ranks wait for it.",
            [*(x.stacks[-1] for x in engine.ranks.values()), version],
            ranks=places(engine.ranks.values()),
            engine=engine.name,
            mechanism="the launcher waits for a free proxy-operation slot while the thread that frees slots waits for work"
            if spins
            else "blocked inside the library while posting an operation",
            shown=[f"{r.stacks[-1].src}: {r.at.op} is the innermost NCCL frame of {r.label}'s main thread"],
            likely=[] if version else ["which NCCL is really mapped is not in the evidence"],
            decoys=[
                "one rank in a collective and another in broadcast looks like a desync; the native frames say otherwise"
            ],
            next_checks=[
                "version of the mapped libnccl (grep nccl /proc/PID/maps)",
                "py-spy dump --native of all ranks again",
            ],
            workaround="NCCL 2.29.3 or later" if spins else "",
        )
    return None


def _older(version: str, than: tuple[int, ...]) -> bool:
    parts = tuple(int(p) for p in re.findall(r"\d+", version)[:3])
    return bool(parts) and parts < than


@rule(14, "RUNTIME_LIBRARY_DEADLOCK MISSING_PARTICIPANT", "RAS: the same few ranks behind in two snapshots")
def ras_laggard(scene: Scene) -> Finding | None:
    frozen = scene.frozen_ras
    if not frozen:
        return None
    r = max(frozen, key=lambda x: len(x.counts))
    top = max(k for _, k in r.counts)
    behind = [k for _, k in r.counts if k < top]
    few = ", ".join(f"rank {n}" for n in r.minority[:8]) or "a few ranks"
    version = scene.version("nccl")
    affected = (
        version is not None
        and tuple(int(p) for p in re.findall(r"\d+", version.value)[:2]) >= (2, 20)
        and _older(version.value, (2, 29, 3))
    )
    one_behind = len(r.minority) == 1 and bool(behind) and top - min(behind) == 1
    # The laggard is not elsewhere in the program: its host thread has no frame of another wait.
    library = (
        one_behind
        and affected
        and scene.arch() != "x86_64"
        and not any(e.at("collective", "p2p", "idle", "blocking_io") for e in scene.engines)
    )
    cls = "RUNTIME_LIBRARY_DEADLOCK" if library else "MISSING_PARTICIPANT"
    return finding(
        cls,
        LIKELY,
        f"{few} {'is' if len(r.minority) == 1 else 'are'} behind in {r.op or 'a'} operations, the same in both snapshots: launched up to {min(behind, default=top)} of {top}.",
        [*frozen[:3], version, *(s for s in scene.stacks[:3])],
        ranks={f"rank {n}": f"launched fewer {r.op} operations" for n in r.minority[:16]},
        ahead=[],
        mechanism="one rank is stuck launching an operation that all others have launched; an NCCL before 2.29.3 can leak its proxy slots on aarch64"
        if library
        else "these ranks never launched the operation that the others wait in",
        shown=["two RAS snapshots with equal counts: not the transient mismatch of a live job"],
        likely=["the machine's architecture is not in the evidence"] if library and not scene.arch() else [],
        next_checks=[
            "py-spy dump --native of the rank that is behind: ncclLocalOpAppend?",
            "uname -m and the mapped libnccl",
        ],
        workaround="NCCL 2.29.3 or later" if library else "",
    )


@rule(15, "NOT_HUNG_SLOW_OR_CAPACITY", "a kernel compilation is under way while a peer's fixed timer ran out")
def slow_compile(scene: Scene) -> Finding | None:
    bars = [e for e in scene.events("bar") if e.get("work") == "jit"]
    sessions = scene.events("jit_session", "compile")
    moving = len(bars) >= 2 and (bars[-1].num("done") or 0) > (bars[0].num("done") or 0)
    waits = scene.events(
        "deepep_host_timeout", "deepep_cell", "shm_wait", "rpc_timeout", "probe_failed", "health_failed"
    )
    if not (moving or (sessions and len(bars) >= 1 and (bars[-1].num("percent") or 0) < 100)) or not (
        waits or sessions
    ):
        return None
    if [e for e in scene.events("oom_kill", "fatal")]:
        return None
    who = next((s.who.label for s in sessions if s.who), "")
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        SHOWN if moving else LIKELY,
        f"{who or 'A rank'} is compiling kernels ({bars[-1].get('percent')} %{', moving' if moving else ''}); a peer's fixed timer ran out first.",
        [*sessions[:1], *bars[:1], *bars[-1:], *waits[:2]],
        mechanism="a cold kernel cache takes longer than the peer's timer, which measures duration and not progress",
        shown=["the progress bar moves"] if moving else [],
        decoys=["the time-out of the communication library names no fault of its own"]
        if scene.has("deepep_host_timeout", "deepep_cell")
        else [],
        next_checks=["does the bar go on?"],
        workaround="compile ahead (sglang.compile_deep_gemm) and share the cache among nodes",
    )


@rule(16, "DEVICE_HANG", "cuda-gdb: a kernel that never ends, on one device or all")
def resident_kernel(scene: Scene) -> Finding | None:
    resident = [k for k in scene.kernels if k.name]
    empty = [k for k in scene.kernels if not k.name]
    if not resident:
        return None
    spin = next((k for k in resident if k.spinning), None)
    nccl = [k for k in resident if re.search(r"^nccl|ncclDev|RingLL|TreeLL", k.name)]
    ok = [r for r in scene.ras if r.status == "OK"]
    k = spin or resident[0]
    if nccl and len(nccl) == len(resident) and not empty:
        return None
    one_side = bool(empty) and not spin
    if one_side:
        summary = f"Device {k.device} polls in {k.name} for a peer; device {empty[0].device} runs no kernel: its stream stopped before it got there."
        mechanism = "the idle device is the laggard; the spinning one only waits for it"
    else:
        summary = f"A kernel never ends: {k.name} on device {k.device}{', spinning on a barrier in shared memory' if spin else ''}."
        mechanism = "the kernel waits for an arrival that does not come; the host waits for the kernel"
    return finding(
        "DEVICE_HANG",
        SHOWN if spin or (one_side and len(scene.engines) <= 1) else LIKELY,
        summary,
        [*resident[:3], *empty[:2], *ok[:1], *scene.spinning[:2], *(s for s in scene.stacks[:2])],
        ranks=places(r for g in scene.engines for r in g.ranks.values()),
        mechanism=mechanism,
        shown=[f"{k.src}: {k.name} is resident"]
        + (["RAS: all ranks launched the same operations, so the stop is before the collective"] if ok else []),
        likely=["why that stream stopped is not in this evidence"] if one_side else [],
        decoys=[f"device {k.device} is busy because it waits; it is not the one at fault"] if one_side else [],
        next_checks=[
            "cuda-gdb on every device, twice: the same kernel and program counter?",
            "compute-sanitizer or another backend for that kernel",
        ],
    )


@rule(18, "NETWORK_OR_TRANSPORT", "peer-to-peer over PCIe is redirected, and the first collective never ends")
def redirected_p2p(scene: Scene) -> Finding | None:
    redirect = scene.events("acs_redirect")
    p2p = scene.events("nccl_p2p")
    if not redirect or not (p2p or scene.has("nccl_ready")):
        return None
    spin = scene.spinning
    return finding(
        "NETWORK_OR_TRANSPORT",
        SHOWN if p2p and spin else LIKELY,
        "NCCL uses PCIe peer-to-peer, and access control services redirect it: writes never arrive.",
        [*redirect[:1], *p2p[:1], *scene.events("nccl_ready")[:1], *spin[:2]],
        mechanism="with ACS ReqRedir+ peer writes go through the root complex and the IOMMU",
        shown=["ReqRedir+ on a bridge, P2P chosen as transport"]
        + (["both devices spin in the first collective"] if len(spin) > 1 else []),
        next_checks=["NCCL_P2P_DISABLE=1: does the first collective pass?", "lspci -vvv | grep ACSCtl on all bridges"],
        workaround="NCCL_P2P_DISABLE=1, or ACS off (BIOS, setpci)",
    )


@rule(19, "NETWORK_OR_TRANSPORT", "NCCL or the kernel reports a failed link")
def failed_link(scene: Scene) -> Finding | None:
    errors = scene.events("nccl_net_error")
    down = scene.events("link_down")
    errors = [e for e in errors if e.get("status") != 5]
    if not errors and not down:
        return None
    e = sorted([*errors, *down], key=lambda x: (x.time if x.time is not None else 0, x.src))[0]
    return finding(
        "NETWORK_OR_TRANSPORT",
        LIKELY,
        "The network transport failed: the first error in time is the cause, later ones its echo.",
        [e, *down[:2], *errors[:3]],
        mechanism="a completion with an error, or a link that went down; ranks that waited on it stop",
        shown=[f"{e.src}: {e.says()}"],
        next_checks=["ibstat / ethtool -S on both ends at that time", "ib_write_bw between the two hosts"],
    )
