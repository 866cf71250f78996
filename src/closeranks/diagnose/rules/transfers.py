# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""KV transfers that fail on one side, wait on the other, or are never cleaned up."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from closeranks.diagnose import clock
from closeranks.diagnose.facts import Event, Fact, Metric
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import WAITS, engine_name, finding, labels, places
from closeranks.diagnose.rules.fetches import moved_after
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.scene.past import MINUTE
from closeranks.diagnose.stacks import helper_threads, position
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


def failures(scene: Scene) -> list[Event]:
    """Transfers that failed; not those that ended with their request, and what a rank was told of such an end."""
    ended = {e.get("room") for e in scene.events("transfer_aborted")} - {None}
    failed = scene.events(
        "transfer_failed", "bootstrap_timeout", "transfer_timeout", "kv_pull_failed", "kv_handshake_failed"
    )
    return [e for e in failed if e.get("room") not in ended]


@rule(42, "KV_TRANSFER", "a helper thread of the transfer backend is dead")
def helper_thread_dead(scene: Scene) -> Finding | None:
    dead = scene.lasting(scene.events("helper_thread_dead"))
    absent = _without_threads(scene)
    if not dead and not absent:
        return None
    who = sorted({e.who.label for e in dead if e.who}) or absent
    on = f" on {', '.join(who)}" if who else ""
    thread = next((str(e.get("thread")) for e in dead if e.get("thread")), "bootstrap_thread")
    return finding(
        "KV_TRANSFER",
        SHOWN if dead and not scene.gen_after(dead[0].time) else LIKELY,
        f"The transfer backend's {thread} is dead{on}: every later request to it waits for its time-out, the loop lives on.",
        [*dead[:4], *failures(scene)[:2], *_dumps_of(scene, absent)],
        ranks={w: f"no {thread}" for w in who},
        trigger="a message the thread did not understand, or an exception in it" if dead else "",
        mechanism="an exception ends the thread and nothing watches it; /health does not use the transfer path",
        shown=[f"{dead[0].src}: {dead[0].says()}"]
        if dead
        else ["the thread is missing from the dump of a process that should have it"],
        next_checks=["py-spy dump: is the thread there on the other ranks?"],
        workaround="restart the prefill engine",
    )


def _dumps_of(scene: Scene, labels: list[str]) -> list[Fact]:
    """The last dumps of these prefill ranks."""
    ranks = [r for e in scene.engines if e.name == "prefill" for r in e.ranks.values()]
    return [r.stacks[-1] for r in ranks if r.label in labels]


def _without_threads(scene: Scene) -> list[str]:
    """Prefill ranks without a bootstrap thread though another rank of the same engine has one."""
    for engine in scene.engines:
        if engine.name != "prefill":
            continue
        have = [r for r in engine.ranks.values() if "bootstrap_thread" in helper_threads(r.stacks[-1])]
        lack = [r for r in engine.ranks.values() if r not in have and len(r.stacks[-1].threads) > 1]
        if have and lack:
            return [r.label for r in lack]
    return []


@rule(
    28,
    "DESYNC_DIFFERENT_COLLECTIVE",
    "part of a group in a transfer status call, which holds a collective, the rest in the forward pass",
)
def split_status_call(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        asking = engine.at("transfer_wait")
        rest = [r for r in ranks if r not in asking]
        if not asking or not rest or not scene.stalls or scene.only(engine).live:
            continue
        if not all(r.at.site == "forward" or r.at.kind in WAITS for r in rest):
            continue
        return finding(
            "DESYNC_DIFFERENT_COLLECTIVE",
            LIKELY,
            f"{labels(asking)} ask{'s' if len(asking) == 1 else ''} for the state of transfers ({asking[0].at.where}), {labels(rest)} {'is' if len(rest) == 1 else 'are'} in the forward pass ({rest[0].at.where}): each side waits for the other.",
            [asking[0].stacks[-1], rest[0].stacks[-1], *scene.stalls[:2]],
            engine=engine_name(engine),
            ranks=places(ranks),
            mechanism="the status call gathers over the tensor-parallel group, and whether it is made depends on what a rank's own scheduler could fit",
            likely=["ranks' counts of free blocks had drifted apart"],
            decoys=["a status call alone looks like a stuck transfer: here only part of the group makes it"],
            next_checks=[
                "the capacity scheduler's line of each rank for that iteration: the first on which they differ"
            ],
        )
    return None


@rule(44, "KV_TRANSFER", "a transfer that failed on one side and timed out on the other, joined by room")
def failed_on_one_side(scene: Scene) -> Finding | None:
    errors = scene.events("transfer_error", "transfer_worker_error")
    failed = scene.events("transfer_failed")
    for e in errors:
        mate = next((f for f in failed if f.get("room") == e.get("room") and e.get("room") is not None), None)
        if mate is None or (mate.get("after") is None and mate.get("side") != "Decode"):
            continue  # the error, and what the same side made of it
        gap = f"{mate.time - e.time:.0f} s" if mate.time is not None and e.time is not None else "long"
        return _transfer(
            SHOWN if mate.get("after") is not None else LIKELY,
            f"The transfer of room {e.get('room')} failed on one side; the other {'learnt it by its own time-out' if mate.get('after') is not None else 'gave it up'} {gap} later.",
            [e, mate],
            mechanism="a failure is recorded locally and not told to the peer",
            shown=[f"room {e.get('room')}: {e.src} and {mate.src}"],
            decoys=["the engine is well: one request stalls, batches go on"],
            next_checks=["other rooms that failed on one side only"],
            workaround="a lower SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
        )
    return None


@rule(44, "KV_TRANSFER", "requests that stay in preallocation after a retraction, with room free")
def kept_after_retraction(scene: Scene) -> Finding | None:
    retracted = scene.events("retract")
    if not retracted:
        return None
    t = retracted[-1].time
    later = [b for b in scene.batches if t is None or b.time is None or b.time > t]
    stuck = [b for b in later if (b.num("prealloc") or 0) > 0 and (usage := b.num("usage")) is not None and usage < 0.5]
    if not stuck or (scene.engines and (scene.stalls or scene.hints)):
        return None
    b = stuck[-1]
    return _transfer(
        LIKELY,
        f"{b.get('prealloc')} requests sit in preallocation although the pool is nearly empty ({b.get('usage')}): retracted earlier, they can never leave it.",
        [retracted[-1], b],
        trigger=f"retraction at {clock.show(t)}",
        mechanism="a retracted request re-enters preallocation with a transfer that is already finished, a state that nothing admits",
        decoys=["prefill is not at fault: these requests were prefilled already"],
        next_checks=["do the same requests stay there over minutes?"],
        workaround="more KV memory or fewer running requests on decode, so that nothing is retracted; restart decode to clear",
    )


@rule(44, "KV_TRANSFER", "a cache sender failed, and the other side waits in a transfer status call or may do so")
def sender_died(scene: Scene) -> Finding | None:
    errors = [e for e in scene.lasting(scene.events("cache_sender_error")) if not _worked_on(scene, e)]
    if not errors:
        return None
    waits = _asks_for_state(scene)
    return _transfer(
        SHOWN if waits and all(e.time is not None for e in errors) else LIKELY,
        f"A cache transfer failed and was only logged ({len(errors)} lines)"
        + ("; a thread waits in a transfer status call." if waits else "."),
        [*errors[:2], *waits[:2]],
        shown=[f"{e.src}: {e.says()}" for e in errors[:1]],
        likely=["that these two belong together: the receiver waits for what this sender did not send"]
        if waits
        else ["that the other side waits for this transfer: it is not in the evidence"],
        next_checks=["requests on the generation side that wait, against the context side's error lines"],
    )


@rule(44, "KV_TRANSFER", "a thread waits in a transfer status call, and no transfer is known to have failed")
def waits_for_transfer(scene: Scene) -> Finding | None:
    waits = _asks_for_state(scene)
    if not waits or any(not _worked_on(scene, e) for e in scene.events("cache_sender_error")):
        return None
    old = scene.events("cache_sender_error")[:1]
    return _transfer(
        LIKELY,
        "The event loop waits in a transfer status call; which transfer, and why it does not end, is not in the evidence.",
        [*waits[:4], *scene.events("hang_detected")[:1]],
        mechanism="undetermined: the other side failed or never began, the transport, or a notification that was lost",
        decoys=[f"{e.src}: {e.says()}, after which work went on" for e in old],
        next_checks=[
            "the other side's log and stacks at that time: an error in its sender, its queue of transfers",
            "a second dump: the same call on the same ranks?",
        ],
    )


def _asks_for_state(scene: Scene) -> list[Fact]:
    return [s for s in scene.stacks for t in s.threads if position(t).kind == "transfer_wait"]


def _worked_on(scene: Scene, e: Event) -> bool:
    """Whether an engine scheduled requests a minute after `e` or later: nothing was waiting for it for good."""
    return e.time is not None and any(
        (i.num("scheduled") or 0) > 0 and i.time is not None and i.time > e.time + MINUTE
        for i in scene.events("trt_iter")
    )


@rule(45, "KV_TRANSFER", "transfers that time out again and again and are never cleaned up")
def never_cleaned_up(scene: Scene) -> Finding | None:
    late = scene.events("ctx_transfer_timeout")
    idle = [e for e in scene.events("trt_active", "trt_iter") if e.get("scheduled") == 0]
    if len(late) < 2 and not (late and idle):
        return None
    active = next((e.get("active") for e in idle if e.get("active")), None)
    return _transfer(
        LIKELY,
        f"Transfers time out again and again and are never cleaned up{f'; {active} requests active, none scheduled' if active else ''}.",
        [*late[:3], *idle[:2], *scene.resting[:1]],
        mechanism="clean-up of a timed-out transfer runs only when new work is scheduled, and the full pool lets none be scheduled"
        if idle
        else "blocks are held for a peer that never fetched them",
        decoys=["/health 200 says nothing about transfers"] if scene.has("http") else [],
        next_checks=["does the number of active requests ever fall?"],
        workaround="restart the context server; cap concurrency",
    )


@rule(45, "KV_TRANSFER", "transfers that fail, without more about why")
def transfers_fail(scene: Scene) -> Finding | None:
    failed = [e for e in failures(scene) if e.kind != "kv_handshake_failed" and not moved_after(scene, e)]
    errors = scene.events("transfer_error", "transfer_worker_error", "peer_blacklisted", "transfer_odd_state")
    if not failed and not errors:
        return None
    states = Counter(str(e.get("state")) for e in failed if e.get("state"))
    after = {e.get("after") for e in failed if e.get("after") is not None}
    const = f", all after {after.pop()} s" if len(after) == 1 else ""
    return _transfer(
        LIKELY,
        f"KV transfers fail{f' in {states.most_common(1)[0][0]}' if states else ''} ({len(failed) + len(errors)} lines{const}).",
        [*errors[:2], *failed[:4]],
        mechanism="a hand-over that one side started and the other never finished",
        next_checks=[
            "the other side's log, joined by room",
            "is the transfer backend's helper thread alive on every prefill rank?",
        ],
    )


@rule(46, "KV_TRANSFER", "requests that stay in a transfer queue while the loop turns")
def queue_stays(scene: Scene) -> Finding | None:
    """Requests in transfer that never move although the loop turns."""
    for key, name in (
        ("transfer", "decode's transfer queue"),
        ("inflight", "prefill's in-flight queue"),
        ("prealloc", "decode's preallocation queue"),
        ("fetching", "KV fetch"),
    ):
        seen = [b for b in scene.batches if b.num(key) is not None]
        tail = seen[-4:]
        if len(tail) < 3 or any(not b.num(key) or b.num(key) != tail[-1].num(key) for b in tail):
            continue
        times = [b.time for b in tail if b.time is not None]
        if len(times) < 2 or times[-1] - times[0] < 60:
            continue
        stopped = [e for e in scene.stalls if e.src.file == tail[-1].src.file]
        if (tail[-1].num("usage") or 0) > 0.9 or scene.silence() or stopped or _seen_empty(scene, key):
            continue
        return _transfer(
            LIKELY,
            f"{tail[-1].get(key)} requests stay in {name} for {times[-1] - times[0]:.0f} s while the loop turns.",
            tail[:3],
            mechanism="transfers that neither finish nor fail",
            next_checks=[
                "the peer's matching queue",
                "is the transfer backend's helper thread alive on every prefill rank?",
            ],
        )
    return None


def _seen_empty(scene: Scene, queue: str) -> bool:
    """Whether a scrape or `/v1/loads`, which are newer than lines that only a busy engine writes, find it empty."""
    name = re.compile(rf"(?:decode|prefill)_{queue}_queue_reqs$")
    counts = [m.value for m in scene.of(Metric) if name.search(m.name)]
    loads = [n for e in scene.events("load") for k, n in e.data.items() if name.search(k) and isinstance(n, int)]
    return bool(counts or loads) and not any(counts) and not any(loads)


def _transfer(certainty: str, summary: str, facts: Iterable[Fact], **more: Any) -> Finding:
    return finding("KV_TRANSFER", certainty, summary, facts, **more)
