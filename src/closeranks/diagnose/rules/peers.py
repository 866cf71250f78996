# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Between engines: peers that changed, capacity that looks like a fault, requests that outlive their client."""

from collections import Counter

from closeranks.diagnose import clock
from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.rules.transfers import failures
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(40, "STALE_PEER", "a peer was replaced at its old address, and every request after that fails")
def replaced_peer(scene: Scene) -> Finding | None:
    failed = [e for e in failures(scene) if e.kind != "bootstrap_timeout"]
    stale = scene.events("stale_agent", "peer_blacklisted")
    restarted = [e for e in scene.events("container_started") if e.get("object") in ("prefill", "decode", None)]
    first_failure = min((e.time for e in failed if e.time is not None), default=None)
    came_up = [
        e
        for e in scene.events("started")
        if e.time is not None and first_failure is not None and e.time < first_failure
    ]
    # A start is a restart if the other side had worked before it.
    again = [
        e
        for e in came_up
        if any(b.kind != "prefill_batch" and b.time is not None and b.time < (e.time or 0) for b in scene.batches)
    ]
    killed = scene.events("container_killed")
    replaced = again or (restarted and killed)
    worked_after = [b for b in scene.gen_after(first_failure) if (b.num("gen") or 0) > 0]
    if (
        stale
        and (replaced or len(stale) >= 1)
        and not worked_after
        and (replaced or scene.has("started", "peer_lost", "container_started") or stale[0].kind == "peer_blacklisted")
    ):
        return finding(
            "STALE_PEER",
            LIKELY,
            "One side holds state of a peer that is gone: sessions or agents of its former life are refused.",
            [*stale[:3], *again[:1], *restarted[:1], *failed[:2]],
            mechanism="peer state is keyed by address and has no incarnation",
            next_checks=["when did the peer last start, and do all requests since fail?"],
            workaround="restart the side that holds the stale state; if in doubt both",
        )
    if len(failed) < 2 or not replaced or worked_after or _worked_since(scene, first_failure):
        return None
    if _served_since(scene, again, first_failure):
        return None
    when = clock.show(again[0].time) if again else ""
    return finding(
        "STALE_PEER",
        SHOWN if again and len(failed) >= 3 else LIKELY,
        f"The peer was replaced{f' at {when}' if when else ''}; since then every transfer fails although both sides are up.",
        [*killed[:1], *restarted[:1], *again[:1], *failed[:4]],
        ranks={"decode": "waits for endpoints of a process that is gone"},
        trigger="the peer's process was replaced at the same address",
        mechanism="endpoints per rank are cached by bootstrap address; the new process listens elsewhere",
        shown=[f"{len(failed)} transfers failed after the restart, none succeeded"],
        decoys=[
            "both /health are 200: neither looks at the other's endpoints",
            "no network partition: the address is reachable",
        ],
        next_checks=["decode's cached prefill info against the ports the new prefill listens on"],
        workaround="restart the side that was not replaced; shorten the heartbeat interval so that a swap is seen",
    )


TOGETHER_S = 10.0


def _worked_since(scene: Scene, until: float | None) -> bool:
    """Whether decode has decoded in the present lives of both engines: it held no request of prefill's former life,
    because it began after that, or hardly before."""
    starts: dict[str, float] = {}
    for e in scene.events("started"):
        if e.time is not None and until is not None and e.time < until:
            side = scene.role_of(e)
            starts[side] = max(starts.get(side, 0.0), e.time)
    if until is None or "decode" not in starts or "prefill" not in starts:
        return False
    both_up = max(starts["decode"], starts["prefill"])
    return both_up - starts["decode"] <= TOGETHER_S and any(
        b.get("role") == "decode" and (b.num("running") or 0) > 0 and b.time is not None and both_up < b.time < until
        for b in scene.batches
    )


LATE_S = 1800.0


def _served_since(scene: Scene, again: list[Event], until: float | None) -> bool:
    """Whether decode made tokens after the restart that it cannot have had before: it is the one that was restarted, or
    it did so long after."""
    if not again or again[-1].time is None or until is None:
        return False
    up = again[-1]
    return any(
        b.kind != "prefill_batch"
        and (b.num("gen") or 0) > 0
        and b.time is not None
        and (up.time or 0.0) + (0.0 if b.src.file == up.src.file else LATE_S) < b.time < until
        for b in scene.batches
    )


@rule(41, "NOT_HUNG_SLOW_OR_CAPACITY", "bootstrap time-outs of one constant length while decode runs at its limit")
def capacity_timeouts(scene: Scene) -> Finding | None:
    late = scene.events("bootstrap_timeout") or [
        e for e in scene.events("transfer_failed") if e.get("state") == "Bootstrapping"
    ]
    caps = scene.events("capacity")
    limit = scene.flag_number("max-num-seqs", "max-running-requests")
    full = [e for e in caps if (e.num("waiting") or 0) > 0 and (limit is None or (e.num("running") or 0) >= limit)]
    decode = [
        b
        for b in scene.batches
        if b.get("role") == "decode"
        and (b.num("usage") or 0) >= 0.9
        and (b.num("prealloc") or 0) > 0
        and (b.num("gen") or 0) > 0
    ]
    vllm_full = [
        b
        for b in scene.batches
        if b.kind == "vllm_stats"
        and (b.num("waiting") or 0) > 0
        and (b.num("gen") or 0) > 0
        and limit is not None
        and (b.num("running") or 0) >= limit
    ]
    if len(late) < 2 or not (full or decode or vllm_full):
        return None
    received = scene.events("received")
    after = ""
    if received and received[0].time is not None and late[0].time is not None:
        after = f" exactly {late[0].time - received[0].time:g} s after arrival"
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        SHOWN if full and limit is not None else LIKELY,
        f"Requests time out waiting for a decode slot{after}: decode runs at its limit ({(full or decode or vllm_full)[0].num('running'):g} running), nothing is stuck.",
        [
            *received[:1],
            *late[:3],
            *(full or decode or vllm_full)[:2],
            scene.flag("max-num-seqs", "max-running-requests"),
        ],
        mechanism="the bootstrap clock starts at arrival, so queueing alone exceeds it",
        shown=["time-outs of one constant length", "decode at its limit with requests waiting"],
        decoys=["no transport fault: the same pair completes the requests that get a slot"],
        next_checks=["queue length over time against the time-out"],
        workaround="a longer bootstrap time-out, more decode slots, or admission control in front",
    )


@rule(
    43,
    "DEAD_PEER NETWORK_OR_TRANSPORT",
    "decode lost its prefill engine: the heartbeat went unanswered",
)
def prefill_lost(scene: Scene) -> Finding | None:
    lost = scene.events("peer_lost")
    if not lost:
        return None
    affected = sum(int(e.num("affected") or 0) for e in lost)
    alive = [f for e in scene.engines if e.name == "prefill" for f in scene.only(e).live]
    if alive:
        return finding(
            "NETWORK_OR_TRANSPORT",
            LIKELY,
            f"Decode lost its prefill engine, which lives{f'; {affected} requests failed with it' if affected else ''}: nothing passes between the two, or prefill answers too late.",
            [*lost[:2], *alive[:2], *failures(scene)[:2]],
            ranks={"prefill": "lives, and was not heard by decode"},
            mechanism="the heartbeat asks the bootstrap server in prefill's main process over the network; transfers take the same way",
            shown=["prefill's loop turns by its own counters or context switches"],
            decoys=["both engines are well by themselves, and by their own health checks"],
            next_checks=["from decode's host: does prefill's bootstrap port answer? The link, its counters, firewalls"],
        )
    return finding(
        "DEAD_PEER",
        LIKELY,
        f"Decode lost its prefill engine: two heartbeats in a row were not answered{f'; {affected} requests failed with it' if affected else ''}.",
        [*lost[:2], *failures(scene)[:2]],
        missing=["prefill"],
        mechanism="the heartbeat asks the bootstrap server in prefill's main process: its process, host or network is gone, or that process does not get to answer",
        likely=["why prefill does not answer is on its own side"],
        decoys=["the transfers that fail at that moment are the echo"],
        next_checks=["prefill: does the process live, does its port answer? Its log at that time"],
    )


@rule(48, "REQUEST_LEAK", "the engine computes for requests whose client is gone")
def orphans(scene: Scene) -> Finding | None:
    lost = scene.events("orphan_output")
    count = Counter(e.get("_request") for e in lost if e.get("_request") is not None)
    again = [e for e in lost if count[e.get("_request")] >= 3]  # an abort on its way leaves one such line, or two
    if not again and not _flood(lost):
        return None
    lost = again or lost
    spans = [e.time for e in again if e.time is not None]
    killed = scene.events("exit_code", "probe_failed")
    oom = scene.has("oom_kill")
    return finding(
        "REQUEST_LEAK",
        # An abort on its way leaves a few such lines as well: shown is the leak by what still runs afterwards.
        SHOWN if spans and scene.gen_after(min(spans) + 20) else LIKELY,
        f"Requests go on after their client left: {len(lost)} outputs for a request whose state was deleted.",
        [*lost[:2], *scene.batches[-1:], *scene.events("health_failed")[:1], *killed[:2]],
        trigger="a client disconnected mid-stream and the abort was lost",
        mechanism="the request decodes to its length limit and floods the output path",
        shown=["output arrives for deleted requests"],
        likely=["that this flood caused the later health failures"] if scene.has("health_failed") else [],
        decoys=["exit code 137 came from the liveness kill: there is no out-of-memory event"]
        if killed and not oom
        else [],
        next_checks=["running requests in the engine against open client streams"],
        workaround="a max_tokens cap on every request",
    )


def _flood(lost: list[Event]) -> bool:
    """Whether many such lines come within a minute: of one request, as far as can be told."""
    times = sorted(e.time for e in lost if e.time is not None)
    return any(b - a <= 60 for a, b in zip(times, times[2:], strict=False)) or (len(lost) > 2 and not times)


@rule(40, "STALE_PEER", "peers are asked for by names that the store of addresses does not know")
def unknown_peer(scene: Scene) -> Finding | None:
    unknown = scene.events("peer_unknown")
    if len(unknown) < 2:
        return None
    return finding(
        "STALE_PEER",
        LIKELY,
        f"Transfers go to a peer that the metadata store does not know ({len(unknown)} times): a name that is out of date, or was never registered.",
        [*unknown[:3], *scene.events("rdma_error")[:1], *scene.batches[-1:]],
        mechanism="addresses are kept after their process has gone or has taken another port; each use of one waits for its own time-out",
        decoys=["the engine goes on: what it asks of other peers is served"] if scene.gen_after(None) else [],
        next_checks=["the peer that is named: when did it start, on which port does it listen?"],
        workaround="restart the peer, so that it registers anew; then those that keep its old address",
    )


@rule(43, "NETWORK_OR_TRANSPORT", "a transfer engine's RDMA connections fail")
def rdma_fails(scene: Scene) -> Finding | None:
    errors = scene.events("rdma_error")
    if not errors:
        return None
    faults = sorted({str(e.get("fault")) for e in errors})
    return finding(
        "NETWORK_OR_TRANSPORT",
        LIKELY,
        f"RDMA between the engines fails: {', '.join(faults)} ({len(errors)} times).",
        [*errors[:4], *failures(scene)[:2]],
        mechanism="the device gave a connection up, or could not make one; transfers over it fail, what was in flight is flushed",
        likely=["a peer whose process ended looks the same: its queue pairs no longer answer"],
        decoys=["transfers that fail after this are its echo"] if failures(scene) else [],
        next_checks=[
            "the first such line of both sides, and whether the peer's process lived then",
            "ib_write_bw between the same two devices; GID index and MTU on both ends",
        ],
    )
