"""Where the ranks of one group stand: which collective, what for, and which call of it."""

import re
from collections import defaultdict
from typing import NamedTuple

from closeranks.diagnose.scene import EngineView, RankView
from closeranks.diagnose.stacks import same_call


class Place(NamedTuple):
    """Where ranks stand together: an operation, what it is for, and which of several calls for that it is."""

    op: str
    site: str
    call: tuple[str, ...] = ()


def places_of(waiting: list[RankView]) -> dict[Place, list[RankView]]:
    """Place → ranks. A rank whose outer frames are unknown stands with others in the same operation."""
    out: dict[Place, list[RankView]] = defaultdict(list)
    for r in sorted(waiting, key=lambda r: (not r.at.site, -len(r.at.call))):
        op = re.sub(r"^_|_into_tensor|_object|_list|_base|_coalesced|_tensor(?=$|_)", "", r.at.op).replace("_", "")
        known = next(
            (
                k
                for k, v in out.items()
                if k.op == op and (not r.at.site or (k.site == r.at.site and same_call(v[0].at, r.at)))
            ),
            None,
        )
        out[known or Place(op, r.at.site, r.at.call)].append(r)
    return {k._replace(op=v[0].at.op): v for k, v in out.items()}


def groups(engine: EngineView) -> list[list[RankView]]:
    """Ranks that share collectives: a pipeline stage's, or data-parallel engine cores."""
    stages = engine.by_stage()
    return [
        [r for r in ranks if (r.who.kind == "engine_core") == core]
        for ranks in stages.values()
        for core in (False, True)
        if sum((r.who.kind == "engine_core") == core for r in ranks) > 1
    ]


def sized_by_rank(where: dict[Place, list[RankView]]) -> bool:
    """Whether ranks wait in a collective whose payload is as long as a queue of their own.

    gloo lets the rank with the shorter payload return: ranks found one operation ahead may then have skipped this one,
    or taken part in it with another size. Stacks cannot tell.
    """
    return any(place.site == "pd_poll" for place in where)


def site_words(r: RankView) -> str:
    """The two callers of what it waits in."""
    return " ← ".join(r.at.callers[:2]) or r.at.site or "unknown"
