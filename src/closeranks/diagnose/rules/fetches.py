# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Decode that fetches pages from prefill (vLLM): handshakes, leases that end, networks that carry nothing."""

from closeranks.diagnose.facts import Event, Metric
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, labels, places, side_of
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, Finding

INTERVAL = 10.0  # seconds that one of vLLM's lines about transfers covers
LEASE_S = 600.0  # more than any lease: pages that nobody fetched are released by then, and not asked for so long after
PAST_S = 45.0  # a log that went on for so long after its last failure tells of the past


def moved_after(scene: Scene, e: Event) -> bool:
    """Whether transfers succeeded after `e`: what it complains of has passed."""
    return e.time is not None and any(
        m.time is not None and m.time > e.time + INTERVAL and m.num("ok") for m in scene.events("kv_moved")
    )


def _stage(scene: Scene, last: Event, now: int) -> int:
    """`now`, or a later stage for what the log has left behind: what other evidence shows then comes first."""
    failed = [d for m, d in scene.counter_deltas if m.name.endswith("nixl_num_failed_transfers_total")]
    if failed and not any(failed) and last.kind == "kv_handshake_failed":
        return 49  # none failed between two scrapes
    later = [f.time for f in scene.facts if f.time is not None and f.src.file == last.src.file]
    return now if last.time is None or not later or max(later) - last.time <= PAST_S else 49


def _now(scene: Scene, kind: str) -> list[Event]:
    """Events of this kind after which no transfer has succeeded."""
    return [e for e in scene.events(kind) if not moved_after(scene, e)]


@rule(44, "KV_TRANSFER", "decode cannot greet the prefill engine that a request names")
def peer_unreachable(scene: Scene) -> Finding | None:
    failed = _now(scene, "kv_handshake_failed") or _now(scene, "peer_fetch_failed")
    if not failed or (failed[0].kind == "peer_fetch_failed" and len(failed) < 2):  # one is asked again a second later
        return None
    who = sorted({e.who.label for e in failed if e.who and e.who.is_rank})
    on = f" on {', '.join(who[:8])}" if who else ""
    lost = sum(int(e.num("requests") or 0) for e in _now(scene, "kv_load_failed"))
    return finding(
        "KV_TRANSFER",
        LIKELY,
        f"Decode cannot greet a prefill engine: {len(failed)} handshakes failed{on}"
        f"{f', {lost} requests were ended with an error' if lost else ''}.",
        [*failed[:4], *scene.events("kv_load_failed")[:2]],
        stage=_stage(scene, failed[-1], 44),
        engine=side_of(scene, failed),
        ranks={w: "waited for the answer to a handshake" for w in who},
        mechanism="the address in a request's transfer parameters is not, or no longer, that of a prefill engine that answers; requests wait in line for the time-out, then fail by themselves",
        decoys=["the engine goes on: a request that names a living peer is served"],
        next_checks=[
            "which address do these requests name, and does the prefill engine of that address live?",
            "VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT of prefill; is it reachable from decode's host?",
        ],
    )


@rule(48, "KV_TRANSFER", "requests that were prefilled, and whose pages nobody fetched")
def never_fetched(scene: Scene) -> Finding | None:
    late = _now(scene, "kv_expired")
    if not late:
        return None
    partly = [e for e in late if e.num("by")]
    return finding(
        "KV_TRANSFER",
        LIKELY,
        f"{len(late)} requests were prefilled and not fetched in time: their lease ran out and prefill released their pages"
        + (f" ({len(partly)} of them had been fetched by a part of decode's ranks)." if partly else "."),
        late[:4],
        stage=_stage(scene, late[-1], 48),
        engine=side_of(scene, late),
        mechanism="decode never asked for them, or could not: its leg was not sent, was cut off, or does not get on. The requests are lost; prefill is not",
        decoys=["prefill answered these requests with success"],
        next_checks=[
            "the router or client: was the second leg sent, and what came of it?",
            "decode at that time: did it stand, was its queue full, could it reach prefill?",
        ],
    )


@rule(47, "KV_TRANSFER", "pages that were fetched after their lease had ended")
def fetched_too_late(scene: Scene) -> Finding | None:
    late = _now(scene, "kv_read_expired")
    ended = [e.time for e in scene.events("kv_expired") if e.time is not None]
    # Without a lease that has ended before it is the echo of an abort: decode then tells prefill a second time.
    late = [e for e in late if e.time is None or any(e.time - LEASE_S <= t <= e.time for t in ended)]
    if not late:
        return None
    return finding(
        "KV_TRANSFER",
        LIKELY,
        f"Decode told prefill {len(late)} times of fetched pages of which prefill no longer knew: they may have been given to others before they were read.",
        [*scene.events("kv_expired")[-2:], *late[:4]],
        stage=_stage(scene, late[-1], 47),
        engine=side_of(scene, late),
        mechanism="prefill forgets a request when its lease ends, also while it is being read",
        likely=["that what was read was overwritten: prefill's line cannot tell"],
        next_checks=["the times of these requests on both sides, against the length of the lease"],
    )


@rule(47, "NETWORK_OR_TRANSPORT", "connections of ranks whose data is sent again and again and never acknowledged")
def unacknowledged(scene: Scene) -> Finding | None:
    sent = retransmitting(scene)
    if not sent or any(m.value > 0 for m in scene.of(Metric) if "kv_fetch_by_stage" in m.name):
        return None  # with requests in transfer it is the trigger of that
    who = _owners(scene, sent)
    return finding(
        "NETWORK_OR_TRANSPORT",
        LIKELY,
        f"Data of {len(sent)} connections{f' of {who}' if who else ''} is sent again and again and never acknowledged: the network to the peer carries nothing.",
        sent[:4],
        mechanism="the kernel repeats for minutes before it gives a connection up; until then nobody is told",
        next_checks=["the link and the route to that peer, from this host and from the other"],
    )


@rule(22, "NETWORK_OR_TRANSPORT", "ranks in a connection attempt while their data to a peer is never acknowledged")
def connects_to_nothing(scene: Scene) -> Finding | None:
    sent = retransmitting(scene)
    for engine in scene.engines:
        waiting = [r for r in engine.at("blocking_io") if "connect" in r.at.op]
        pids = {s.pid for r in engine.ranks.values() for s in r.stacks}
        own = [e for e in sent if e.get("pid") in pids]
        if not waiting or not own:
            continue
        return finding(
            "NETWORK_OR_TRANSPORT",
            LIKELY,
            f"{labels(waiting)} {'waits' if len(waiting) == 1 else 'wait'} in a connection attempt, and data of {len(own)} open connections is never acknowledged: the network to the peer carries nothing.",
            [*(r.stacks[-1] for r in waiting[:2]), *own[:4], *scene.events("peer_lost", "peer_fetch_failed")[:2]],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            mechanism="a synchronous call holds the loop for its time-out, again and again, and nobody is told of what does not arrive",
            likely=["a host that is down or cut off by a firewall looks the same from here"],
            next_checks=["the link and the route to that peer, from this host and from the other"],
        )
    return None


def retransmitting(scene: Scene) -> list[Event]:
    """Connections of an engine's processes that have repeated the same data several times."""
    ours = {p.pid for p in scene.processes} | {s.pid for s in scene.stacks}
    return [e for e in scene.events("retransmits") if e.get("pid") in ours]


def _owners(scene: Scene, events: list[Event]) -> str:
    """The processes that hold these connections, by name."""
    names = {p.pid: p.who.label for p in scene.processes if p.who}
    return ", ".join(sorted({names.get(int(e.num("pid") or 0), f"pid {e.get('pid')}") for e in events})[:8])


def network_trigger(scene: Scene) -> tuple[str, list[Event]]:
    """What a network that carries nothing has to do with transfers that stand, and the lines that show it."""
    sent = retransmitting(scene)
    if not sent:
        return "", []
    most = max(int(e.num("times") or 0) for e in sent)
    who = _owners(scene, sent)
    return f"the network: data of {who} was sent {most} times again without an acknowledgement", sent[:2]
