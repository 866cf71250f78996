# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Main threads of one group in different places."""

from closeranks.diagnose.facts import Event, Thread
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
from closeranks.diagnose.rules._places import Place, groups, places_of, site_words, sized_by_rank
from closeranks.diagnose.scene import EngineView, RankView, Scene
from closeranks.diagnose.stacks import CONTROL, mode_of
from closeranks.diagnose.verdict import LIKELY, SHOWN, UNDETERMINED, Finding


@rule(
    28,
    "DESYNC_DIFFERENT_COLLECTIVE MISSING_PARTICIPANT DESYNC_SAME_OP_SHAPE_OR_SEQ FRONTEND_OR_CPU_BOUND UNDETERMINED",
    "main threads of one group in different operations",
)
def different_places(scene: Scene) -> list[Finding]:
    out: list[Finding] = []
    for engine in scene.engines:
        if scene.only(engine).live:  # dumps of ranks are not simultaneous: a loop that turns can look like this
            continue
        if turned := [r for r in engine.ranks.values() if r.turned]:
            out.append(_turning(engine, turned))
            continue
        for ranks in groups(engine):
            found = _compare(scene, engine, ranks)
            if found is not None:
                out.append(found)
                break
    return out


def _turning(engine: EngineView, turned: list[RankView]) -> Finding:
    return finding(
        "UNDETERMINED",
        UNDETERMINED,
        f"{labels(turned)} went on between the last two dumps: what it waited in completes, and dumps of ranks are not simultaneous.",
        [s for r in turned[:2] for s in r.stacks[-2:]],
        stage=65,
        engine=engine_name(engine),
        ranks=places(engine.ranks.values()),
        decoys=["ranks in different collectives in one round of dumps"],
        next_checks=[
            "a third round, and context switches of all main threads over 2 s between the last two",
            "two scrapes of the counters: do stages or tokens move?",
        ],
    )


def _compare(scene: Scene, engine: EngineView, ranks: list[RankView]) -> Finding | None:
    waiting = [r for r in ranks if r.at.kind in WAITS]
    if not waiting:
        return None
    stand = places_of(waiting)
    elsewhere = [r for r in ranks if r not in waiting]
    # An entry rank that polls for requests while the others wait for its broadcast is the picture of an idle engine.
    if set(stand) <= {Place("broadcast", "loop_head")} and all(r.at.kind == "idle" for r in elsewhere):
        return None
    ep = [r for r in elsewhere if r.at.kind == "ep_dispatch"]
    if ep and len(stand) == 1:
        return _split_by_group(scene, engine, ranks, waiting, ep)
    if len(stand) > 1:
        modes = {mode_of(r.at) for r in waiting}
        if {k.site for k in stand} <= {"forward", ""} and len({k.op for k in stand}) == 1:
            return None if len(modes) < 2 else _desync(scene, engine, ranks, stand, same_op=True)
        return _desync(scene, engine, ranks, stand)
    op, site, _ = next(iter(stand))
    modes = {mode_of(r.at) for r in waiting if mode_of(r.at)}
    if site == "forward" and len(modes) > 1 and not elsewhere:
        return _desync(scene, engine, ranks, stand, same_op=True)
    if not elsewhere or site in ("startup", "pp"):
        return None
    kinds = {r.at.kind for r in elsewhere}
    if kinds <= {"blocking_io", "compile", "unknown", "gil", "nccl_internal", "module_load", "implicit_sync"}:
        return None
    if kinds == {"exiting"} and scene.has("exception", "rank_exception", "fatal", "child_crashed"):
        return None  # their interpreters shut down after an error in the log: a crash, which has a rule of its own
    if site == "loop_head":
        return _late_for_the_loop(scene, engine, ranks, waiting, elsewhere)
    if kinds <= {"device_wait", "device_launch", "kernel_call"} and site == "forward":
        return None
    moving = [r for r in elsewhere if r.moving]
    return finding(
        "MISSING_PARTICIPANT",
        LIKELY,
        f"{labels(waiting)} wait{'s' if len(waiting) == 1 else ''} in {op} ({waiting[0].at.path[min(2, len(waiting[0].at.path) - 1)]}); {labels(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} elsewhere ({elsewhere[0].at.where}).",
        [*(r.stacks[-1] for r in [*waiting[:3], *elsewhere[:3]]), *scene.stalls[:1]],
        stage=29,
        engine=engine_name(engine),
        ranks=places(ranks),
        missing=[r.label for r in elsewhere],
        mechanism="part of the group entered a collective that the rest does not enter",
        shown=[f"{len(waiting)} of {len(ranks)} ranks are in {op}", *stall_words(scene)[:1]],
        likely=[f"{labels(elsewhere)} works on and never coordinates" if not moving else f"{labels(moving)} moves"],
        next_checks=[f"a second dump: does {elsewhere[0].label} move?", "ranks without a dump"]
        if engine.missing
        else [f"a second dump: does {elsewhere[0].label} move?"],
    )


def _desync(
    scene: Scene,
    engine: EngineView,
    ranks: list[RankView],
    where: dict[Place, list[RankView]],
    same_op: bool = False,
) -> Finding:
    head = [r for k, v in where.items() if k.site == "loop_head" for r in v]
    parts = "; ".join(f"{labels(v)} in {k.op}{f' ({site_words(v[0])})'}" for k, v in where.items())
    trigger = _trigger(scene)
    passed = sized_by_rank(where) and not scene.collectives
    one_op = len({k.op for k in where}) == 1  # they differ in who called it, which a line lost from a dump changes, too
    # A collective of the devices does not hold its host: one that stands in it may be blocked below it, in the library.
    below = any(k.site not in (*CONTROL, "loop_head") for k in where)
    certainty = LIKELY if same_op or passed or one_op or below else sure(scene, engine)
    quiet = scene.silence(engine.name)
    own = scene.only(engine)
    return finding(
        "DESYNC_SAME_OP_SHAPE_OR_SEQ" if same_op else "DESYNC_DIFFERENT_COLLECTIVE",
        certainty,
        f"{(engine.name or 'The') + ' engine'}: ranks of one group stand in different {'batches' if same_op else 'collectives'}: {parts}.",
        [
            *(v[0].stacks[-1] for v in where.values()),
            *(r.stacks[-1] for r in ranks[:2]),
            *trigger[:3],
            quiet[0] if quiet else None,
            *own.stalls[:1],
        ],
        engine=engine.name,
        ranks=places(ranks),
        missing=engine.missing,
        ahead=[r.label for r in head],
        mechanism="a rank-local condition decided whether a collective ran"
        + (
            f": {labels(head)} {'passed' if passed else 'skipped'} what the others entered and went on to the next loop's broadcast"
            if head
            else ""
        ),
        trigger=f"likely: {trigger[0].says()} ({trigger[0].src})" if trigger else "",
        shown=stall_words(own, engine.name),
        likely=(["the frame where ranks stand can be one or more collectives after the real divergence"])
        + (
            [
                f"{labels(head) if head else 'ranks ahead'} skipped it, or took part with another number of elements: its size is the length of a rank's own queue"
            ]
            if passed
            else []
        )
        + (
            [
                f"the trigger: logged by {', '.join(sorted({t.who.label for t in trigger if t.who}))}"
                + (f" and not by {', '.join(absent)}" if (absent := _quiet_ranks(engine, trigger)) else "")
            ]
            if trigger
            else []
        ),
        decoys=_decoys(scene, engine, ranks),
        next_checks=(
            [
                "torch's flight recorder of all ranks (TORCH_FR_BUFFER_SIZE): one sequence number with two sizes is that case"
            ]
            if passed
            else []
        )
        + (
            []
            if sure(scene, engine) == SHOWN
            else [
                "context switches and CPU time of all main threads over 2 s: zero on every rank proves it; dumps of a live loop can look like this"
            ]
        ),
    )


def _trigger(scene: Scene) -> list[Event]:
    kinds = (
        "transfer_worker_error",
        "helper_thread_dead",
        "transfer_error",
        "abort",
        "transfer_aborted",
        "peer_blacklisted",
        "retract",
    )
    return next((found for k in kinds if (found := scene.events(k))), [])


def _quiet_ranks(engine: EngineView, trigger: list[Event]) -> list[str]:
    logged = {t.who.label for t in trigger if t.who}
    return [label for label in engine.ranks if label not in logged] if logged & set(engine.ranks) else []


def _decoys(scene: Scene, engine: EngineView, ranks: list[RankView]) -> list[str]:
    out = []
    for r in ranks:
        for t in r.stacks[-1].threads:
            if not t.main and any(f.name in ("all_reduce", "broadcast", "all_gather") for f in t.frames[:2]):
                out.append(
                    f"{r.label}: helper thread running {_runs(t)} is in {t.frames[0].name}; only main threads decide"
                )
    if scene.has("health_failed"):
        out.append("the health check names the detokenizer; it only sees that nothing comes out")
    if [e for e in scene.events("http") if e.get("status") == 200 and str(e.get("path", "")).startswith("/health")]:
        out.append("/health answered 200: an answering port is no evidence")
    return out[:5]


def _runs(thread: Thread) -> str:
    """What a helper thread runs, by its outermost frame that is not threading's own."""
    own = ("run", "_bootstrap", "_bootstrap_inner", "<module>")
    return next((f.name for f in reversed(thread.frames) if f.name not in own), "?")


def _split_by_group(
    scene: Scene, engine: EngineView, ranks: list[RankView], waiting: list[RankView], ep: list[RankView]
) -> Finding:
    return finding(
        "MISSING_PARTICIPANT",
        sure(scene, engine),
        f"{labels(waiting)} wait in {waiting[0].at.op} ({site_words(waiting[0])}); {labels(ep)} are past it in expert dispatch.",
        [*(r.stacks[-1] for r in [*waiting[:2], *ep[:2]]), *scene.stalls[:1]],
        stage=28,
        engine=engine_name(engine),
        ranks=places(ranks),
        missing=[r.label for r in ep],
        ahead=[r.label for r in ep],
        mechanism="a collective on a larger group than the ranks that run it: one data-parallel group enters it, the other has an empty batch and does not",
        shown=[f"the split runs along groups: {labels(waiting)} against {labels(ep)}"],
        likely=["the operation reduces over the whole tensor-parallel group instead of the attention group"],
        decoys=["a time-out of the expert dispatch is downstream"],
        next_checks=["ranks without a dump", "which process group the call uses"],
    )


def _late_for_the_loop(
    scene: Scene, engine: EngineView, ranks: list[RankView], waiting: list[RankView], elsewhere: list[RankView]
) -> Finding | None:
    device = [r for r in elsewhere if r.at.kind in DEVICE]
    if device and len(device) == len(elsewhere):
        return finding(
            "UNDETERMINED",
            UNDETERMINED,
            f"{labels(waiting)} wait at the head of the loop; {labels(elsewhere)} wait{'s' if len(elsewhere) == 1 else ''} for the device ({elsewhere[0].at.where}).",
            [*(r.stacks[-1] for r in [*waiting[:2], *elsewhere[:2]]), *scene.stalls[:1]],
            stage=64,
            engine=engine_name(engine),
            ranks=places(ranks),
            ahead=[r.label for r in waiting],
            likely=["a device operation that only these ranks launched, or one long step"],
            next_checks=["nvidia-smi per GPU", "a second dump", "NCCL watchdog or recorder of all ranks"],
        )
    live = [r for r in elsewhere if r.at.kind in ("running", "host_work", "idle", "compile", "lock")]
    if len(live) == len(elsewhere) and not scene.stalls:
        return None
    if all(r.at.kind == "host_work" for r in elsewhere):
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            LIKELY,
            f"{labels(elsewhere)} works on the CPU ({elsewhere[0].at.where}); the others wait at the head of the loop.",
            [r.stacks[-1] for r in [*elsewhere[:2], *waiting[:2]]],
            stage=29,
            ranks=places(ranks),
            engine=engine_name(engine),
            next_checks=["a second dump: does it move?"],
        )
    if any(r.at.kind in ("p2p", "ep_dispatch", "transfer_wait", "lock") for r in elsewhere):
        return finding(
            "MISSING_PARTICIPANT",
            LIKELY,
            f"{labels(waiting)} wait at the head of the loop for {labels(elsewhere)} ({elsewhere[0].at.where}).",
            [*(r.stacks[-1] for r in [*elsewhere[:2], *waiting[:2]]), *scene.stalls[:1]],
            stage=29,
            ranks=places(ranks),
            missing=[r.label for r in elsewhere],
            engine=engine_name(engine),
            next_checks=["a second dump: does it move?"],
        )
    return None
