# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Devices, queues and loops that turn without effect; waits that are alike on all ranks; nothing wrong, or slow."""

import re
from itertools import pairwise

from closeranks.diagnose.clock import time_of_day
from closeranks.diagnose.facts import Event, Metric
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places, stall_words
from closeranks.diagnose.scene import EngineView, Scene
from closeranks.diagnose.stacks import position
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding

_DEVICE = ("device_wait", "device_launch", "kernel_call", "collective_device", "p2p_device")


@rule(50, "DEVICE_HANG", "all ranks wait for their device, and the devices spin")
def devices_spin(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        waiting = engine.at(*_DEVICE)
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
    if (
        scene.engines
        or not scene.spinning
        or len(scene.spinning) < len(scene.gpus)
        or not (scene.failed_dumps or scene.stalls)
    ):
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
        "All devices are busy at low power and no stack could be taken."
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


@rule(52, "IPC_OR_EXTERNAL_LOST", "everyone waits for a message while requests are open")
def lost_message(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        if any(r.moving for r in ranks):
            continue
        cores = [r for r in ranks if r.who.kind == "engine_core"]
        workers = [r for r in ranks if r.who.kind == "worker"]
        core_waits = [r for r in cores if r.at.kind == "wait_workers"]
        idle_workers = workers and all(r.at.kind == "idle" for r in workers)
        if core_waits and idle_workers:
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                LIKELY,
                f"{core_waits[0].label} waits for an answer of workers that wait for work: a message between them was lost.",
                [*(r.stacks[-1] for r in [*core_waits, *workers[:2]]), *_gauges(scene)],
                engine=engine_name(engine),
                ranks=places(ranks),
                mechanism="mutual wait: no side has anything to do until the other speaks",
                shown=[f"{running:g} requests running, all workers idle"] if running > 0 else [],
                decoys=["idle-looking workers are not healthy while requests run"],
                next_checks=["a second dump after 10 s", "the connector's or queue's own log"],
                workaround="restart",
            )
        external = [
            r
            for r in ranks
            if any(
                re.search(r"lmcache|mooncake|nixl|connector|etcd|kv_transfer", f.file)
                for t in r.stacks[-1].threads
                for f in t.frames[:6]
            )
        ]
        all_idle = ranks and all(
            r.at.kind == "idle" or (r.at.op, r.at.site) == ("broadcast", "loop_head") for r in ranks
        )
        if all_idle and (running > 0 or waiting > 0) and not scene.gen_after(None):
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                LIKELY,
                f"All ranks wait for work while {max(running, 0):g} requests run and {max(waiting, 0):g} wait: a request is parked on a message that does not come.",
                [*(r.stacks[-1] for r in [*ranks[:2], *external[:1]]), *_gauges(scene), *scene.batches[-1:]],
                engine=engine_name(engine),
                ranks=places(ranks),
                mechanism="the request waits for a completion from outside the ranks"
                + (": a KV connector is attached" if external else ""),
                decoys=["idle stacks with open requests are not health"],
                next_checks=[
                    "which request waits and for what: the scheduler's queue by state",
                    "is the external store or peer alive?",
                ],
            )
    return None


def _gauges(scene: Scene) -> list[Metric]:
    return [m for m in scene.of(Metric) if re.search(r"running|waiting|queue_reqs", m.name)][-3:]


@rule(53, "UNSCHEDULABLE_REQUEST", "a request that can never fit waits at the head of the queue")
def never_fits(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    if not (running == 0 and waiting > 0):
        return None
    size = next((_int(e.get("tokens")) for e in scene.events("kv_size")), None)
    longest = next((_int(e.get("tokens")) for e in scene.events("max_len", "max_concurrency")), None)
    usage = scene.gauge(r"(?:cache_usage_perc|token_usage)$")
    stats = scene.batches[-1] if scene.batches else None
    kv = usage if usage is not None else (stats.num("kv") if stats else None)
    if size is None or longest is None or size >= longest or (kv is not None and kv > 0.05):
        return None
    odd = [e for e in scene.events("max_concurrency") if (e.num("times") or 0) > 1]
    return finding(
        "UNSCHEDULABLE_REQUEST",
        SHOWN if kv is not None else LIKELY,
        f"The request at the head of the queue can never fit: the KV cache holds {size} tokens, a request may have {longest}. Nothing runs, nothing is used.",
        [
            *scene.events("kv_size")[:1],
            *scene.events("max_len", "max_concurrency")[:2],
            *([stats] if stats else []),
            *_gauges(scene),
        ],
        mechanism="admission asks for room for the whole sequence; that is never there, and the queue is in order",
        shown=["0 running, requests waiting, an empty cache", "the cache is smaller than the longest allowed request"],
        decoys=["the printed concurrency above 1 contradicts the cache size"] if odd else [],
        next_checks=["length of the waiting request", "cancel it: does the server recover?"],
        workaround="--max-model-len at most the cache size; cancel the request",
    )


def _int(v: object) -> int | None:
    text = str(v).replace(",", "")
    return int(text) if text.isdigit() else None


@rule(54, "SCHEDULER_LIVELOCK", "the loop turns, nothing runs, requests wait and room is free")
def admits_nothing(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    usage = scene.gauge(r"token_usage$|cache_usage_perc$")
    iters = [e for e in scene.events("trt_iter") if e.get("scheduled") == 0]
    active = [e for e in scene.events("trt_active") if (e.num("active") or 0) > 0]
    if len(iters) >= 2 and active and not scene.has("ctx_transfer_timeout"):
        return finding(
            "SCHEDULER_LIVELOCK",
            LIKELY,
            f"Iterations go on with nothing scheduled although {active[-1].get('active')} requests are active.",
            [*iters[:2], *active[:1]],
            mechanism="admission never succeeds",
            next_checks=["what holds the pool: transfers, retracted requests?"],
        )
    if not (running == 0 and waiting > 0):
        return None
    turning = [
        r
        for e in scene.engines
        for r in e.ranks.values()
        if r.moving
        or (
            r.at.kind == "running"
            and r.at.active
            and re.search(
                r"get_new_batch|get_next_batch|schedule|get_num_allocatable|_get_new_batch|process_decode_queue",
                " ".join(r.at.path),
            )
        )
    ]
    if not turning or (usage is not None and usage > 0.5):
        return None
    limit, stages = (
        scene.flag_number("max-running-requests"),
        scene.flag_number("pp-size", "pp", "pipeline-parallel-size"),
    )
    per_stage = (
        f"--max-running-requests {limit} over {stages} stages leaves {limit // stages} per micro-batch"
        if limit and stages and stages > 1
        else ""
    )
    return finding(
        "SCHEDULER_LIVELOCK",
        LIKELY if not any(r.moving for r in turning) or usage is None else SHOWN,
        f"The scheduler turns and admits nothing: 0 running, {waiting:g} waiting{f', {usage:.0%} of the pool used' if usage is not None else ''}.",
        [
            *(s for r in turning[:1] for s in r.stacks[:2]),
            *_gauges(scene),
            scene.flag("max-running-requests"),
            scene.flag("pp-size", "chunked-prefill-size"),
        ],
        ranks=places(turning),
        mechanism="a condition of admission is false on every turn" + (f": {per_stage}" if per_stage else ""),
        shown=["two dumps differ: the loop is not blocked"] if any(r.moving for r in turning) else [],
        decoys=["looks like an idle spin; a waiting request with room free is the difference"],
        next_checks=["the admission arithmetic for the head of the queue"],
        workaround="a larger --max-running-requests (at least 2 × stages)" if per_stage else "",
    )


@rule(
    56,
    "FRONTEND_OR_CPU_BOUND",
    "the API process, tokenizer, detokenizer or a compiler of grammars holds things up; the engine is well",
)
def frontend_blocked(scene: Scene) -> Finding | None:
    bars = [e for e in scene.events("bar") if e.get("work") == "grammar"]
    if bars:
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            SHOWN,
            f"A schema or grammar is being compiled on the CPU ({bars[-1].get('percent')} %); requests wait for it.",
            [*bars[:1], *bars[-1:], *scene.batches[:2]],
            mechanism="compilation of a complex schema runs before the request is counted as running or waiting",
            shown=["a progress bar of the compilation"],
            decoys=["0 running and 0 pending looks idle"],
            next_checks=["does the bar move?"],
            workaround="a backend that compiles lazily (xgrammar); a simpler schema",
        )
    for kind in ("api", "detokenizer", "dp_controller", "router"):
        for s in scene.processes_by_kind.get(kind, ()):
            at = position(s.main)
            if at.kind not in ("host_work", "running", "blocking_io", "compile") or (
                at.kind == "running" and not at.active
            ):
                continue
            t = min((e.time for e in scene.events("health_failed", "probe_failed") if e.time is not None), default=None)
            progress = scene.gen_after(None)
            if at.kind == "running" and not progress:
                continue
            return finding(
                "FRONTEND_OR_CPU_BOUND",
                SHOWN if at.kind == "host_work" and len(progress) >= 2 else LIKELY,
                f"The {kind} process is busy in {at.where}{' and holds the GIL' if s.main and s.main.gil else ''}; the engine {'decodes on' if progress else 'is not at fault'}.",
                [s, *progress[-2:], *scene.events("probe_failed", "health_failed", "container_killed")[:2]],
                ranks={kind: at.where},
                mechanism="synchronous work in an event loop: nothing else of that process is served meanwhile, probes included",
                shown=[f"{len(progress)} batch lines with tokens{' during the failures' if t is not None else ''}"]
                if progress
                else [],
                decoys=["a failed probe is no engine fault here"],
                next_checks=["a second dump: the same frame?"],
                workaround="a longer liveness time-out; more tokenizer workers (--tokenizer-worker-num)",
            )
    failed = [e for e in scene.events("health_failed") if e.get("tic") and e.time is not None]
    for e in failed:
        tic = time_of_day(str(e.get("tic")))
        if tic is not None and e.time is not None and 90 < (e.time % 86400) - tic < 43200 and scene.gen_after(None):
            return finding(
                "FRONTEND_OR_CPU_BOUND",
                LIKELY,
                f"The API's event loop was frozen: a 20 s check was reported {(e.time % 86400) - tic:.0f} s after it began.",
                [e, *scene.batches[-2:]],
                mechanism="synchronous work in the event loop",
                next_checks=["py-spy dump of the API process while it happens"],
            )
    return None


@rule(58, "HEALTHY_WATCHDOG_FALSE_POSITIVE", "a watchdog or probe complains while tokens flow")
def false_alarm(scene: Scene) -> Finding | None:
    alarms = [e for e in scene.events("watchdog", "health_failed", "probe_failed") if e.time is not None]
    if not alarms or scene.has("child_crashed", "exit_code", "container_killed", "orphan_output", "teardown"):
        return None
    last = max(e.time or 0.0 for e in alarms)
    after = scene.gen_after(last)
    if not after and not (len(alarms) > 1 and scene.gen_after(sorted(e.time or 0.0 for e in alarms)[-2])):
        return None
    parts = {str(e.get("part", "")).strip() for e in alarms if e.kind == "watchdog"} - {""}
    rank_alarm = any("cheduler" in p for p in parts) or (not parts and any(e.kind == "watchdog" for e in alarms))
    if rank_alarm and any(e.at("collective", "device_wait") for e in scene.engines):
        return None
    times = sorted(e.time for e in alarms if e.time is not None)
    gaps = {round(b - a) for a, b in pairwise(times)}
    periodic = len(times) > 2 and len(gaps) == 1
    return finding(
        "HEALTHY_WATCHDOG_FALSE_POSITIVE",
        SHOWN if periodic and len(after) + len(scene.batches) >= 3 and not rank_alarm else LIKELY,
        f"{', '.join(sorted(parts)) or 'A probe'} complains{f' every {gaps.pop()} s' if periodic else ''} while tokens flow: a false alarm.",
        [*alarms[:3], *after[-2:], *scene.stacks[:1]],
        mechanism="the watched loop is parked in a receive and never feeds its watchdog"
        if parts
        else "the probe waits in line behind real work",
        shown=[f"{len(scene.gen_after(times[0]))} batch lines with tokens after the first alarm"],
        decoys=["the process that is named only waits for work"],
        next_checks=["do requests complete?"],
        workaround="unset --soft-watchdog-timeout" if parts and not rank_alarm else "a longer probe time-out",
    )


@rule(60, "SYMMETRIC_WAIT UNDETERMINED", "all ranks of an engine wait in the same place")
def same_place(scene: Scene) -> list[Finding]:
    out = []
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        kinds = {r.at.kind for r in ranks}
        if len(ranks) < 2 or len(kinds) > 1 or any(r.moving for r in ranks) or scene.moving_counters:
            continue
        kind = next(iter(kinds))
        if kind not in ("collective", "p2p", "lock", *_DEVICE) or (kind == "lock" and not scene.stalls):
            continue
        at = ranks[0].at
        if len({(r.at.op, r.at.site) for r in ranks}) > 1:
            continue
        if (at.op, at.site) == ("broadcast", "loop_head"):
            continue
        device = kind in _DEVICE
        known_missing = engine.missing
        if known_missing and not device:
            out.append(_some_missing(scene, engine))
            continue
        cross = scene.flag_number("nnodes")
        out.append(
            finding(
                "SYMMETRIC_WAIT",
                LIKELY,
                f"{(engine.name or 'The') + ' engine'}: all {len(ranks)} ranks wait at the same place, {at.where}: no desync among them"
                + (", each for its own device." if device else "."),
                [*(r.stacks[-1] for r in ranks[:3]), *scene.stalls[:2], *scene.batches[-1:]],
                engine=engine_name(engine),
                ranks=places(ranks),
                missing=known_missing,
                mechanism="undetermined: host stacks cannot say which device operation is stuck"
                if device
                else "undetermined: a transport that does not deliver, ranks offset by one round, or a partner outside these ranks",
                shown=["same frames on all ranks", *stall_words(scene)[:1]],
                decoys=[
                    *(
                        [
                            "the frame that is named only waits for earlier device work: a copy is not blocked by a full memory"
                        ]
                        if device
                        else []
                    ),
                    *(["an answering /health"] if scene.has("http") else []),
                ],
                next_checks=(
                    [
                        "nvidia-smi utilisation and power per GPU",
                        "NCCL watchdog or ncclras twice",
                        "cuda-gdb 'info cuda kernels'",
                    ]
                    if device
                    else [
                        "is the interface of this group right on every node (GLOO_SOCKET_IFNAME)?"
                        if cross or len(ranks) > 8
                        else "is a rank outside this dump a member of the group?",
                        "context switches of all main threads over 2 s",
                    ]
                ),
                workaround="",
            )
        )
    return out


def _some_missing(scene: Scene, engine: EngineView) -> Finding:
    ranks = list(engine.ranks.values())
    return Finding(
        cls="UNDETERMINED",
        certainty=UNDETERMINED,
        stage=62,
        summary=f"{labels(ranks)} wait at the same place ({ranks[0].at.where}); there is no dump of {', '.join(engine.missing[:8])}, who may be the one they wait for.",
        engine=engine_name(engine),
        ranks=places(ranks),
        missing=engine.missing,
        next_checks=[f"dump {', '.join(engine.missing[:8])}: alive, and where?"],
        evidence=[],
    )


@rule(70, "HEALTHY_IDLE", "loops poll for work and there is none")
def idle(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    ranks = [r for e in scene.engines for r in e.ranks.values()]
    rest = [r for r in ranks if r.at.kind == "idle"]
    waits = [r for r in ranks if (r.at.op, r.at.site) == ("broadcast", "loop_head")]
    rows = [
        e
        for e in scene.events("top_row")
        if e.get("function") in ("sched_yield", "acquire_read", "recv_requests", "recv_pyobj", "poll", "dequeue")
    ]
    top = bool(rows) and (rows[0].num("own") or 0) >= 10
    looks = (bool(rest) and len(rest) + len(waits) == len(ranks)) or (not ranks and top)
    if not looks or running > 0 or waiting > 0 or any(b.num("gen") for b in scene.batches[-1:]):
        return None
    other = [p for p in _unfinished(scene) if p]
    if other:
        return None
    empty = running == 0 and waiting == 0
    return finding(
        "HEALTHY_IDLE",
        SHOWN if empty and not scene.stalls else LIKELY,
        f"Idle: {labels(rest) if rest else 'the loop'} poll{'s' if len(rest) <= 1 else ''} for work"
        + (", nothing runs and nothing waits." if empty else "; whether requests are open is not in the evidence."),
        [*(r.stacks[-1] for r in [*rest[:2], *waits[:1]]), *rows[:2], *_gauges(scene), *scene.batches[-1:]],
        ranks=places(ranks),
        mechanism="busy polling by design: 100 % CPU is expected"
        if top or any(r.at.active for r in rest)
        else "waiting for the next request",
        decoys=["broadcast on the other ranks waits for the entry rank's next list: the idle picture, not a desync"]
        if waits
        else [],
        next_checks=[]
        if empty
        else ["running and waiting requests (/metrics, /v1/loads): with open requests this picture is a lost message"],
        workaround="--sleep-on-idle" if any(e.family == "sglang" for e in scene.engines) else "",
    )


def _unfinished(scene: Scene) -> list[Event]:
    return scene.events("worker_died", "engine_dead", "rpc_timeout", "child_crashed", "oom_kill")


@rule(72, "NOT_HUNG_SLOW_OR_CAPACITY", "tokens flow")
def tokens_flow(scene: Scene) -> Finding | None:
    gen = scene.gen_after(None)
    chunks = scene.events("chunk")
    blank = [c for c in chunks if c.get("blank")]
    if scene.moving_counters:
        gen = gen or []
        return finding(
            "NOT_HUNG_SLOW_OR_CAPACITY",
            LIKELY,
            "Token counters grow between the scrapes: the engine works.",
            [*scene.moving_counters[:3], *gen[-2:]],
            shown=["a counter that grows is progress"],
            next_checks=["which request or client does not get its answer?"],
        )
    if chunks and len(blank) >= 3 and len(blank) >= len(chunks) * 2 // 3:
        return finding(
            "NOT_HUNG_SLOW_OR_CAPACITY",
            SHOWN if gen else LIKELY,
            f"Tokens flow, and they are blank: {len(blank)} of {len(chunks)} chunks hold nothing but white space.",
            [*gen[-2:], *blank[:2], *chunks[-1:]],
            mechanism="the grammar allows white space without end and masks the end of the text",
            shown=["chunks arrive"],
            next_checks=["finish reason: length?"],
            workaround="forbid free white space in the grammar (disable_any_whitespace)",
        )
    last = scene.batches[-1] if scene.batches else None
    if len(gen) < 2 or last is None or (last.num("gen") or 0) <= 0:
        return None
    if scene.stalls or scene.engines or scene.failed_dumps:
        return None
    queue = last.num("queue") or last.num("waiting") or 0
    retracts = scene.events("retract")
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        LIKELY,
        f"Tokens flow up to the last batch line ({last.num('gen'):g} token/s, {last.num('running') or 0:g} running, {queue:g} waiting)"
        + (", with retractions: the pool is too small for the load." if retracts else "."),
        [*gen[-3:], *retracts[:2]],
        mechanism="load or a slow request, not a standstill",
        next_checks=["which request does not finish?", "two scrapes of the counters a minute apart"],
    )
