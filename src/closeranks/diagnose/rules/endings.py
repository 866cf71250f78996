# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Waits that ended without their cause in the evidence, crashes, start-up, and routers."""

from collections import Counter

from closeranks.diagnose import clock
from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.scene.past import MINUTE
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding

# Exceptions that are the echo of something else: who raises one of them is not the first to fail.
ECHOES = {"gloo_timeout", "peer_closed", "peer_timeout", "nccl_timeout", "rpc_timeout", "engine_dead", "cancelled", "kv_transfer", "deepep_timeout", "store_timeout", "connect_full_mesh", "address_in_use", "gloo_size"}  # fmt: skip


@rule(
    30,
    "CRASH_LOOKS_LIKE_HANG",
    "graph capture failed on some rank, and a collective in its clean-up hides the exception",
)
def hidden_capture_error(scene: Scene) -> Finding | None:
    registered = [e for e in scene.events("registered_graphs") if e.get("n") == 0]
    bars = [e for e in scene.events("bar") if e.get("work") == "capture"]
    if not registered or (bars and (bars[-1].num("percent") or 0) >= 100):
        return None
    logged = {e.who.label for e in registered if e.who}
    known = {f.who.label for f in scene.facts if f.who and f.who.kind == "scheduler"}
    tps = sorted({e.who.tp for e in registered if e.who and e.who.tp is not None})
    silent = sorted(known - logged) or _gap(tps)
    begin = [e for e in scene.events("start_step") if e.get("gb") is not None]
    quiet = f"; {', '.join(silent)} logged nothing" if silent else ""
    low = bool(begin) and (begin[-1].num("gb") or 99) < 6
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        LIKELY,
        f"Graph capture failed: {len(registered)} ranks registered 0 graph addresses{quiet}. The exception is held back by a collective in the clean-up.",
        [*registered[:3], *bars[-1:], *begin[:1], *scene.stacks[:1]],
        ranks={e.who.label: "registering 0 graphs" for e in registered if e.who},
        missing=silent,
        mechanism="the capture context's finally clause runs a collective before the exception can surface; the rank that raised elsewhere never joins it",
        shown=["0 addresses registered means that capture produced nothing"],
        likely=["out of memory during capture" if low else "an error inside capture"],
        next_checks=["start once with --disable-custom-all-reduce or --disable-cuda-graph: the error appears"],
        workaround="--disable-custom-all-reduce or --disable-cuda-graph to see the error; then more free memory (--mem-fraction-static)",
    )


def _gap(tps: list[int]) -> list[str]:
    """`TP7` if 0…6 are there: capture sizes are powers of two."""
    if not tps:
        return []
    size = 1
    while size < len(tps):
        size *= 2
    return [f"TP{i}" for i in range(size) if i not in tps] if size - len(tps) <= 2 else []


@rule(31, "DEAD_PEER", "survivors lost the connection to a peer")
def lost_connection(scene: Scene) -> Finding | None:
    timeouts, closed = scene.events("peer_timeout"), scene.events("peer_closed")
    timeouts, closed = scene.lasting(timeouts), scene.lasting(closed)
    lost = timeouts or closed
    if not lost or scene.has("gloo_size", "port_in_use"):
        return None
    # A rank that raised something of its own before the connections closed is the crash; the closings are its echo.
    own = [e for e in scene.events("exception") if str(e.get("cause")) not in ECHOES and e.get("traceback")]
    own = [e for e in own if e.time is None or lost[0].time is None or e.time <= lost[0].time]
    if own and not timeouts:
        return None
    addresses = Counter(str(e.get("address", "")) for e in lost if e.get("address"))
    one = next(iter(addresses), "") if len(addresses) == 1 else ""
    who = [e.who.label for e in lost if e.who]
    if timeouts:
        summary = f"{len(lost)} ranks lost {one or 'a peer'} at once by time-out: its host is down or unreachable."
        mechanism = "TCP time-out, not a reset: a process that dies closes its connections, a host or network that vanishes does not"
    else:
        summary = f"A peer process died: its connections closed on {len(lost)} ranks{f' ({one})' if one else ''}."
        mechanism = "the kernel closes the sockets of a process that ends"
    return finding(
        "DEAD_PEER",
        LIKELY,
        summary,
        [*lost[:5], *scene.events("child_crashed", "exit_code", "fatal")[:2]],
        ranks={w: "lost its peer" for w in who[:16]},
        missing=[f"host {one}"] if one else [],
        mechanism=mechanism,
        shown=[f"all name {one}"] if one else [],
        likely=["which process or host, and why, is not in this evidence"],
        decoys=["the rank that logs first is a survivor, not the first to fail"],
        next_checks=["the other side's log and dmesg at " + (clock.show(lost[0].time) or "that time")],
    )


@rule(32, "DEAD_PEER", "the process that holds the rendezvous store is gone, and nothing in the log says why")
def store_gone(scene: Scene) -> Finding | None:
    lost = scene.events("store_lost")
    louder = "exception rank_exception fatal child_crashed exit_code oom_kill engine_dead worker_died peer_closed peer_timeout gloo_timeout teardown"
    if not lost or scene.has(*louder.split()) or scene.collectives:
        return None
    who = sorted({e.who.label for e in lost if e.who}, key=lambda label: (len(label), label))
    return finding(
        "DEAD_PEER",
        LIKELY,
        f"The process that holds the rendezvous store (rank 0, as a rule) ended; {len(who) or 'some'} ranks lost it.",
        lost[:4],
        ranks={w: "lost the store" for w in who[:16]},
        missing=["rank 0"] if who and "rank 0" not in who else [],
        mechanism="the store lives in one process; whoever asks it after its end gets a closed connection",
        shown=[f"{lost[0].src}: the store's connection is closed"],
        likely=["its end is the cause, or itself the echo of a crash: its own log tells"],
        decoys=["the ranks that print this are survivors"],
        next_checks=["the log of the process on the store's host, before this time; its exit code; dmesg there"],
    )


@rule(33, "CRASH_LOOKS_LIKE_HANG", "a rank raised or died of a signal, and the others wait")
def crashed_rank(scene: Scene) -> Finding | None:
    if scene.has("port_in_use", "store_timeout", "cache_sender_error", "ctx_transfer_timeout"):
        return None
    fatal = scene.events("fatal")
    raised = [
        e
        for e in scene.events("exception")
        if str(e.get("cause")) not in ECHOES
        and (e.get("traceback") or str(e.get("cause")) in ("cuda_oom", "cuda_error"))
    ]
    heads = scene.events("rank_exception", "engine_start_failed")
    # Records of their own need no "Traceback": the exception stands under the head that the same process logged.
    raised += [e for e in scene.events("exception") if e not in raised and _own_end(e, heads)]
    near = [e for e in raised if any(h.src == e.src or _under(h, e) for h in heads)]
    hard = [e for e in raised if str(e.get("cause")) in ("cuda_oom", "cuda_error")]
    crashed = [
        e for e in scene.events("child_crashed") if e.get("code") not in (-9, 137, -15, None) and not scene.collectives
    ]
    found = fatal or near or hard or crashed or _unnamed(scene, heads)
    if not found:
        return None
    found = scene.lasting(found)
    e = sorted(found, key=lambda x: (x.time if x.time is not None else 0.0, x.src))[0]
    if (seen := scene.sequel(e)) is not None and seen.span < MINUTE:
        return None  # tokens went on, for too short a time to call it past
    who = e.who.label if e.who else "A process"
    what = str(
        e.get("type")
        or e.get("what")
        or (f"exit code {e.get('code')}" if e.get("code") is not None else "a fatal error")
    )
    cause = str(e.get("cause") or "").replace("_", " ")
    return finding(
        "CRASH_LOOKS_LIKE_HANG",
        LIKELY,
        f"{who} failed first: {what}{f' ({cause})' if cause else ''}. What follows is its echo.",
        [e, *heads[:2], *crashed[:1], *scene.events("teardown")[:1]],
        missing=[who] if e.who else [],
        mechanism="a rank that raised no longer takes part; the others wait for it until a time-out",
        shown=[f"{e.src}: the first exception in time"],
        decoys=["time-outs, SIGQUIT and closed connections after it are echoes"],
        next_checks=[
            "the full traceback at that line",
            "clocks of different hosts may differ: compare within one host",
        ],
    )


def _unnamed(scene: Scene, heads: list[Event]) -> list[Event]:
    """Heads of tracebacks under which frames follow, and no exception that is known by name."""
    frames, named = scene.events("traceback_frame"), scene.events("exception")
    return [h for h in heads if any(_under(h, f) for f in frames) and not any(_under(h, e) for e in named)]


def _own_end(e: Event, heads: list[Event]) -> bool:
    return str(e.get("cause")) not in ECHOES and any(
        h.who is not None and h.who == e.who and _under(h, e) for h in heads
    )


def _under(head: Event, other: Event) -> bool:
    return other.src.file == head.src.file and 0 < other.src.line - head.src.line < 150


@rule(34, "STARTUP", "ranks wait in start-up: rendezvous, weight loading, capture, a barrier")
def waiting_in_startup(scene: Scene) -> list[Finding] | Finding | None:
    store = scene.events("store_timeout", "full_mesh_failed", "hostname_loopback")
    strong = scene.events("store_timeout", "full_mesh_failed")
    if strong and not scene.has("started"):
        joined = next((e for e in strong if e.get("joined") is not None), None)
        count = f": {joined.get('joined')} of {joined.get('expected')} joined" if joined else ""
        return finding(
            "STARTUP",
            LIKELY,
            f"Rendezvous failed{count}.",
            store[:4],
            mechanism="not all processes reached the store in time, or reached another one",
            decoys=["'[Gloo] Rank 0 is connected to 0 peer ranks' is normal for a group of one"],
            next_checks=[
                "the processes that did not join: started, same address, same port, interface (GLOO_SOCKET_IFNAME)?"
            ],
        )
    out = []
    for engine in scene.engines:
        there = [
            r
            for r in engine.ranks.values()
            if r.at.site == "startup" and r.at.kind in ("collective", "collective_device", "p2p", "lock", "running")
        ]
        if (
            not there
            or len(there) < len(engine.ranks)
            or not any(r.at.kind.startswith(("collective", "p2p")) for r in there)
        ):
            continue
        away = engine.missing
        out.append(
            finding(
                "STARTUP",
                LIKELY,
                f"{labels(there)} wait in start-up ({there[0].at.where})"
                + (f"; no dump of {', '.join(away[:8])}." if away else "."),
                [*(r.stacks[-1] for r in there[:3]), *scene.events("start_step")[-3:]],
                engine=engine_name(engine),
                ranks=places(there),
                missing=away,
                mechanism="a barrier or first collective that part of the group has not reached",
                likely=["the cause is on the ranks without a dump"] if away else [],
                next_checks=[f"dump {', '.join(away[:8])} on the other host"]
                if away
                else ["logs of all ranks: which start-up step is each one's last?"],
            )
        )
    return out


@rule(35, "UNDETERMINED", "a CPU collective ended by its own long time-out")
def ended_by_timeout(scene: Scene) -> Finding | None:
    ended = scene.events("gloo_timeout")
    if not ended:
        return None
    e = ended[0]
    seconds = (e.num("ms") or 0) / 1000
    began = clock.show(e.time - seconds) if e.time is not None else ""
    sides = Counter(str(x.get("side")) for x in ended)
    before = [b for b in scene.batches if e.time is None or b.time is None or b.time < e.time - seconds + 60]
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        f"A CPU collective ended by its time-out of {seconds:g} s: the stall began near {began or f'{seconds:g} s before the error'}.",
        [*ended[:4], *before[-1:]],
        ranks={x.who.label: f"{x.get('side')} timed out" for x in ended if x.who},
        mechanism=f"undetermined: {dict(sides)} timed out; which rank did not come is not in the evidence",
        shown=[f"progress stopped about {seconds:g} s before the error line"],
        decoys=["the crash at the time-out is the end of the wait, not its cause"],
        next_checks=[
            f"all ranks' logs around {began}" if began else "all ranks' logs at the back-dated time",
            "stacks of all ranks next time, before the time-out",
        ],
        workaround="a shorter control-plane time-out and a soft watchdog, so that stacks are there",
    )


@rule(36, "ROUTER", "a router lost requests: no handler, or a failed leg that nobody told the other leg")
def lost_in_router(scene: Scene) -> Finding | None:
    closed = [e.src for e in scene.events("breaker_closed")]
    opened = [e for e in scene.events("breaker_open") if not any(c.file == e.src.file and c > e.src for c in closed)]
    dropped = [*scene.events("no_handler", "no_worker"), *opened]
    legs = scene.events("leg_failed")
    waiting = [e for e in scene.events("transfer_failed") if e.get("after") is not None]
    joined = [(leg, w) for leg in legs for w in waiting if _apart(leg, w) <= APART_S]
    if joined or (legs and not waiting and not scene.has("transfer_error")):
        e = joined[0][0] if joined else legs[0]
        waiting = [w for leg, w in joined if leg is e]
        dated = [w for w in waiting if w.time is not None and e.time is not None and _apart(e, w) <= BESIDE_S]
        status = f" with HTTP {e.get('status')}" if e.get("status") else ""
        other = "decode" if e.get("leg") == "prefill" else "prefill"
        return finding(
            "ROUTER",
            SHOWN if dated and e.get("status") is not None else LIKELY,
            f"The {e.get('leg')} leg failed{status} and the router did not end the {other} leg, which waited on.",
            [*scene.events("leg_dispatched")[:1], e, *waiting[:2]],
            trigger=f"{e.get('leg')} request failed at {clock.show(e.time)}",
            mechanism="the result of an asynchronous leg is discarded, so its twin waits for its own time-out",
            shown=[f"{w.src}: {w.get('side')} gave up after {w.get('after')} s" for w in waiting[:1]],
            decoys=["no transfer or network fault: nothing was ever sent"],
            next_checks=["join both sides by request id and room"],
            workaround="a short bootstrap time-out; abort the twin leg when one fails",
        )
    if dropped:
        lost = scene.events("request_lost")
        return finding(
            "ROUTER",
            SHOWN if lost and dropped[0].kind == "no_handler" else LIKELY,
            f"The router or worker dropped requests ({dropped[0].kind.replace('_', ' ')}, {len(dropped)} lines); clients wait for an answer that nobody computes.",
            [*dropped[:4], *lost[:1]],
            mechanism="a request is routed to an endpoint that does not handle it, and no side has a time-out",
            shown=[f"{lost[0].src}: {lost[0].get('n')} requests never ended"] if lost else [],
            next_checks=[
                "does the count of these lines equal the count of hanging requests?",
                "the engines' own queues: empty?",
            ],
            workaround="client time-outs and retry; readiness by a real request",
        )
    return None


BESIDE_S = (
    120.0  # between the failure of one leg and the arrival of the other, where that shows that they are of one request
)
APART_S = 1800.0  # beyond this they are of two


def _apart(leg: Event, waited: Event) -> float:
    """Seconds between a leg's failure and the beginning of a wait that was in vain; 0 where a clock is missing."""
    if leg.time is None or waited.time is None:
        return 0.0
    return abs(waited.time - (waited.num("after") or 0.0) - leg.time)


def first_failure(scene: Scene) -> Event | None:
    """The first exception in time that is no echo."""
    found = [e for e in scene.events("exception") if str(e.get("cause")) not in ECHOES]
    return min(found, key=lambda e: (e.time if e.time is not None else float("inf"), e.src), default=None)
