# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Main threads of one group in the same place."""

from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import (
    DEVICE,
    engine_name,
    finding,
    labels,
    places,
    stall_words,
)
from closeranks.diagnose.scene import EngineView, Scene
from closeranks.diagnose.stacks import same_call
from closeranks.diagnose.verdict import LIKELY, UNDETERMINED, Finding


@rule(60, "SYMMETRIC_WAIT UNDETERMINED", "all ranks of an engine wait in the same place")
def same_place(scene: Scene) -> list[Finding]:
    out = []
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        kinds = {r.at.kind for r in ranks}
        if len(ranks) < 2 or len(kinds) > 1 or any(r.moving for r in ranks) or scene.only(engine).live:
            continue
        kind = next(iter(kinds))
        if kind not in ("collective", "p2p", "lock", *DEVICE) or (kind == "lock" and not scene.stalls):
            continue
        at = ranks[0].at
        if len({(r.at.op, r.at.site) for r in ranks}) > 1 or not all(same_call(at, r.at) for r in ranks):
            continue
        if (at.op, at.site) == ("broadcast", "loop_head"):
            continue
        if at.site == "dp_sync" and scene.requests == (0, 0) and not scene.stalls:
            out.append(_round_without_work(scene, engine))
            continue
        device = kind in DEVICE
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


def _round_without_work(scene: Scene, engine: EngineView) -> Finding:
    ranks = list(engine.ranks.values())
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        f"{labels(ranks)} are in the batch synchronisation of data-parallel attention ({ranks[0].at.where}), which an idle loop enters on every turn; nothing runs and nothing waits.",
        [*(r.stacks[-1] for r in ranks[:3])],
        stage=63,
        engine=engine_name(engine),
        ranks=places(ranks),
        next_checks=[
            "context switches of all main threads over 2 s, or scheduler_stage_seconds_total twice: does the loop turn?"
        ],
    )


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
