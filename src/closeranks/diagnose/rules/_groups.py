"""Whose collectives may be compared: sequence numbers mean something inside one process group of one job only."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from closeranks.diagnose.facts import Collective
from closeranks.diagnose.scene import Scene

APART_S = 1800.0  # time-outs of one stall come closer together than this; further apart they are of two lives of a job
EARLY = 50  # sequence numbers below this are often equal in groups that overlap


@dataclass
class Meeting:
    """Unfinished collectives of one group with one sequence number, by rank."""

    group: str
    seq: int
    by: dict[str, Collective]
    named: bool  # every rank's line names the group
    implied: bool  # it follows from the ranks' numbers that they are of one group, or of groups that overlap


def rank_of(c: Collective) -> str:
    """The rank by name, or what stands for one that has no number."""
    return c.who.label if c.who else c.dump or c.src.file


def meetings(scene: Scene) -> Iterator[Meeting]:
    """Collectives that ranks met in, or should have. Not those of several groups, nor of several jobs or lives."""
    found: dict[tuple[str, int], list[Collective]] = defaultdict(list)
    for c in scene.collectives:
        if not c.p2p and c.state != "completed":
            found[c.group, c.seq].append(c)
    for (group, seq), calls in found.items():
        for job in jobs(calls):
            by = {rank_of(c): c for c in job}
            if one_group(scene, by.values()):
                yield Meeting(group, seq, by, _named(job), _implied(seq, job))


def jobs(calls: list[Collective]) -> list[list[Collective]]:
    """Calls by the job that they are of. One rank that tells two things of one sequence number is two ranks: then
    folders tell jobs apart; what they do not tell apart is left out."""
    if not _contradict(calls):
        return [calls]
    folders: dict[str, list[Collective]] = defaultdict(list)
    for c in calls:
        folders[c.src.file.rpartition("/")[0]].append(c)
    return [part for part in folders.values() if not _contradict(part)]


def _contradict(calls: Iterable[Collective]) -> bool:
    told: dict[str, set[tuple[str, int | None, int]]] = defaultdict(set)
    times: list[float] = []
    for c in calls:
        told[rank_of(c)].add((c.op, c.numel_in, c.seq))
        if c.time is not None:
            times.append(c.time)
    return any(len(x) > 1 for x in told.values()) or (bool(times) and max(times) - min(times) > APART_S)


def one_group(scene: Scene, calls: Iterable[Collective]) -> bool:
    """Whether nothing contradicts that these ranks are members of one group: two that have the same place are of two,
    and so are ranks whose recorders list other members."""
    places: dict[int, str] = {}
    members = set()
    for c in calls:
        if c.place is not None and places.setdefault(c.place, rank_of(c)) != rank_of(c):
            return False
        members |= {s.members for s in scene.group_status if s.members and s.group == c.group and s.who == c.who}
    return len(members) < 2


def _named(calls: Iterable[Collective]) -> bool:
    """Whether the group is named on every rank, or the report compared the ranks itself."""
    return all((c.group and not c.unsure) or c.origin == "desync_report" for c in calls)


def _implied(seq: int, calls: Iterable[Collective]) -> bool:
    """Whether every rank has its own number of the job in the group: then the group of each holds all lower ranks, and
    no two of them are disjoint. Groups that overlap count apart, except near the beginning."""
    return seq >= EARLY and all(c.numbered and c.who is not None and c.who.rank == c.place for c in calls)
