# ruff: noqa: E501 - sentences stay in one piece, so that a search finds them
"""A request has two legs in a pair. One side holds it and the other does not know it: the other leg never came, or has ended."""

import re

from closeranks.diagnose.facts import Event
from closeranks.diagnose.rules import rule
from closeranks.diagnose.rules._make import finding
from closeranks.diagnose.scene import Scene
from closeranks.diagnose.verdict import LIKELY, Finding

_HELD = re.compile(r"^(?:prefill_(?:bootstrap|inflight)|decode_(?:prealloc|transfer))_queue_reqs$")
_OTHER = {"prefill": "decode", "decode": "prefill"}


@rule(47, "KV_TRANSFER", "requests wait in one engine of a pair for pages or for a taker, and the other holds none")
def other_leg_missing(scene: Scene) -> Finding | None:
    """By `/v1/loads`, because gauges of these queues lag. Both sides stand still by their counters: a snapshot of a pair at
    work can look like this for a moment."""
    held = {role: _loads(scene, role) for role in _OTHER}
    if not all(held.values()):
        return None
    for role, other in _OTHER.items():
        waiting, rest = sum(map(_held, held[role])), sum(map(_open, held[other]))
        if not waiting or rest or not _flat(scene, role):
            continue
        return finding(
            "KV_TRANSFER",
            LIKELY,
            f"{waiting:g} requests wait in {role} for their transfer, {other} holds none, and nothing advances: their other leg never came to {other}, or has ended there.",
            [*held[role], *held[other]],
            engine=role,
            mechanism=f"{role} learns nothing of a leg that was not sent, or was cut off: it waits for its own time-out (300 s by default)",
            decoys=["both loops turn, and both health checks answer: neither engine is at fault by itself"],
            next_checks=[
                "the router or client: was the other leg sent, and what came of it?",
                f"{other}'s log: did a request of this room ever arrive there?",
            ],
            workaround="abort the waiting request by its id; a router that ends one leg when the other fails",
        )
    return None


def _loads(scene: Scene, role: str) -> list[Event]:
    """The last reading of each data-parallel rank of one side."""
    return list({e.get("dp_rank"): e for e in scene.events("load") if scene.role_of(e) == role}.values())


def _held(load: Event) -> float:
    return sum(float(n) for k, n in load.data.items() if _HELD.match(k) and isinstance(n, int | float))


def _open(load: Event) -> float:
    return _held(load) + sum(load.num(k) or 0 for k in ("num_running_reqs", "num_waiting_reqs"))


def _flat(scene: Scene, role: str) -> bool:
    """Whether tokens of this side are counted twice, and none was added."""
    deltas = [d for m, d in scene.counter_deltas if scene.role_of(m) == role and m.name.endswith("_tokens_total")]
    return bool(deltas) and not any(deltas)
