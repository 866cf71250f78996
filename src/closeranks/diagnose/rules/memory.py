# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Processes that the kernel or a supervisor killed for memory."""

import re

from closeranks.diagnose import health
from closeranks.diagnose.facts import Event, Fact, Setting
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._life import concerns
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.rules.dead import absent_ranks
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.scene.past import MINUTE
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding

_RANK_TASK = re.compile(r"^(sglang::sched|VLLM::Work|VLLM::Engine|ray::|vllm|trtllm|mpi4py)")


# Processes of an engine that take part in no collective: what ranks send them goes nowhere.
_HELPER_TASK = re.compile(r"^(sglang::(?:detok|data_p|tokeni|http)|VLLM::APIServ)")


_OTHER_TASK = re.compile(
    r"^(lmcache|mooncake|etcd|redis|nats|infinistore|memcached|minio|aibrix|dynamo|consul|kvstore|lm_?server)"
)


# Servers that are there for engines alone.
_CACHE_TASK = re.compile(r"^(lmcache|mooncake|infinistore|aibrix|dynamo|kvstore|lm_?server)")


_MISSED = ("shm_wait", "worker_died", "child_crashed", "health_failed", "teardown", "peer_closed", "store_lost", "engine_dead", "exit_code")  # fmt: skip
_PYTHON = re.compile(r"^(python|pt_main|pt_)")


@rule(
    4,
    "DEAD_PEER IPC_OR_EXTERNAL_LOST",
    "the kernel killed a process for memory: a rank, or a server that the engine depends on",
)
def killed_for_memory(scene: Scene) -> Finding | None:
    kills = scene.events("oom_kill")
    killed = [e for e in kills if e.get("task")]
    for e in killed:
        task = str(e.get("task"))
        if (seen := scene.sequel(e)) is not None and seen.span >= MINUTE:
            continue  # an engine that goes on was not meant
        if _OTHER_TASK.match(task) or _HELPER_TASK.match(task):
            tied, felt = _depends_on(scene, task), _parked(scene)
            helper = bool(_HELPER_TASK.match(task))
            return finding(
                "IPC_OR_EXTERNAL_LOST",
                SHOWN if felt and (tied or helper) else LIKELY,
                f"{task} (pid {e.get('pid')}), which the engine {'depends' if tied or helper else 'may depend'} on, was killed for memory.",
                [e, *scene.stacks[:2], *_waiting(scene)],
                # Ranks that wait for each other do not wait for a server, and many hosts have one that is nobody's.
                stage=None if felt or helper or (tied and not scene.engines) else 47,
                ranks={r.label: r.at.where for g in scene.engines for r in g.ranks.values()},
                trigger=f"out of memory: {task} killed",
                mechanism="a completion that the dead server owed never arrives; the request stays parked and the ranks stay idle",
                shown=[f"{e.src}: the kernel killed {task}"],
                decoys=["the ranks' stacks look idle: with a request waiting that is a lost message, not health"],
                next_checks=["is that process running again, and did the engine reconnect to it?"],
                workaround=f"restart {task} and the engine; give {task} a memory limit of its own",
            )
        if _RANK_TASK.match(task) or _PYTHON.match(task):
            if not concerns(scene, e):
                continue
            gone = absent_ranks(scene)
            # The kernel's log reaches back further than the engine: something must show that the rank is missed.
            missed = scene.stalls or scene.hints or any(scene.has(k) for k in _MISSED)
            named = bool(_RANK_TASK.match(task))
            # A task's name tells that it was some engine's. That it was this one's: the rank is not there.
            known = named and bool(missed) and bool(_without_dump(scene))
            pool = scene.events("host_pool")
            asked = sum(p.num("gb") or 0 for p in pool)
            size = scene.flag_number("tp", "tp-size")
            absent = f": {', '.join(gone)}" if gone else ""
            note = f" {len(pool)} ranks had asked for {asked:g} GB of host memory" if pool else ""
            note += f", {size} were to" if pool and size and size > len(pool) else ""
            return finding(
                "DEAD_PEER",
                SHOWN if known or (named and gone) else LIKELY,
                f"A rank was killed for memory ({task}, pid {e.get('pid')}){absent}.{note}",
                [e, *pool[:2], *scene.events("ps_listing")],
                missing=gone,
                trigger="out of memory",
                mechanism="the others wait for a rank that no longer exists",
                shown=[f"{e.src}: the kernel killed {task}"]
                + ([f"{', '.join(gone)} absent from the process list"] if gone else []),
                next_checks=[
                    "memory limit of the container against host pools, pinned buffers and weights of all ranks"
                ],
                workaround="a smaller host pool (--hicache-size, --hicache-ratio) or a larger memory limit",
            )
    unnamed = [*(e for e in kills if not e.get("task")), *scene.events("killed_for_memory")]
    if unnamed:
        words = "A process was killed for memory; which one is not in the evidence."
        checks = ["dmesg of that host: which process, which limit"]
        return finding("DEAD_PEER", LIKELY, words, unnamed[:3], trigger="out of memory", next_checks=checks)
    for e in scene.events("exit_code"):
        if e.get("reason") == "OOMKilled":
            return finding(
                "DEAD_PEER",
                LIKELY,
                "A container of the engine was killed for memory.",
                [e],
                trigger="out of memory",
                next_checks=["kubectl describe pod, dmesg: which process, which limit"],
            )
    return None


def _without_dump(scene: Scene) -> bool:
    """Whether some rank has no dump, with others that have one or without."""
    return not scene.engines or any(e.missing for e in scene.engines)


def _depends_on(scene: Scene, task: str) -> bool:
    """Whether anything besides the kill speaks of that server: a flag, a variable, a frame; or it is one by its name."""
    if _CACHE_TASK.match(task):
        return True
    stem = re.split(r"[^a-z]", task.lower())[0]
    told = [f"{s.name} {s.value}".lower() for s in scene.of(Setting) if s.kind in ("flag", "env")]
    frames = {f.file.lower() for s in scene.stacks for t in s.threads for f in t.frames[:12]}
    return len(stem) > 2 and any(stem in text for text in (*told, *frames))


def _parked(scene: Scene) -> list[Fact]:
    """Signs that requests wait for something outside the ranks: open work or failed probes while ranks wait for work."""
    ranks = [r for e in scene.engines for r in e.ranks.values()]
    if not all(
        r.at.kind in ("idle", "wait_workers") or (r.at.op, r.at.site) == ("broadcast", "loop_head") for r in ranks
    ):
        return []
    return [*_waiting(scene), *scene.events("health_failed"), *health.open_work(scene)]


def _waiting(scene: Scene) -> list[Event]:
    return [b for b in scene.batches[-1:] if (b.num("waiting") or b.num("queue") or 0) > 0]
