# ruff: noqa: E501 - sentences stay in one piece, so that a search finds them
"""What vLLM's statistics lines alone tell of an engine that runs nothing while requests wait."""

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, Finding

LASTS_S = 120.0  # a queue is caught before its next step for a moment, not for minutes
FULL = 50.0  # per cent of the KV cache


@rule(54, "SCHEDULER_LIVELOCK REQUEST_LEAK", "statistics of minutes: requests wait, nothing runs")
def nothing_is_admitted(scene: Scene) -> Finding | None:
    lines = _last_run(scene)
    if len(lines) < 3 or scene.paused or scene.has("shm_wait", "rpc_timeout", "kv_expired"):
        return None
    times = [e.time for e in lines if e.time is not None]
    if times and max(times) - min(times) < LASTS_S:
        return None
    last = lines[-1]
    waiting, deferred, kv = last.num("waiting") or 0, last.num("deferred") or 0, last.num("kv") or 0
    said = f"{waiting:g} requests wait and none runs over {len(lines)} lines"
    if kv >= FULL:
        return finding(
            "REQUEST_LEAK",
            LIKELY,
            f"{said}, while {kv:g} % of the KV cache is held: by requests that do not run, or by nobody.",
            [*lines[:2], last],
            mechanism="pages are kept for requests that ended, or wait for something outside; nothing that waits fits beside them, so nothing frees them",
            decoys=["a full cache without a running request is no load"],
            next_checks=[
                "waiting requests by reason (num_requests_waiting_by_reason)",
                "aborts and KV loads before the last running request",
            ],
            workaround="restart the engine",
        )
    limit = scene.flag_number("max-num-seqs")
    grows = waiting > (lines[0].num("waiting") or 0)
    slots = limit is not None and deferred >= limit
    if not grows and not slots:
        return None  # the lines repeat a core's last word: whether its loop turns is not in them
    return finding(
        "SCHEDULER_LIVELOCK",
        LIKELY,
        f"{said}, with {100 - kv:g} % of the KV cache free: "
        + (
            f"{deferred:g} deferred requests take all {limit} places."
            if slots
            else "the queue grows, so the loop turns, and it admits nothing."
        ),
        [*lines[:2], last, scene.flag("max-num-seqs")],
        mechanism="deferred requests count against the limit and never become ready"
        if slots
        else "a condition of admission is false on every turn",
        decoys=["an answering /health"] if scene.has("http") else [],
        next_checks=[
            "waiting requests by reason (num_requests_waiting_by_reason)",
            "length of the request at the head against the cache's size",
        ],
        workaround="restart; cancel the request at the head of the queue",
    )


def _last_run(scene: Scene) -> list[Event]:
    """The last lines, in a row, of one engine that runs nothing, computes nothing, and has requests waiting."""
    out: list[Event] = []
    stats = scene.events("vllm_stats")
    for e in reversed(stats):
        if e.get("engine") != stats[-1].get("engine") or e.src.file != stats[-1].src.file:
            continue
        if e.num("running") or not e.num("waiting") or e.num("gen") or e.num("prompt"):
            break
        out.insert(0, e)
    return out
