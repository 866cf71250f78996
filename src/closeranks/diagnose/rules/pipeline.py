# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Entry ranks and pipeline stages that the others wait for."""

from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    WAITS,
    engine_name,
    finding,
    labels,
    places,
    stall_words,
    sure,
)
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(23, "FRONTEND_OR_CPU_BOUND", "an entry rank blocked in I/O; the others wait for it at the head of the loop")
def blocked_entry_rank(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        blocked = engine.at("blocking_io")
        if not blocked:
            continue
        others = [r for r in engine.ranks.values() if r not in blocked]
        if any(r.at.kind in WAITS and r.at.site != "loop_head" for r in others):
            # They wait for the blocked rank all the same: it has not skipped anything, it has not come yet.
            pass
        r = blocked[0]
        progress = scene.gen_after(None)
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            # Every loop writes its log: one dump that finds it there shows nothing.
            SHOWN if all(o.at.kind in WAITS for o in others) and r.at.site != "log_write" else LIKELY,
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
