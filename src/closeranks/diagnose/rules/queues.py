# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Messages that were lost, and requests that are never admitted."""

import re

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    engine_name,
    finding,
    gauges,
    places,
)
from closeranks.diagnose.rules.dead import stays_stopped
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.stacks import compiles_grammar
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(52, "IPC_OR_EXTERNAL_LOST", "everyone waits for a message while requests are open")
def lost_message(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        if any(r.moving for r in ranks) or any(stays_stopped(scene, s.pid) for r in ranks for s in r.stacks[-1:]):
            continue
        own = scene.only(engine)
        if own.paused:
            continue
        running, waiting = own.requests
        cores = [r for r in ranks if r.who.kind == "engine_core"]
        workers = [r for r in ranks if r.who.kind == "worker"]
        core_waits = [r for r in cores if r.at.kind == "wait_workers"]
        idle_workers = workers and all(r.at.kind == "idle" for r in workers)
        if core_waits and idle_workers and not own.turning:  # a loop that polls for transfers shows the same frames
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                LIKELY,
                f"{core_waits[0].label} waits for an answer of workers that wait for work: a message between them was lost.",
                [*(r.stacks[-1] for r in [*core_waits, *workers[:2]]), *gauges(scene)],
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
        if all_idle and any(compiles_grammar(r.stacks[-1]) for r in ranks):
            continue  # the request waits for its grammar, not for a message
        if all_idle and (running > 0 or waiting > 0) and not scene.gen_after(None):
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                LIKELY,
                f"All ranks wait for work while {max(running, 0):g} requests run and {max(waiting, 0):g} wait: a request is parked on a message that does not come.",
                [*(r.stacks[-1] for r in [*ranks[:2], *external[:1]]), *gauges(scene), *scene.batches[-1:]],
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


@rule(
    35,
    "IPC_OR_EXTERNAL_LOST",
    "a thread that passes messages died, or a process lost its lease in the store of discovery",
)
def messenger_lost(scene: Scene) -> Finding | None:
    thread, lease = scene.events("socket_thread_dead"), scene.events("lease_lost")
    if not thread and not lease:
        return None
    what = (
        f"The thread {thread[0].get('thread')} of the engine core died"
        if thread
        else "A lease in the store of discovery was lost"
    )
    return finding(
        "IPC_OR_EXTERNAL_LOST",
        LIKELY,
        f"{what}: {'no request reaches the engine any more' if thread else 'whoever looks for this instance no longer finds it'}, and nothing else fails.",
        [*thread[:2], *lease[:2], *scene.events("exception", "no_worker")[:2], *scene.batches[-1:]],
        mechanism="an exception ended the thread, and nothing watches it"
        if thread
        else "the store was out of reach for longer than the lease",
        decoys=["0 running and 0 waiting is not idle here: requests no longer arrive"] if thread else [],
        next_checks=["the traceback at that line"]
        if thread
        else ["the store (etcd): its log at that time, leader changes, load"],
        workaround="restart the engine",
    )


# What a request waits for that is not room: pages from elsewhere, or a server of those.
_ELSEWHERE = (
    "waits_for_pages", "kv_handshake_failed", "kv_pull_failed", "kv_load_failed", "kv_read_expired", "peer_fetch_failed",
    "stale_agent", "peer_unknown", "rdma_error", "transfer_failed", "oom_kill", "helper_thread_dead",
)  # fmt: skip
LASTS_S = 60.0  # of a queue that stands: a request that has just come in waits, too


@rule(53, "UNSCHEDULABLE_REQUEST", "a request that can never fit waits at the head of the queue")
def never_fits(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    pair = _too_small(scene)
    if not (running == 0 and waiting > 0) or pair is None:
        return None
    if scene.paused or scene.has(*_ELSEWHERE) or _works(scene):
        return None
    size, longest = pair
    room, most = _int(size.get("tokens")) or 0, _int(longest.get("tokens")) or 0
    usage = scene.gauge(r"(?:cache_usage_perc|token_usage)$")
    stats = scene.batches[-1] if scene.batches else None
    kv = usage if usage is not None else (stats.num("kv") if stats else None)
    asked = [(e.num("tokens") or 0) + (e.num("most") or 0) for e in scene.events("asked")]
    if (kv is not None and kv > 0.05) or (asked and max(asked) <= room):
        return None
    # Of a model whose layers keep less than the whole sequence, the tokens that fit are not the size that is printed.
    odd = [e for e in scene.events("max_concurrency") if (e.num("times") or 0) > 1]
    stands = _stands(scene, size.src.file)
    lasts = bool(stands) and (stands[-1].time or 0.0) - (stands[0].time or 0.0) >= LASTS_S
    return finding(
        "UNSCHEDULABLE_REQUEST",
        SHOWN if kv is not None and lasts and not odd else LIKELY,
        f"The request at the head of the queue can never fit: the KV cache holds {room} tokens, a request may have {most}. Nothing runs, nothing is used.",
        [size, longest, *scene.events("max_concurrency")[:1], *stands[:1], *([stats] if stats else []), *gauges(scene)],
        mechanism="admission asks for room for the whole sequence; that is never there, and the queue is in order",
        shown=["0 running, requests waiting, an empty cache", "the cache is smaller than the longest allowed request"],
        likely=(
            ["that it does not fit: the printed concurrency is above 1, which one of the two numbers contradicts"]
            if odd
            else []
        )
        + ([] if lasts else [f"that the queue stands: no {LASTS_S:.0f} s of it are in the evidence"]),
        next_checks=[
            "does it wait for room, or for pages from elsewhere (a connector's log)?",
            "length of the waiting request",
            "cancel it: does the server recover?",
        ],
        workaround="--max-model-len at most the cache size; cancel the request",
    )


def _too_small(scene: Scene) -> tuple[Event, Event] | None:
    """A cache and the longest request that is allowed to ask for it, of one server, if it cannot hold that."""
    sizes, lengths = scene.events("kv_size"), scene.events("max_len", "max_concurrency")
    files = {e.src.file for e in (*sizes, *lengths)}
    for size in sizes:
        own = [e for e in lengths if e.src.file == size.src.file]
        if not own and (len(sizes) > 1 or len(files) > 2):
            continue  # of which server is not told
        longest = next(iter(own or lengths), None)
        room, most = _int(size.get("tokens")), _int(longest.get("tokens")) if longest else None
        if longest is not None and room is not None and most is not None and room < most:
            return size, longest
    return None


def _works(scene: Scene) -> bool:
    """Whether a rank is at work: what waits then waits for that."""
    ranks = [r for e in scene.engines for r in e.ranks.values()]
    return any(r.at.kind in ("host_work", "compile", "blocking_io") or compiles_grammar(r.stacks[-1]) for r in ranks)


def _stands(scene: Scene, file: str) -> list[Event]:
    """The last lines of that server's statistics, as far as requests wait and nothing runs."""
    lines = [b for b in scene.batches if b.src.file == file] or scene.batches
    n = next(
        (i for i, b in enumerate(reversed(lines)) if b.num("running") or b.num("gen") or not b.num("waiting")),
        len(lines),
    )
    return [b for b in lines[len(lines) - n :] if b.time is not None]


def _int(v: object) -> int | None:
    text = str(v).replace(",", "")
    return int(text) if text.isdecimal() else None


@rule(54, "SCHEDULER_LIVELOCK", "the loop turns, nothing runs, requests wait and room is free")
def admits_nothing(scene: Scene) -> Finding | None:
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
    asked = [e for e in scene.engines if _waits_for_room(scene.only(e))] if scene.engines else []
    if not asked:
        return None
    waiting = max(scene.only(e).requests[1] for e in asked)
    turning = [
        r
        for e in asked
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
        SHOWN if any(r.moving for r in turning) and usage is not None and per_stage else LIKELY,
        f"The scheduler turns and admits nothing: 0 running, {waiting:g} waiting{f', {usage:.0%} of the pool used' if usage is not None else ''}.",
        [
            *(s for r in turning[:1] for s in r.stacks[:2]),
            *gauges(scene),
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


def _waits_for_room(own: Scene) -> bool:
    """Whether requests of one engine wait and none runs. One whose pages are on their way waits for those, not for room;
    and counters that grow tell of a queue that was caught at one moment."""
    running, waiting = own.requests
    on_the_way = sum(
        m.value for m in own.newest(r"num_requests_waiting_by_reason$") if m.labels.get("reason") == "deferred"
    )
    return running == 0 and waiting > on_the_way and not own.moving_counters and not own.paused
