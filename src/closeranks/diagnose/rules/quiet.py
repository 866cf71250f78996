# ruff: noqa: E501 - sentences stay in one piece, so that a search finds them
"""What logs and gauges alone can say: leaks, queues that never move, starts that never end, engines with nothing to do."""

import re
from itertools import pairwise

from closeranks.diagnose import health
from closeranks.diagnose.facts import Event, Fact, Metric
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places
from closeranks.diagnose.rules.fetches import LEASE_S, network_trigger
from closeranks.diagnose.scene import MANY, Scene
from closeranks.diagnose.verdict import LIKELY, Finding


@rule(25, "NOT_HUNG_SLOW_OR_CAPACITY", "a rank compiles while the others wait for it")
def compiling_rank(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        busy = engine.at("compile")
        if not busy or any(r.at.kind in ("gil", "nccl_internal", "blocking_io") for r in engine.ranks.values()):
            continue
        return finding(
            "NOT_HUNG_SLOW_OR_CAPACITY",
            LIKELY,
            f"{labels(busy)} compile{'s' if len(busy) == 1 else ''} kernels ({busy[0].at.where}){'; the others wait for it' if len(busy) < len(engine.ranks) else ''}.",
            [
                *(r.stacks[-1] for r in list(engine.ranks.values())[:4]),
                *scene.events("bar", "jit_session", "compile")[-2:],
            ],
            stage=43 if scene.has("helper_thread_dead") else None,  # a compilation ends, a dead thread stays dead
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            mechanism="a first use compiles; time-outs measure duration and not progress",
            next_checks=[
                "a second dump after a minute: does the compiler move, does its child (ptxas, ninja) use CPU?"
            ],
            workaround="compile ahead and keep the cache",
        )
    return None


@rule(37, "CRASH_LOOKS_LIKE_HANG", "the engine core reported its own death")
def engine_reported_dead(scene: Scene) -> Finding | None:
    dead = [e for e in scene.events("engine_dead", "engine_start_failed") if not _worked_after(scene, e)]
    if not dead:
        return None
    side = scene.role_of(dead[0])
    code = next((int(c) for e in dead if (c := e.num("code")) is not None and c), None)
    how = "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
    started = any(e.kind == "engine_start_failed" for e in dead)
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        LIKELY,
        f"The engine core{f' of {side}' if side else ''} died{how}{' while it started.' if started else '; requests that were open hang or fail.'}",
        [*dead[:3], *scene.events("rank_exception", "exception")[:2]],
        engine=side,
        mechanism="the API process outlives its engine",
        next_checks=["the first exception of the engine core or a worker before this line"]
        + (
            ["who sent the signal: dmesg for the kernel's out-of-memory killer, the supervisor, an operator"]
            if (code or 0) < 0
            else []
        ),
        workaround="restart",
    )


def _worked_after(scene: Scene, dead: Event) -> bool:
    """Whether the same engine made tokens after it was said to be dead; what its peer did says nothing."""
    side = scene.role_of(dead)
    after = [b for b in scene.gen_after(dead.time) if side == scene.role_of(b)]
    return any(dead.time is not None or (b.src.file == dead.src.file and b.src > dead.src) for b in after)


@rule(46, "KV_TRANSFER", "queues of transfers that never shrink while no token counter moves")
def transfer_gauges_stay(scene: Scene) -> Finding | None:
    stuck = next((s for s in _queues(scene) if len(s) > 1 and s[0][1] > 0 and _never_falls([n for _, n, _ in s])), None)
    tokens = [m for m in scene.moving_counters if "tokens" in m.name]
    if stuck is None or scene.frozen_counters:
        return None
    piled = scene.requests[0] == 0 and stuck[-1][1] >= MANY  # the last token may be long ago
    if tokens and not piled:
        return None
    flat = [m for m, d in scene.counter_deltas if d == 0 and "tokens_total" in m.name]
    (first, before, name), (last, now, _) = stuck[0], stuck[-1]
    grows = now > before
    trigger, lines = network_trigger(scene)
    return finding(
        "KV_TRANSFER",
        LIKELY,
        (f"{before:g}, then {now:g} requests are in {name}: it only grows" if grows else f"{now:g} requests stay in {name} from scrape to scrape")
        + (", and no token is produced." if flat else "."),
        [first, last, *flat[:2], *lines],
        engine=scene.role_of(last),
        trigger=trigger,
        mechanism="a hand-over that neither finishes nor fails; the loop lives",
        decoys=[
            "gauges are written by a running loop only: counters say whether it runs",
            "0 running and 0 waiting is not idle: the requests are in another queue",
        ],
        next_checks=["the peer's matching queue", "the helper threads of the transfer backend on every prefill rank"],
    )  # fmt: skip


def _queues(scene: Scene) -> list[list[tuple[Fact, float, str]]]:
    """Readings of each queue between engines, in order: of scrapes, and of `/v1/loads`."""
    pattern = re.compile(
        r"(?:decode_transfer|decode_prealloc|decode_host_receive|prefill_inflight|prefill_bootstrap)_queue_reqs"
        r"|decode_deferred_kv_release_reqs|num_requests_kv_fetch_by_stage"
    )
    seen: dict[object, list[tuple[Fact, float, str]]] = {}
    for m in scene.of(Metric):
        if pattern.search(m.name) and m.labels.get("stage") != "completed_waiting":
            name = m.name.split(":")[-1]
            seen.setdefault(_key(scene, m, name), []).append((m, m.value, name))
    for e in scene.events("load"):
        for key, n in e.data.items():
            if pattern.search(key) and isinstance(n, int | float):
                seen.setdefault((key, str(e.get("dp_rank", 0)), "0", "0", scene.role_of(e)), []).append(
                    (e, float(n), key)
                )
    return list(seen.values())


def _key(scene: Scene, m: Metric, name: str) -> object:
    """What a gauge is a reading of. SGLang's loads count the same queues, under the same name without `num_`."""
    if m.name.startswith("sglang:"):
        ranks = [m.labels.get(f"{kind}_rank", "0") for kind in ("dp", "pp", "tp")]
        return name.removeprefix("num_"), *ranks, scene.role_of(m)
    return scene.series(m)


def _never_falls(values: list[float]) -> bool:
    return all(a <= b for a, b in pairwise(values))


@rule(49, "REQUEST_LEAK", "memory or requests held though nobody asks for anything")
def held_by_nobody(scene: Scene) -> Finding | None:
    leaks = scene.events("memory_leak", "pool_mismatch")
    stats = [
        e
        for e in scene.events("vllm_stats")
        if e.num("running") == 0 and e.num("waiting") == 0 and (e.num("kv") or 0) >= 5
    ]
    aborted = scene.events("aborted")
    zombie = [
        e for e in scene.events("vllm_stats") if aborted and (e.num("running") or 0) > 0 and (e.num("gen") or 0) == 0
    ]
    held = (
        stats if len(stats) >= 2 and _alike(stats[-1], scene.batches[-1]) and not _may_be_fetched(scene, stats) else []
    )
    if not leaks and not held and len(zombie) < 2:
        return None
    words = (
        "The pool's own check found memory that nobody owns." if leaks
        else f"{held[-1].num('kv'):g} % of the KV cache is held with no request running or waiting." if held
        else "Requests stay in the running set after their abort and produce nothing."
    )  # fmt: skip
    return finding(
        "REQUEST_LEAK",
        LIKELY,
        words,
        [*leaks[:3], *held[-2:], *aborted[:1], *zombie[-2:]],
        mechanism="an abort or a failed transfer left its request's pages behind",
        next_checks=["aborts and transfer failures before the first such line", "does it grow with every abort?"],
        workaround="restart the engine",
    )


def _may_be_fetched(scene: Scene, held: list[Event]) -> bool:
    """Whether these are pages that a prefill engine keeps for decode: until they are fetched, or their lease ends."""
    prefill = scene.role_of(held[-1]) == "prefill" or scene.has("kv_expired", "kv_read_expired")
    times = [e.time for e in held if e.time is not None]
    return prefill and (not times or max(times) - min(times) < LEASE_S)


def _alike(a: Event, b: Event) -> bool:
    """Whether two lines are one, perhaps read from two copies of a log."""
    return a.kind == b.kind and a.time == b.time and a.data == b.data


@rule(59, "NOT_HUNG_SLOW_OR_CAPACITY", "all ranks inside the forward pass, and their threads sleep and wake")
def long_step(scene: Scene) -> Finding | None:
    if not scene.turning:
        return None
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        if not all(r.at.site == "forward" or r.at.kind in ("running", "kernel_call", "idle") for r in ranks):
            continue
        inside = [r for r in ranks if r.at.site == "forward"]
        if not inside:
            continue
        return finding(
            "NOT_HUNG_SLOW_OR_CAPACITY",
            LIKELY,
            f"{labels(inside)} {'is' if len(inside) == 1 else 'are'} inside one long step ({inside[0].at.where}) that goes on: main threads sleep and wake.",
            [*(r.stacks[-1] for r in inside[:2]), *scene.turning[:3]],
            engine=engine_name(engine),
            ranks=places(ranks),
            mechanism="the loop's counters are written between steps, so a long step looks frozen to them",
            decoys=["counters that stay and a failed probe: no step has ended yet"],
            next_checks=["a dump every few seconds: do layers change?", "the batch line when it ends"],
        )
    return None


@rule(66, "STARTUP", "start-up steps without an end")
def start_never_ends(scene: Scene) -> Finding | None:
    steps = scene.events("start_step")
    waits = scene.events("core_wait")
    bars = [e for e in scene.events("bar") if e.get("work") == "capture"][-1:]
    capture = [e for e in bars if (e.num("percent") or 0) < 100] if scene.has("shm_wait") else []
    if scene.has("started") or scene.batches or not (len(waits) >= 2 or steps or capture):
        return None
    if scene.has("teardown") and scene.has("rank_exception", "exception", "fatal"):  # it ended, by the launcher's hand
        return None
    last: dict[str, str] = {}
    for e in steps:
        if e.who:
            last[e.who.label] = str(e.get("step"))
    apart = len(set(last.values())) > 1
    return finding(
        "STARTUP",
        LIKELY,
        "The start does not end" + ("; ranks stand at different steps." if apart else "."),
        [*steps[-4:], *waits[-2:], *capture, *(scene.events("shm_wait")[-1:] if capture else ())],
        ranks=last,
        mechanism="one rank or process has not finished a step that the others wait for",
        next_checks=[
            "stacks of all ranks and of the launcher",
            "dmesg: was a process killed?",
            "is a weight or kernel cache still being built?",
        ],
    )


@rule(71, "HEALTHY_IDLE", "statistics of an engine that has nothing to do")
def nothing_to_do(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    if running != 0 or waiting != 0 or scene.engines or scene.failed_dumps or scene.spinning:
        return None
    trouble = (
        "exception fatal child_crashed worker_died engine_dead oom_kill rpc_timeout transfer_failed health_failed "
        "probe_failed watchdog exit_code no_handler no_worker leg_failed bar request_lost port_in_use container_killed shm_wait"
    )
    if scene.has(*trouble.split()) or scene.stalls or scene.hints or any(b.num("gen") for b in scene.batches[-2:]):
        return None
    if health.busy_beside(scene) or health.open_work(scene) or any((b.num("kv") or 0) >= 5 for b in scene.batches[-2:]):
        return None
    return finding(
        "HEALTHY_IDLE",
        LIKELY,
        "Nothing runs and nothing waits, and no line speaks of a fault.",
        [*scene.batches[-2:], *[m for m in scene.of(Metric) if "num_" in m.name][-2:]],
        mechanism="no work",
        next_checks=["did a request reach this engine at all? The router's log"],
    )
