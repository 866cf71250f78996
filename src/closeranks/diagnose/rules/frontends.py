# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Work on the CPU that holds requests up while the engine is well: frontends, grammars, limits of a container."""

from closeranks.diagnose.clock import time_of_day
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import engine_name, finding, gauges, places
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.stacks import compiles_grammar, position
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding


@rule(
    57,
    "FRONTEND_OR_CPU_BOUND",
    "the engine core works on the CPU, or a thread of it compiles a grammar, while workers idle",
)
def core_works_on_cpu(scene: Scene) -> Finding | None:
    for engine in scene.engines:
        ranks = list(engine.ranks.values())
        busy = [r for r in ranks if r.who.kind in ("engine_core", "scheduler") and r.at.kind == "host_work"]
        grammar = next((w for r in ranks if (w := compiles_grammar(r.stacks[-1]))), "")
        rest = [r for r in ranks if r not in busy]
        if not (busy or grammar) or scene.only(engine).live or _still_flows(scene):
            continue
        if not all(r.at.kind == "idle" or (r.at.op, r.at.site) == ("broadcast", "loop_head") for r in rest):
            continue
        who = busy[0].label if busy else "A helper thread"
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            LIKELY,
            f"{who} works on the CPU in {busy[0].at.where if busy else grammar}; {'the workers wait' if rest else 'nothing else runs'}.",
            [*(r.stacks[-1] for r in [*busy[:1], *ranks[:2]]), *gauges(scene)],
            engine=engine_name(engine),
            ranks=places(ranks),
            mechanism="a grammar is compiled before its request can be scheduled"
            if grammar or "compile" in busy[0].at.op
            else "the loop's own thread works, so nothing is scheduled meanwhile",
            decoys=["idle workers look like a lost message"],
            next_checks=["a second dump after 10 s: the same frame?", "the schema or input of the request that waits"],
            workaround="a simpler schema, or a limit on the time that a compilation may take" if grammar else "",
        )
    return None


def _still_flows(scene: Scene) -> bool:
    """Whether tokens flowed at the end, as far as logs tell: not if the same log complains of silence after the last."""
    flows = scene.gen_after(None)
    later = [
        e
        for e in [
            *scene.events("health_failed", "watchdog"),
            *(h for h in scene.events("http") if h.get("status") == 503),
        ]
        if any(e.src.file == b.src.file for b in flows)
        and not any(b.src.file == e.src.file and b.src > e.src for b in flows)
    ]
    return bool(flows) and not later


@rule(
    56,
    "FRONTEND_OR_CPU_BOUND",
    "the API process, tokenizer, detokenizer or a compiler of grammars holds things up; the engine is well",
)
def frontend_blocked(scene: Scene) -> Finding | None:
    bars = [e for e in scene.events("bar") if e.get("work") == "grammar"]
    if bars and (bars[-1].num("percent") or 0) < 100:  # a bar that is full is a compilation that ended
        later = [b for b in scene.gen_after(None) if b.src.file == bars[-1].src.file and b.src > bars[-1].src]
        return finding(
            "FRONTEND_OR_CPU_BOUND",
            SHOWN if not later else LIKELY,
            f"A schema or grammar is being compiled on the CPU ({bars[-1].get('percent')} %); requests wait for it.",
            [*bars[:1], *bars[-1:], *scene.batches[:2]],
            mechanism="compilation of a complex schema runs before the request is counted as running or waiting",
            shown=["a progress bar of the compilation"],
            decoys=["0 running and 0 pending looks idle"],
            next_checks=["does the bar move?"],
            workaround="a backend that compiles lazily (xgrammar); a simpler schema",
        )
    for kind in ("api", "launcher", "detokenizer", "dp_controller", "router"):
        for s in scene.processes_by_kind.get(kind, ()):
            at = position(s.main)
            if any(position(o.main).where != at.where for o in scene.processes_by_kind[kind] if o.pid == s.pid):
                continue  # two dumps differ: it moves
            if at.kind not in ("host_work", "running", "blocking_io", "compile") or (
                at.kind == "running" and not at.active
            ):
                continue
            if kind == "launcher" and not {"run_forever", "_run_once", "run_until_complete"} & set(at.path):
                continue  # a launcher that serves no requests
            failed = scene.events("health_failed", "probe_failed", "container_killed")
            t = min((e.time for e in failed if e.time is not None), default=None)
            progress = scene.gen_after(None)
            if at.kind == "running" and not progress:
                continue
            return finding(
                "FRONTEND_OR_CPU_BOUND",
                # Such work is what a detokenizer is for: one dump cannot tell whether there is too much of it.
                SHOWN if failed and at.kind == "host_work" and len(progress) >= 2 and kind != "detokenizer" else LIKELY,
                f"The {kind} process is busy in {at.where}{' and holds the GIL' if s.main and s.main.gil else ''}; the engine {'decodes on' if progress else 'is not at fault'}.",
                [s, *progress[-2:], *scene.events("probe_failed", "health_failed", "container_killed")[:2]],
                ranks={kind: at.where},
                mechanism="synchronous work in an event loop: nothing else of that process is served meanwhile, probes included",
                shown=[f"{len(progress)} batch lines with tokens{' during the failures' if t is not None else ''}"]
                if progress
                else [],
                decoys=["a failed probe is no engine fault here"],
                next_checks=["a second dump: the same frame?"],
                workaround="a longer liveness time-out; more tokenizer workers (--tokenizer-worker-num)",
            )
    failed = [e for e in scene.events("health_failed") if e.get("tic") and e.time is not None]
    for e in failed:
        tic = time_of_day(str(e.get("tic")))
        if tic is not None and e.time is not None and 90 < (e.time % 86400) - tic < 43200 and scene.gen_after(None):
            return finding(
                "FRONTEND_OR_CPU_BOUND",
                LIKELY,
                f"The API's event loop was frozen: a 20 s check was reported {(e.time % 86400) - tic:.0f} s after it began.",
                [e, *scene.batches[-2:]],
                mechanism="synchronous work in the event loop",
                next_checks=["py-spy dump of the API process while it happens"],
            )
    return None


@rule(71, "FRONTEND_OR_CPU_BOUND", "a CPU limit holds the processes back in most of its periods")
def held_back_by_limit(scene: Scene) -> Finding | None:
    periods, held = scene.events("cpu_periods"), scene.events("cpu_throttled")
    if not periods or not held:
        return None
    if len(periods) > 1 and len(periods) == len(held):  # two readings: what happened between them counts
        all_, part = (abs((e[-1].num("n") or 0) - (e[0].num("n") or 0)) for e in (periods, held))
    else:
        all_, part = periods[-1].num("n") or 0, held[-1].num("n") or 0
    if not all_ or part < all_ / 2:
        return None
    return finding(
        "FRONTEND_OR_CPU_BOUND",
        LIKELY,
        f"The CPU limit of the container holds its processes back in {part / all_:.0%} of its periods.",
        [periods[-1], held[-1], *scene.batches[-2:]],
        mechanism="schedulers, tokenizers and pollers share a quota of CPU time; each waits for the next period, and with it all ranks",
        decoys=["devices are at work or at rest, and no rank waits for another for long"],
        next_checks=["cpu.stat twice, a minute apart", "number of busy threads against the limit"],
        workaround="no CPU limit, or at least one core per process and some more",
    )


@rule(57, "FRONTEND_OR_CPU_BOUND", "a full accept queue, or many connections whose data is not read")
def nobody_accepts(scene: Scene) -> Finding | None:
    full, unread = scene.events("accept_queue_full"), scene.events("unread_connections")
    # A pid is told where ss ran with the right to see it; then it must be a process that serves.
    heads = {p.pid for p in scene.processes if p.who and p.who.kind in _SERVE} | {
        s.pid for kind in _SERVE for s in scene.processes_by_kind.get(kind, ())
    }
    found = [e for e in (*full, *unread) if not heads or e.get("pid") in heads | {0}]
    if not found:
        return None
    e = found[0]
    what = (
        f"its accept queue is full ({e.get('waiting')} of {e.get('limit')})"
        if e.kind == "accept_queue_full"
        else f"{e.get('n')} connections hold data that it has not read"
    )
    return finding(
        "FRONTEND_OR_CPU_BOUND",
        LIKELY,
        f"The process that answers requests does not take what clients send: {what}.",
        [*found[:3], *gauges(scene)],
        mechanism="its event loop is held up, or the process does not run: requests never reach the engine, whose queues are empty",
        decoys=["nothing runs and nothing waits: of what is not read no engine knows"],
        next_checks=[
            "py-spy dump of the process that listens, twice",
            "ss again after a few seconds: do the queues shrink?",
        ],
    )


_SERVE = ("api", "launcher", "router")
