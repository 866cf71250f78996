# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Epochs of closeranks' own engines: what their supervisor saw end them. It was there, so nothing is to be guessed."""

import signal
from collections.abc import Iterator

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, SHOWN, Finding

ECHO_S = 60.0
"""An incident that follows another of its engine within so long may be its echo."""
_CRASHES = tuple(-n for n in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
_WAITED = {"stuck": "made no progress", "CollectiveFault": "waited in vain in a collective"}
_STANDS = {
    "stopped": "was stopped by a signal",
    "busy": "went round within one turn of its loop",
    "asleep": "slept within one turn of its loop",
    "silent": "does not run any more, though it is there",
}
_REMOVED = {
    "removed": ("run folder", "seen it hang"),
    "cut_off": ("control socket", "connected to it any more"),
}
_NAMED = {
    "digest": ("DESYNC_SAME_OP_SHAPE_OR_SEQ", SHOWN, "computed something else than the others: its digest differs"),
    "sequence": ("DESYNC_SAME_OP_SHAPE_OR_SEQ", SHOWN, "reported another step than the one that is open"),
    "report": ("DESYNC_SAME_OP_SHAPE_OR_SEQ", SHOWN, "reported what its step does not have"),
    "StepOrderFault": ("DESYNC_SAME_OP_SHAPE_OR_SEQ", SHOWN, "was given a step out of order"),
    "joined_twice": ("STARTUP", SHOWN, "joined twice in one epoch"),
    "unlike_ranks": ("STARTUP", SHOWN, "is unlike the others: another model, layout or page size"),
    "fence_stuck": ("KV_TRANSFER", SHOWN, "did not close its connections in time"),
    "transfer_stuck": ("KV_TRANSFER", SHOWN, "has a transfer that neither ends nor fails"),
    "unreachable": ("KV_TRANSFER", SHOWN, "had hand-overs that all failed at once, where they had worked before"),
    "unproven": (
        "KV_TRANSFER",
        SHOWN,
        "lost its pages to former lives of peers, of which nobody said that they are dead",
    ),
    "check_stuck": ("KV_TRANSFER", SHOWN, "does not come to an end with checking arrived pages"),
    "bad_shares": ("KV_TRANSFER", SHOWN, "got damaged pages again and again"),
    "grammar_stuck": ("RUNTIME_LIBRARY_DEADLOCK", LIKELY, "does not come back from compiling a grammar"),
}


@rule(
    3,
    "DEAD_PEER MISSING_PARTICIPANT CRASH_LOOKS_LIKE_HANG DESYNC_SAME_OP_SHAPE_OR_SEQ KV_TRANSFER STARTUP RUNTIME_LIBRARY_DEADLOCK IPC_OR_EXTERNAL_LOST FRONTEND_OR_CPU_BOUND",
    "closeranks' own incident folder: what ended the epoch",
)
def own_incident(scene: Scene) -> Iterator[Finding]:
    """Of each engine the last trouble in view, told by its first incident: those that follow at once may be its echo."""
    began: dict[str, Event] = {}
    last: dict[str, float] = {}
    for event in sorted(scene.events("incident"), key=lambda e: (e.time or 0.0, e.src)):
        side, at = str(event.get("side")), event.time or 0.0
        if side not in began or at - last[side] > ECHO_S:
            began[side] = event
        last[side] = at
    yield from map(_finding, sorted(began.values(), key=lambda e: (e.time or 0.0, e.src)))


def _finding(event: Event) -> Finding:
    side, process, code = str(event.get("side")), str(event.get("process", "")), event.get("code")
    fault, rank = str(event.get("fault", "")), event.get("rank")
    who = f"rank {rank}" if rank is not None else process.replace("rank", "rank ") or "the engine"
    place = [f"TP{who.removeprefix('rank ')}" if who.startswith("rank ") else who]
    drill = " It was a drill." if event.get("drill") else ""
    step = f" in step {event.get('step')}" if event.get("step") else ""
    more = {
        "engine": side,
        "missing": place,
        "shown": [f"{event.src}: {event.says()}"],
        "next_checks": [
            "closeranks replay on the *.crlog beside it: what the leader had decided until then",
            f"the end of {process or 'leader'}.log beside it",
        ],
    }
    if event.get("how") in _REMOVED:
        what, why = _REMOVED[str(event.get("how"))]
        words = f"The {what} of {side} was removed; its epoch was ended, since nobody could have {why}.{drill}"
        return finding(
            "IPC_OR_EXTERNAL_LOST",
            SHOWN,
            words,
            [event],
            engine=side,
            shown=more["shown"],
            next_checks=["who clears that folder: a cleaner of temporary files, a deployment script"],
        )
    if side == "gateway":
        seen = _STANDS.get(str(event.get("how")), "was ended")
        return finding(
            "FRONTEND_OR_CPU_BOUND" if event.get("how") in _STANDS else "UNDETERMINED",
            SHOWN if event.get("how") in _STANDS else LIKELY,
            f"The gateway {seen}; it was ended with its clients' streams, and started again.{drill}",
            [event],
            mechanism="engines do not notice: what stood still is the process between them and their clients",
            shown=more["shown"],
            next_checks=["gateway.stacks.txt beside it: where its main thread was"],
        )
    if event.get("how") in _STANDS:
        seen = _STANDS[str(event.get("how"))]
        return finding(
            "MISSING_PARTICIPANT",
            SHOWN,
            f"{who} of {side} {seen}; the others waited for it.{drill}",
            [event],
            mechanism="a process that stands still takes part in nothing",
            **more,
        )
    if fault in _WAITED:
        words = f"{who} of {side} {_WAITED[fault]}{step}: itself, or for another that stood still.{drill}"
        return finding(
            "MISSING_PARTICIPANT", LIKELY, words, [event], stage=35, **more | {"missing": []}
        )  # stacks tell who
    if fault in _NAMED:
        cls, certainty, words = _NAMED[fault]
        return finding(cls, certainty, f"{who} of {side} {words}{step}.{drill}", [event], **more)
    if fault == "crash" or code in _CRASHES:
        return finding(
            "CRASH_LOOKS_LIKE_HANG",
            SHOWN,
            f"{who} of {side} crashed{_signal(code)}{step}.{drill}",
            [event],
            mechanism="native code ended the process; its epoch was ended with it",
            **more,
        )
    if isinstance(code, int) and code < 0:
        return finding(
            "DEAD_PEER",
            SHOWN,
            f"{who} of {side} was ended from outside{_signal(code)}; its epoch was ended with it.{drill}",
            [event],
            likely=["the kernel, for want of memory, or somebody's kill: dmesg tells"],
            **more,
        )
    if fault or code is not None:
        raised = f"raised {fault}" if fault else f"exited with {code}"
        return finding(
            "CRASH_LOOKS_LIKE_HANG",
            SHOWN,
            f"{who} of {side} {raised}{step}; its epoch was ended.{drill}",
            [event],
            **more,
        )
    return finding(
        "UNDETERMINED", LIKELY, f"An epoch of {side} was ended; the manifest does not tell why.", [event], engine=side
    )


def _signal(code: object) -> str:
    """` (SIGKILL)`, "" if it was none."""
    if not isinstance(code, int) or code >= 0:
        return ""
    try:
        return f" ({signal.Signals(-code).name})"
    except ValueError:
        return f" (signal {-code})"
