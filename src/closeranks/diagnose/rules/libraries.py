# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Deadlocks below the program: the GIL, communication libraries, the transport."""

import re

from closeranks.diagnose.facts import Ras, Stack, Thread
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    finding,
    places,
)
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.stacks import position
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


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
            # Which thread holds the GIL is misread on Python 3.12, and as a rule waiting for it is a matter of a moment.
            again = sum(o.pid == s.pid and position(o.main).kind == "gil" for o in scene.stacks) > 1
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
                SHOWN if owns and (again or _all_wait(s, waiting)) and not _goes_on(scene) else LIKELY,
                f"Deadlock on Python's GIL: {what}.",
                [s],
                ranks={s.who.label if s.who else f"pid {s.pid}": at.where},
                mechanism=f"{len(waiting)} of {len(s.threads)} threads are in take_gil{f', entered through {inner}' if inner else ''}",
                trigger="a profiler was started" if "rofil" in " ".join(f.name for f in main.frames[:12]) else "",
                shown=[f"{len(waiting)} threads wait in take_gil, the main thread among them"],
                next_checks=["py-spy dump --native twice, 5 s apart: the same frames on all threads confirm it"],
                workaround="start the profiler without stacks (with_stack=0)" if "rofil" in inner else "",
            )
        callbacks = [t for t in s.threads if not t.main and any(f.name == "PyGILState_Ensure" for f in t.frames[:4])]
        inside = main.frames[0] if main.frames else None
        if main.gil and callbacks and inside and not inside.file.endswith(".py") and _blocked_native(inside.name):
            return finding(
                "GIL_DEADLOCK",
                LIKELY,
                f"The main thread holds the GIL while it waits in {at.where} ({inside.name}); a native thread wants the GIL to call back into Python.",
                [s],
                ranks={s.who.label if s.who else f"pid {s.pid}": at.where},
                mechanism="the wait is for work that the native thread can only finish with the GIL",
                next_checks=["py-spy dump --native twice, 5 s apart: the same frames on both threads confirm it"],
            )
    return _holder_in_native_call(scene)


def _all_wait(s: Stack, waiting: list[Thread]) -> bool:
    """Whether no thread of this dump could give the GIL up, its holder told by a Python that is read rightly."""
    return s.python not in ("", "3.12") and len(waiting) == len(s.threads) > 1


def _goes_on(scene: Scene) -> bool:
    return bool(scene.live) or (not scene.stalls and any((b.num("gen") or 0) > 0 for b in scene.batches[-1:]))


# take_gil is often inlined: its timed wait then stands right under the C function that wants the GIL back.
_WANTS_GIL = re.compile(
    r"^(take_gil|PyEval_\w+|PyGILState_Ensure|_?Py_X?DECREF|_ctypes_callproc|_call_function_pointer|_PyEval_\w+)$"
)


def _holder_in_native_call(scene: Scene) -> Finding | None:
    """A thread that wants the GIL for good, none that runs, and a main thread inside a native call: it holds the GIL."""
    if not scene.stalls:
        return None
    for s in scene.stacks:
        main = s.main
        if main is None or not main.frames or main.frames[0].file.endswith(".py") or any(t.gil for t in s.threads):
            continue
        native = [f.name for f in main.frames[:12] if not f.file.endswith(".py") and not f.name.startswith("0x")]
        if not native or any(
            n.startswith("PyThread_acquire_lock") or (_WANTS_GIL.match(n) and n == "take_gil") for n in native
        ):
            continue
        entered = [
            n
            for n in native
            if n in ("ffi_call", "PyCFuncPtr_call", "_ctypes_callproc") or "pybind11" in n or "cfunction" in n
        ]
        waiters = [t for t in s.threads if not t.main and _wants_gil([f.name for f in t.frames[:6]])]
        if waiters and entered:
            python = next((f for f in main.frames if f.file.endswith(".py")), None)
            return finding(
                "GIL_DEADLOCK",
                LIKELY,
                f"The main thread is blocked in a native call that has not released the GIL{f' ({python})' if python else ''}; {len(waiters)} other threads wait for the GIL.",
                [s, *scene.stalls[:2]],
                ranks={s.who.label if s.who else f"pid {s.pid}": str(python or main.frames[0])},
                mechanism="the call waits for something that only a thread without the GIL could do",
                shown=["no thread of the process runs, and some want the GIL"],
                next_checks=[
                    "the same native frames in a second dump",
                    "does the called library release the GIL (ctypes.PyDLL does not)?",
                ],
            )
    return None


def _wants_gil(names: list[str]) -> bool:
    named = [n for n in names if not n.startswith("0x")]
    return len(named) > 1 and named[0] in ("pthread_cond_timedwait", "take_gil") and bool(_WANTS_GIL.match(named[1]))


def _blocked_native(name: str) -> bool:
    return bool(
        re.search(
            r"ynchronize|^cu(?:da)?[A-Z]|futex|pthread_|cond_wait|sem_wait|nccl|poll|read|__lll|lock|wait|sched_yield",
            name,
        )
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
    if r.few_are_ahead:
        return _few_ahead(r, frozen, few, top)
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


def _few_ahead(r: Ras, frozen: list[Ras], few: str, top: int) -> Finding:
    """RAS lists the few, who here have launched more than the rest: they are the ones that wait."""
    rest = sum(n for n, k in r.counts if k < top)
    return finding(
        "MISSING_PARTICIPANT",
        LIKELY,
        f"{rest} ranks have not launched {r.op or 'operation'} #{top}, the same in both snapshots; {few} {'has' if len(r.minority) == 1 else 'have'} and wait{'s' if len(r.minority) == 1 else ''} for them.",
        frozen[:3],
        ranks={f"rank {n}": f"launched {r.op} #{top}" for n in r.minority[:16]},
        ahead=[f"rank {n}" for n in r.minority[:16]],
        mechanism="the many are held up before this operation: by the host, or by another communicator",
        shown=["two RAS snapshots with equal counts: not the transient mismatch of a live job"],
        decoys=[f"{few}: listed because they are few, not because they are late"],
        next_checks=["py-spy dump of some of the ranks that are not listed", "the other communicators of the report"],
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


@rule(39, "NETWORK_OR_TRANSPORT", "NCCL could not open a network device, and devices or ranks wait")
def device_not_opened(scene: Scene) -> Finding | None:
    unopened = scene.events("nccl_device_unopened")
    if not unopened or not (scene.spinning or scene.stalls):
        return None
    ignored = scene.env("NCCL_IGNORE_NET_MISMATCH")
    return finding(
        "NETWORK_OR_TRANSPORT",
        LIKELY,
        "NCCL could not open one of its network devices; channels that the peer built on it have no other end.",
        [*unopened[:3], ignored, *scene.spinning[:2], *scene.stalls[:1]],
        mechanism="ranks see different sets of devices; initialisation passes and the first transfer over the missing one waits for ever",
        shown=[f"{unopened[0].src}: a device was not opened"],
        next_checks=[
            "ibv_devinfo on both hosts, in the containers",
            "NCCL_IB_HCA restricted to devices that both have",
        ],
        workaround="the same devices in both containers" + ("; unset NCCL_IGNORE_NET_MISMATCH" if ignored else ""),
    )


@rule(19, "NETWORK_OR_TRANSPORT", "NCCL or the kernel reports a failed link")
def failed_link(scene: Scene) -> Finding | None:
    errors = scene.events("nccl_net_error")
    down = scene.events("link_down")
    errors = [e for e in errors if e.get("status") != 5]
    if not errors and not down:
        return None
    now = scene.lasting([*errors, *down])
    errors, down = [e for e in now if e.kind == "nccl_net_error"], [e for e in now if e.kind == "link_down"]
    e = sorted(now, key=lambda x: (x.time if x.time is not None else 0, x.src))[0]
    return finding(
        "NETWORK_OR_TRANSPORT",
        LIKELY,
        "The network transport failed: the first error in time is the cause, later ones its echo.",
        [e, *down[:2], *errors[:3]],
        mechanism="a completion with an error, or a link that went down; ranks that waited on it stop",
        shown=[f"{e.src}: {e.says()}"],
        next_checks=["ibstat / ethtool -S on both ends at that time", "ib_write_bw between the two hosts"],
    )
