# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Entry ranks and pipeline stages that the others wait for."""

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    DEVICE,
    WAITS,
    engine_name,
    finding,
    labels,
    places,
    stall_words,
    sure,
)
from closeranks.diagnose.scene import EngineView, RankView, Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(
    23, "FRONTEND_OR_CPU_BOUND STARTUP", "an entry rank blocked in I/O; the others wait for it at the head of the loop"
)
def blocked_entry_rank(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        blocked = engine.at("blocking_io")
        if not blocked:
            continue
        others = [r for r in engine.ranks.values() if r not in blocked]
        r = blocked[0]
        if any(o.at.site == "startup" for o in others):
            return _fetches_in_startup(engine, blocked, others)
        own = scene.only(engine)
        progress = own.gen_after(None)
        # Every loop writes its log, and may ask a peer: one dump that finds it there shows nothing, and lines that go on
        # at their pace speak against it.
        again = len(r.stacks) > 1 and not r.moving
        slowed = _slowed(progress)
        stays = (again or slowed or bool(own.stalls or own.hints)) and not own.live and r.at.site != "log_write"
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            SHOWN if stays and others and all(o.at.kind in WAITS for o in others) else LIKELY,
            f"{r.label} is blocked in I/O on its scheduler thread ({r.at.where}); {labels(others) or 'nobody else'} wait{'s' if len(others) == 1 else ''} for it. Not a desync: it has skipped nothing.",
            [
                *(x.stacks[-1] for x in engine.ranks.values()),
                *scene.batches[-2:],
                *scene.events("peer_fetch_failed")[:1],
            ],
            engine=engine_name(engine),
            ranks=places(engine.ranks.values()),
            mechanism="a synchronous call to a peer that does not answer holds the loop for its time-out, again and again",
            shown=[f"{r.stacks[-1].src}: {r.at.op} under {r.at.path[min(3, len(r.at.path) - 1)]}"]
            + ([f"batch lines go on: {progress[-1].src}"] if progress else []),
            decoys=["broadcast on the others is only waiting for this rank"],
            next_checks=["the address it connects to: is that peer alive?", "a second dump: does the frame change?"],
            workaround="remove the dead peer's address; restore its route",
        )
    return None


def _slowed(lines: list[Event]) -> bool:
    """Whether tokens come several times slower in the last two lines than before, with as many requests running."""
    if len(lines) < 3:
        return False
    last = max(b.num("gen") or 0.0 for b in lines[-2:])
    running = min(b.num("running") or 0.0 for b in lines[-2:])
    best = max((b.num("gen") or 0.0 for b in lines[:-2] if (b.num("running") or 0.0) <= running * 1.25), default=0.0)
    return best >= 4 * last


def _fetches_in_startup(engine: EngineView, blocked: list[RankView], others: list[RankView]) -> Finding:
    return finding(
        "STARTUP",
        LIKELY,
        f"{labels(blocked)} {'is' if len(blocked) == 1 else 'are'} in I/O ({blocked[0].at.where}) while {labels(others)} wait in start-up ({others[0].at.where}).",
        [r.stacks[-1] for r in [*blocked[:2], *others[:2]]],
        engine=engine_name(engine),
        ranks=places(engine.ranks.values()),
        mechanism="one rank loads or fetches something for all; the others wait at the next barrier",
        next_checks=["a second dump: does that rank move?", "network and disk counters of its host"],
        workaround="fetch weights before the start, to local storage",
    )


@rule(27, "UNMATCHED_COLLECTIVE_OR_P2P PP_STALL", "pipeline stages that wait for each other in different slots")
def pipeline_slots(scene: Scene) -> list[Finding]:
    out = []
    for engine in scene.engines:
        stages = {pp: ranks for pp, ranks in engine.by_stage().items() if pp is not None}
        if len(stages) < 2:
            continue
        waits = {
            pp: [r for r in ranks if r.at.kind in ("p2p", "p2p_device", "collective", "collective_device")]
            for pp, ranks in stages.items()
        }
        if not all(waits[pp] for pp in stages):
            continue
        firsts = {pp: ranks[0] for pp, ranks in waits.items()}
        ats = [r.at for r in firsts.values()]
        if len({(a.op, a.path[1:4]) for a in ats}) == 1 and all(a.kind.startswith("collective") for a in ats):
            continue
        if not any(a.site == "pp" or a.kind.startswith("p2p") for a in ats):
            continue
        mixed = any(a.kind.startswith("collective") for a in ats) and any(a.kind.startswith("p2p") for a in ats)
        slots = [c for c in scene.collectives if c.p2p]
        receivers = all("recv" in a.op or a.op == "broadcast" for a in ats)
        # A collective of another kind may wait for its own stage, or for ranks that have no dump.
        own = all(a.site == "pp" or a.kind.startswith("p2p") for a in ats)
        cls = "UNMATCHED_COLLECTIVE_OR_P2P" if mixed else "PP_STALL"
        out.append(
            finding(
                cls,
                sure(scene, engine) if own else LIKELY,
                (
                    "All stages wait to receive: a circular wait"
                    if receivers
                    else "Stages stand in different slots of the pipeline"
                )
                + ("; one of them in an operation that nobody answers." if mixed else "."),
                [*(r.stacks[-1] for r in firsts.values()), *slots[:2], *scene.stalls[:1]],
                engine=engine_name(engine),
                ranks=places(engine.ranks.values()),
                mechanism="a receive was posted whose send is missing on the other stage"
                if mixed
                else "each stage chose its own next micro-batch, so their sends and receives no longer pair",
                shown=[*(f"PP{pp}: {r.at.where}" for pp, r in firsts.items()), *stall_words(scene)[:1]],
                likely=[f"point-to-point sequences differ: {', '.join(str(c.seq) for c in slots[:4])}"]
                if len({c.seq for c in slots}) > 1
                else [],
                decoys=[
                    "no stage is slow: each waits for the other",
                    *(
                        ["'No available shared memory broadcast block' mentions compilation; it is only a symptom"]
                        if scene.has("shm_wait")
                        else []
                    ),
                ],
                next_checks=[
                    "batch lines of all stages aligned by order, not by time: the first that differs",
                    "aborts and prefetch completions per stage just before",
                ],
            )
        )
    return out


@rule(55, "UNMATCHED_COLLECTIVE_OR_P2P PP_STALL", "some pipeline stages wait for one that does not wait for them")
def waits_for_a_stage(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        own = scene.only(engine)
        ranks = list(engine.ranks.values())
        waiting = [
            r
            for r in ranks
            if r.who.pp is not None
            and (r.at.kind == "p2p" or (r.at.kind in WAITS and r.at.site == "pp"))
            and "recv_requests" not in r.at.path  # the head of the loop: a stage without work
        ]
        rest = [r for r in ranks if r not in waiting]
        if not waiting or not rest or not own.stalls or own.live or len(engine.by_stage()) < 2:
            continue
        idle = all(r.at.kind == "idle" for r in rest)
        if not idle and not all(r.at.kind in ("running", "lock", "kernel_call", *DEVICE) for r in rest):
            continue
        return finding(
            "UNMATCHED_COLLECTIVE_OR_P2P" if idle else "PP_STALL",
            LIKELY,
            f"{labels(waiting)} wait{'s' if len(waiting) == 1 else ''} for another stage ({waiting[0].at.where}); {labels(rest)} {'has nothing to do' if idle else f'stands in {rest[0].at.where}'}.",
            [*(r.stacks[-1] for r in [*waiting[:2], *rest[:2]]), *own.stalls[:1]],
            engine=engine_name(engine),
            ranks=places(ranks),
            missing=[r.label for r in rest],
            mechanism="a receive was posted whose send the other stage never makes: it waits for its next order"
            if idle
            else "a stage that does not come hands nothing on; the others wait in line behind it",
            decoys=["the stages that wait are not at fault"],
            next_checks=["a second dump: does that stage move?", "batch lines of all stages aligned by order"]
            if idle
            else ["nvidia-smi utilisation and power of that stage's GPU", "a second dump: does that stage move?"],
        )
    return None
