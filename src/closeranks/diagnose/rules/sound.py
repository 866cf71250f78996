# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Nothing wrong, or only slow."""

from itertools import pairwise

from closeranks.diagnose import health
from closeranks.diagnose.facts import Event, Fact
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    finding,
    gauges,
    labels,
    places,
    side_of,
)
from closeranks.diagnose.scene import RankView, Scene
from closeranks.diagnose.scene.past import MINUTE
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding


@rule(58, "HEALTHY_WATCHDOG_FALSE_POSITIVE", "a watchdog or probe complains while tokens flow")
def false_alarm(scene: Scene) -> Finding | None:
    alarms = [e for e in scene.events("watchdog", "health_failed", "probe_failed") if e.time is not None]
    if not alarms or scene.has("child_crashed", "exit_code", "container_killed", "orphan_output", "teardown"):
        return None
    last = max(e.time or 0.0 for e in alarms)
    after = scene.gen_after(last)
    if not scene.has("decode_batch", "vllm_stats"):  # a prefill engine shows progress by its own batches
        files = {e.src.file for e in alarms}
        after = [b for b in scene.batches if b.src.file in files and b.time is not None and b.time > last]
    if not after and not (len(alarms) > 1 and scene.gen_after(sorted(e.time or 0.0 for e in alarms)[-2])):
        return None
    parts = {str(e.get("part", "")).strip() for e in alarms if e.kind == "watchdog"} - {""}
    rank_alarm = any("cheduler" in p for p in parts) or (not parts and any(e.kind == "watchdog" for e in alarms))
    if rank_alarm and any(e.at("collective", "device_wait") for e in scene.engines):
        return None
    times = sorted(e.time for e in alarms if e.time is not None)
    gaps = {round(b - a) for a, b in pairwise(times)}
    periodic = len(times) > 2 and len(gaps) == 1
    flowing = [b for b in scene.gen_after(times[0]) if b.src.file in {e.src.file for e in alarms}]
    proof = periodic and not rank_alarm and after and len(flowing) >= 2
    return finding(
        "HEALTHY_WATCHDOG_FALSE_POSITIVE",
        SHOWN if proof and not health.doubts(scene, ("watchdog", "health_failed", "probe_failed")) else LIKELY,
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


@rule(70, "HEALTHY_IDLE UNDETERMINED", "loops poll for work and there is none")
def idle(scene: Scene) -> Finding | None:
    running, waiting = scene.requests
    ranks = [r for e in scene.engines for r in e.ranks.values()]
    waits = [r for r in ranks if _waits_at_the_head(r)]
    rest = [r for e in scene.engines for r in e.ranks.values() if r.at.kind == "idle" or _between(scene.only(e), r)]
    rows = [
        e
        for e in scene.events("top_row")
        if e.get("function") in ("sched_yield", "acquire_read", "recv_requests", "recv_pyobj", "poll", "dequeue")
    ]
    top = bool(rows) and (rows[0].num("own") or 0) >= 10
    # A dump may find the entry rank, too, in its own broadcast: counters then say whether the loop turns.
    polls = bool(rest) or (bool(ranks) and all(scene.only(e).live for e in scene.engines))
    looks = (polls and len(rest) + len(waits) == len(ranks)) or (not ranks and top)
    if not looks or running > 0 or waiting > 0:
        return None
    if _unfinished(scene) or (not health.gauged(scene) and any(b.num("gen") for b in scene.batches[-1:])):
        return None
    if work := health.open_work(scene):
        return _polls_beside_work(work, rest[:2], scene)
    paused = scene.paused
    held = scene.gauge(r"num_paused_reqs$") or 0
    empty = running == 0 and waiting == 0
    against = [*health.doubts(scene), *health.was_open(scene)]
    silent, unread = health.unseen(scene), health.unread(scene)
    return finding(
        "HEALTHY_IDLE",
        SHOWN if empty and not (against or silent or unread) and bool(paused) >= bool(held) else LIKELY,
        f"Idle: {_who(scene, rest) if rest else 'the loop'} poll{'s' if len(rest) <= 1 else ''} for work"
        + (
            f", paused on request with {held:g} requests held."
            if paused or held
            else ", nothing runs and nothing waits."
            if empty
            else "; whether requests are open is not in the evidence."
        ),
        [*(r.stacks[-1] for r in [*rest[:2], *waits[:1]]), *rows[:2], *gauges(scene), *scene.batches[-1:]],
        ranks=places(ranks),
        mechanism="busy polling by design: 100 % CPU is expected"
        if top or any(r.at.active for r in rest)
        else "waiting for the next request",
        likely=[f"{f.src}: {f.says()}: not what an idle engine shows" for f in against[:3]]
        + [f"nothing counts the requests of {role}" for role in silent]
        + [f"nothing counts the requests in {role}'s queues of transfers" for role in unread],
        decoys=["broadcast on the other ranks waits for the entry rank's next list: the idle picture, not a desync"]
        if waits
        else [],
        next_checks=[]
        if empty
        else ["running and waiting requests (/metrics, /v1/loads): with open requests this picture is a lost message"],
        workaround="--sleep-on-idle" if any(e.family == "sglang" for e in scene.engines) else "",
    )


def _between(own: Scene, r: RankView) -> bool:
    """Whether this rank's loop turns although its engine's gauges count nothing: it polls, wherever a dump finds it."""
    return r.at.kind != "unknown" and not _waits_at_the_head(r) and bool(own.turning) and own.requests == (0.0, 0.0)


def _waits_at_the_head(r: RankView) -> bool:
    """For requests, which its group's first rank or the stage before it hands on."""
    return (r.at.op, r.at.site) == ("broadcast", "loop_head") or _waits_for_first_stage(r)


def _who(scene: Scene, ranks: list[RankView]) -> str:
    """The ranks by name; of a pair, with their engines' names."""
    by = {e.name: [r for r in e.ranks.values() if r in ranks] for e in scene.engines}
    if len(by) < 2 or len(by) < len(scene.engines):
        return labels(ranks)
    return "; ".join(f"{labels(found)} of {name or 'an engine'}" for name, found in by.items() if found)


def _waits_for_first_stage(r: RankView) -> bool:
    """A later pipeline stage at the head of its loop: it takes its requests from the stage before."""
    return bool(r.who.pp) and r.at.kind == "p2p" and r.at.op.startswith("recv") and "recv_requests" in r.at.path


def _polls_beside_work(work: list[Fact], rest: list[RankView], scene: Scene) -> Finding:
    """Loops that poll while requests are in a queue on their way: for a moment that is how a hand-over looks."""
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        f"The loops poll for work while requests are open elsewhere ({work[0].says()}): a hand-over under way, or one that stands.",
        [*work[:4], *(r.stacks[-1] for r in rest), *gauges(scene)],
        ranks=places(rest),
        decoys=["0 running and 0 waiting is not idle while another queue holds requests"],
        next_checks=[
            "the same queue a minute later: does it change, does the token counter?",
            "the peer's matching queue, and the transfer backend's helper threads",
        ],
    )


def _unfinished(scene: Scene) -> list[Event]:
    return scene.events("worker_died", "engine_dead", "rpc_timeout", "child_crashed", "oom_kill")


@rule(72, "NOT_HUNG_SLOW_OR_CAPACITY", "tokens flow, and what arrives is blank")
def blank_output(scene: Scene) -> Finding | None:
    gen = scene.gen_after(None)
    chunks = scene.events("chunk")
    blank = [c for c in chunks if c.get("blank")]
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
    return None


@rule(72, "NOT_HUNG_SLOW_OR_CAPACITY", "tokens flow")
def tokens_flow(scene: Scene) -> Finding | None:
    gen = scene.gen_after(None)
    side = side_of(scene, scene.moving_counters)
    # A prefill engine counts what it takes in: that says nothing of decode, which makes the tokens.
    if side != "prefill" and any("tokens" in m.name for m in scene.moving_counters):
        return finding(
            "NOT_HUNG_SLOW_OR_CAPACITY",
            LIKELY,
            f"Token counters{f' of {side}' if side else ''} grow between the scrapes: the engine works.",
            [*scene.moving_counters[:3], *gen[-2:]],
            engine=side,
            shown=["a counter that grows is progress"],
            next_checks=["which request or client does not get its answer?"],
        )
    # A line of prefill beside them says nothing of what decode does; one of vLLM's may show a prompt at work.
    lines = [b for b in scene.batches if b.kind != "prefill_batch"]
    gen = [b for b in lines if b.num("gen") or b.num("prompt")]
    last = lines[-1] if lines else None
    if len(gen) < 2 or last is not gen[-1]:
        return None
    if scene.stalls or scene.hints or scene.engines or scene.failed_dumps:
        return None
    queue = last.num("queue") or last.num("waiting") or 0
    retracts = scene.events("retract")
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        LIKELY,
        f"Tokens flow up to the last batch line ({last.num('gen') or last.num('prompt'):g} token/s, {last.num('running') or 0:g} running, {queue:g} waiting)"
        + (", with retractions: the pool is too small for the load." if retracts else "."),
        [*gen[-3:], *retracts[:2]],
        mechanism="load or a slow request, not a standstill",
        next_checks=["which request does not finish?", "two scrapes of the counters a minute apart"],
    )


_CHUNKS = 3  # batches of prefill that are no last sign of an engine that then stood


@rule(73, "NOT_HUNG_SLOW_OR_CAPACITY", "prompts are taken in for minutes, and decode has nothing to do")
def prefill_goes_on(scene: Scene) -> Finding | None:
    """Of an engine that does both: what an engine takes in that only prefills says nothing of the one that decodes."""
    lines = scene.batches
    decoded = max((i for i, b in enumerate(lines) if b.kind != "prefill_batch"), default=-1)
    last = lines[decoded + 1 :]
    times = sorted({b.time for b in last if b.time is not None and (b.num("new_tokens") or 0) > 0})
    if len(times) < _CHUNKS or times[-1] - times[0] < MINUTE or any(scene.role_of(b) for b in lines):
        return None
    if scene.flag("disaggregation-mode"):
        return None
    if any(b.num("running") != 0 for b in last) or scene.silence():
        return None  # requests that run make no tokens meanwhile: that is not decided by what prefill does
    if scene.stalls or scene.engines or scene.failed_dumps:
        return None
    failed = scene.events("health_failed", "probe_failed")
    return finding(
        "NOT_HUNG_SLOW_OR_CAPACITY",
        LIKELY,
        f"Prompts are taken in up to the last batch line ({len(last)} batches of prefill in {times[-1] - times[0]:.0f} s, {last[-1].num('queue') or 0:g} waiting): long prompts, chunk by chunk, and nothing to decode.",
        [*last[:1], *last[-2:], *failed[-2:]],
        mechanism="a long prompt is computed in chunks; others, and probes that generate, wait for it in line",
        shown=[f"{len(times)} batches with new tokens"],
        likely=["that these are chunks of few long prompts: the lines do not name requests"],
        decoys=["no token comes out, and probes fail, while a prompt is taken in"] if failed else [],
        next_checks=["does the first token of that request come?", "length of the prompts, size of a chunk"],
        workaround="a limit on the length of prompts; a longer probe time-out",
    )
