# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Devices that spin, and hosts that are blocked behind them."""

import re

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    DEVICE,
    WAITS,
    engine_name,
    finding,
    labels,
    places,
)
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding


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
    # A kernel that works is resident, too, and waits in barriers: a second sign must say that it does so for long. A host
    # that waits for its device is none: a live one does so in every step.
    held = (scene.ras or any(scene.low_power(g) for g in scene.spinning) or scene.stalls) and not scene.live
    if one_side:
        other = f"device {empty[0].device}" if empty[0].device else "another device"
        summary = f"Device {k.device} polls in {k.name} for a peer; {other} runs no kernel: its stream stopped before it got there."
        mechanism = "the idle device is the laggard; the spinning one only waits for it"
    else:
        summary = f"A kernel never ends: {k.name} on device {k.device}{', spinning on a barrier in shared memory' if spin else ''}."
        mechanism = "the kernel waits for an arrival that does not come; the host waits for the kernel"
    return finding(
        "DEVICE_HANG",
        SHOWN if held and (spin or (one_side and len(scene.engines) <= 1)) else LIKELY,
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


@rule(
    24,
    "HOST_DEVICE_INTERLOCK UNDETERMINED",
    "a driver call that needs a quiet device (module load, free, alloc) does not return",
)
def driver_call_blocked(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        inside = engine.at("module_load", "implicit_sync")
        own = scene.only(engine)
        if not inside or any("tokens" in m.name for m in own.moving_counters):
            continue  # an engine that works loads modules and frees memory, too
        others = [r for r in engine.ranks.values() if r not in inside]
        spin = scene.spinning
        # One that rests among those that spin may be a rank's own; more than there are ranks are not in use.
        rest = scene.resting if len(spin) + len(scene.resting) <= len(engine.ranks) else []
        idle_spin = [g for g in spin if scene.low_power(g) is not False]
        op = inside[0].at.op
        evidence = [*(r.stacks[-1] for r in [*inside[:2], *others[:2]]), *spin[:2], *rest[:2]]
        peers_wait = [r for r in others if r.at.kind in (*WAITS, *DEVICE, "p2p")]
        waiters = f"; {labels(peers_wait)} wait{'s' if len(peers_wait) == 1 else ''} for it" if peers_wait else ""
        if spin and (peers_wait or not others):
            return finding(
                "HOST_DEVICE_INTERLOCK",
                SHOWN if peers_wait and rest and idle_spin and not own.live else LIKELY,
                f"{labels(inside)}: the host is blocked in {op} behind a kernel that spins on its own device{waiters}.",
                evidence,
                engine=engine_name(engine),
                ranks=places(engine.ranks.values()),
                mechanism=f"{op} needs the device to come to rest; the spinning kernel waits for a peer whose data this very host would have to produce",
                shown=[f"GPU {spin[0].index} is fully busy while its host sits in {op}"],
                likely=["which posted operation spins"],
                decoys=["a slow compilation: the device would be at rest"],
                next_checks=["cuda-gdb 'info cuda kernels' on that device: an unmatched receive?"],
                workaround="load all modules before serving (warm up every kernel; CUDA_MODULE_LOADING=EAGER)",
            )
        return finding(
            "UNDETERMINED",
            UNDETERMINED,
            f"{labels(inside)} sit{'s' if len(inside) == 1 else ''} in {op}: the host is blocked, and stacks cannot say by what.",
            [*evidence, *scene.stalls[:1]],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            likely=[
                "a kernel spins in front of the driver call (an interlock), or the first use of a kernel is merely slow"
            ],
            next_checks=[
                "nvidia-smi utilisation and power per GPU: 100 % at low power is a spinning kernel",
                "cuda-gdb 'info cuda kernels'",
                "a second dump after 60 s",
            ],
        )
    return None


@rule(50, "DEVICE_HANG", "all ranks wait for their device, and the devices spin")
def devices_spin(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        waiting = engine.at(*DEVICE)
        ranks = list(engine.ranks.values())
        if not waiting or len(waiting) < len(ranks):
            continue
        launch = [r for r in waiting if r.at.kind == "device_launch"]
        spin, rest = scene.spinning, scene.resting
        low = [g for g in spin if scene.low_power(g)]
        if not (spin and (low or rest or len(spin) == len(scene.gpus))) and not (
            launch and len(launch) == len(ranks) > 1
        ):
            continue
        if scene.gpus and not spin:
            continue
        different = len({r.at.path[:2] for r in waiting}) > 1
        idle_gpu = f"; GPU {rest[0].index} is idle and may be the laggard" if rest and len(rest) < len(spin) + 1 else ""
        return finding(
            "DEVICE_HANG",
            LIKELY,
            f"{labels(waiting)}: every host waits for its device ({waiting[0].at.where}){f', {len(spin)} GPUs busy at low power' if spin else ''}{idle_gpu}.",
            [*(r.stacks[-1] for r in waiting[:4]), *spin[:2], *rest[:1], *scene.stalls[:1]],
            engine=engine_name(engine),
            ranks=places(ranks),
            missing=engine.missing,
            mechanism="hosts freeze at whatever call comes next behind a full queue; the operations they name are victims"
            if different or launch
            else "the device does not finish what was launched",
            shown=["no host waits in a collective"]
            + ([f"GPU {g.index}: {g.util:g} % at {g.power:g} W" for g in low[:2] if g.power is not None]),
            likely=[
                "a kernel that spins, or a collective that was launched and not joined: host stacks cannot say which"
            ],
            decoys=["different operations on different ranks are no desync here: none is a collective"]
            if different
            else [],
            next_checks=[
                "ncclras twice, a minute apart",
                "cuda-gdb 'info cuda kernels' on each device",
                "NCCL watchdog or recorder",
            ],
        )
    return None


@rule(51, "UNDETERMINED", "devices spin, and there is no stack to say what for")
def spin_without_stacks(scene: Scene) -> Finding | None:
    rest = scene.resting
    all_but_one = len(rest) == 1 and len(scene.spinning) >= 2 and len(scene.spinning) + 1 == len(scene.gpus)
    if scene.engines or not scene.spinning or not (scene.failed_dumps or scene.stalls or scene.hints):
        return None
    if len(scene.spinning) < len(scene.gpus) and not all_but_one:
        return None
    pools: dict[str, Event] = {}
    for p in scene.events("pool"):
        if p.who:
            pools[p.who.label] = p
    values = {p.get("available") for p in pools.values()}
    odd = []
    if len(values) > 1 and len(pools) > 2:
        common = max(values, key=lambda v: sum(p.get("available") == v for p in pools.values()))
        odd = [
            f"{label}: {p.get('available')} available against {common}"
            for label, p in pools.items()
            if p.get("available") != common
        ]
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        (
            f"All devices but GPU {rest[0].index} are busy, which is idle and so may be the laggard; there is no stack."
            if all_but_one
            else "All devices are busy at low power and no stack could be taken."
        )
        + (f" Ranks' pools differ: {'; '.join(odd[:3])}." if odd else ""),
        [
            *scene.failed_dumps[:3],
            *scene.spinning[:2],
            *(p for label, p in pools.items() if any(o.startswith(label) for o in odd)),
            *scene.stalls[:1],
        ],
        mechanism="undetermined: every device waits",
        shown=["dumps failed: no evidence about these ranks"] if scene.failed_dumps else [],
        likely=["rank state had diverged already: the pools of ranks that do the same work must be equal"]
        if odd
        else [],
        decoys=[
            "an almost full pool with most of it evictable is not exhausted",
            "the length of the request that runs",
        ],
        next_checks=[
            "py-spy needs SYS_PTRACE: add the capability and dump all ranks",
            "ncclras twice; cuda-gdb 'info cuda kernels'",
        ],
    )


# Faults of the device or its links, not of a program: uncorrectable memory, NVLink, off the bus, GSP.
_FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 94, 95, 119, 120, 121, 140, *range(144, 151)})


@rule(27, "DEVICE_HANG", "the driver reported a broken GPU, and hosts wait for their devices")
def broken_device(scene: Scene) -> Finding | None:
    faults = [e for e in scene.events("xid") if e.get("xid") in _FATAL_XIDS]
    late = [c for c in scene.collectives if c.state == "timeout"]
    stands = late or scene.stalls or scene.events("shm_wait")[1:]
    if faults and stands and not scene.engines:
        return finding(
            "DEVICE_HANG",
            LIKELY,
            f"The driver reported Xid {faults[0].get('xid')}, and {'collectives timed out' if late else 'the engine stands'}: a GPU or its link failed.",
            [*faults[:3], *stands[:3]],
            ranks={c.who.label: f"{c.op} #{c.seq}" for c in late[:64] if c.who},
            trigger=f"Xid {faults[0].get('xid')}",
            mechanism="work on the failed device never ends, and the collectives that need it do not either",
            decoys=["the ranks that time out are the ones that wait"],
            next_checks=[
                "the time of the Xid against the start of the time-out",
                "which rank ran on the device that the driver names",
            ],
            workaround="drain the node, reset or replace the device",
        )
    for engine in scene.engines:
        waits = engine.at(*DEVICE)
        if not faults or not waits or len(waits) < len(engine.ranks) or any(r.moving for r in waits):
            continue
        return finding(
            "DEVICE_HANG",
            LIKELY,
            f"The driver reported Xid {faults[0].get('xid')} and {labels(waits)} wait for their devices: a GPU or its link failed.",
            [*faults[:3], *(r.stacks[-1] for r in waits[:3])],
            engine=engine_name(engine),
            ranks=places(waits),
            trigger=f"Xid {faults[0].get('xid')}",
            mechanism="work on the failed device never ends; its peers wait inside their own kernels",
            decoys=["equal host frames say nothing about which device failed"],
            next_checks=[
                "the time of the Xid against the last batch line",
                "nvidia-smi -q of the device that the driver names",
            ],
            workaround="drain the node, reset or replace the device",
        )
    return None
