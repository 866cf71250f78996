"""Planted breaches: each patches one production function as somebody might get it wrong, and must be found out.

`python -m tests.simulation.breaches [--seeds N]` prints which seeds find which breach.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from closeranks.engine.leader import rooms as r
from closeranks.engine.leader.admission import Admission
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.events import Release
from closeranks.engine.leader.handover import Handover
from closeranks.engine.leader.pages import Pool
from closeranks.engine.leader.peers import Peers
from closeranks.engine.leader.radix import Cache
from closeranks.engine.leader.rooms import Rooms
from closeranks.engine.leader.scheduler import Scheduler
from closeranks.engine.leader.steps import Steps
from tests.simulation.run import Run

Patch = tuple[type, str, Callable[..., Any]]


def _let_go_with_open_steps(self: Leader, room: Any) -> None:
    busy, room.busy = room.busy, 0
    LET_GO(self, room)
    room.busy = busy


def _let_go_unsettled(self: Leader, room: Any) -> None:
    unsettled, room.unsettled = room.unsettled, 0
    LET_GO(self, room)
    room.unsettled = unsettled


def _no_quarantine(self: Leader, room: Any) -> None:
    room.writable = False
    LET_GO(self, room)


def _keep_dropped(self: Leader, step: Any) -> None:
    SETTLE(self, step)
    self.out[:] = [Release(x.n, []) if isinstance(x, Release) else x for x in self.out]


def _no_report_awaited(self: Steps, rank: int, n: int, digest: int, at: float) -> Any:
    step = REPORT(self, rank, n, digest, at)
    if not isinstance(step, str) and rank == 0:
        step.missing = 0
    return step


def _no_digest(self: Steps, rank: int, n: int, digest: int, at: float) -> Any:
    return REPORT(self, rank, n, 0, at)


def _proof_without_reaping(self: Peers, instance: int) -> None:
    self.gone[instance].reaped = True
    PROOF(self, instance)


def _proof_without_drop(self: Peers, instance: int) -> None:
    self.gone[instance].undropped = 0
    PROOF(self, instance)


def _settled_by_one_rank(self: Handover, event: Any) -> None:
    transfer = self.transfers.get(event.transfer)
    if transfer is not None and transfer.missing >> event.rank & 1:
        transfer.missing = 1 << event.rank
    SETTLED(self, event)


def _match_all(self: Cache, hashes: Any, limit: int) -> list[int]:
    return MATCH(self, hashes, limit + 1)


def _no_tombstone(self: Rooms, room: Any, why: str) -> None:
    return None


def _tombs_forgotten(self: Admission, event: Any) -> None:
    self.leader.rooms.tombs.clear()
    SUBMITTED(self, event)


def _checked_by_one(self: Handover, message: Any) -> None:
    room = self.leader.rooms.open.get(message.room)
    if room is not None and not message.bad:
        room.checked = self.leader.steps.all_ranks
    CHECKED(self, message)


def _damage_ignored(self: Handover, message: Any) -> None:
    message = type(message)(message.epoch, message.rank, message.room, [])
    CHECKED(self, message)


def _quarantine_lifted_by_time(self: Peers, at: float) -> None:
    PEERS_TICK(self, at)
    for room in list(self.leader.rooms.closing.values()):
        if room.quarantined and at - room.said_at > 1.0:
            self.leader.handover.quiet(room.id, room.instance)


def _beats_unread(self: Peers, link: Any, beat: Any) -> None:
    if self.dials and link.state != "up":
        BEAT(self, link, beat)


def _one_page_short(self: Pool, pages: Any, hashes: Any, valid: int) -> None:
    RETIRE(self, pages[:-1] if len(pages) > 3 else pages, hashes, min(valid, max(0, len(pages) - 1)))


def _lone_with_others(self: Scheduler) -> Any:
    return None, self.decoding, self.prefilling


def _grant_after_admission(self: Handover, link: Any, message: Any, at: float) -> None:
    GRANT(self, link, message, at)
    room = self.leader.rooms.open.get(message.room)
    if room is not None and room.state == r.QUEUED:
        room.targets = room.targets[::-1]


def _too_early_arrival(self: Handover, room: Any) -> None:
    room.first, first = True, room.first
    if first and room.sent and room.unsettled <= 1:
        unsettled, room.unsettled = room.unsettled, 0
        HAND(self, room)
        room.unsettled = unsettled


LET_GO, SETTLE, SUBMITTED = Leader.let_go, Leader.settle, Admission.submitted
REPORT, PROOF, BEAT, PEERS_TICK = Steps.report, Peers.proof, Peers.beat, Peers.tick
SETTLED, CHECKED, GRANT, HAND = Handover.settled, Handover.checked, Handover.grant, Handover.hand
MATCH, RETIRE = Cache.match, Pool.retire

BREACHES: dict[str, tuple[str, Patch]] = {
    "pages of an ended room are reused while a step with its row is open": (
        "law 4, M8",
        (Leader, "let_go", _let_go_with_open_steps),
    ),
    "source pages are reused before their sends are settled": ("law 4, M14", (Leader, "let_go", _let_go_unsettled)),
    "granted pages of an aborted room are free at once": ("law 4, M14", (Leader, "let_go", _no_quarantine)),
    "quarantine ends after a second": ("law 4, M14", (Peers, "tick", _quarantine_lifted_by_time)),
    "a dead writer is believed quiet before the own ranks dropped it": (
        "law 4, M18",
        (Peers, "proof", _proof_without_drop),
    ),
    "a transfer counts as settled when one rank's part is": ("law 4, M14", (Handover, "settled", _settled_by_one_rank)),
    "arrival is said before the last write is settled": ("law 3, M11", (Handover, "hand", _too_early_arrival)),
    "tokens of ended rooms leave": ("law 3, M8", (Leader, "settle", _keep_dropped)),
    "tokens leave when the first rank reported": ("law 1, M6", (Steps, "report", _no_report_awaited)),
    "an ended room begins again at a late submit": ("law 3, M11", (Admission, "submitted", _tombs_forgotten)),
    "abort before submit leaves no tombstone": ("law 3, M12", (Rooms, "bury", _no_tombstone)),
    "ends are not told to the other side, and beats not read": ("law 3, M13", (Peers, "beat", _beats_unread)),
    "damaged pages are used": ("law 4, M21", (Handover, "checked", _damage_ignored)),
    "pages are used when one rank has checked them": ("law 4, M10", (Handover, "checked", _checked_by_one)),
    "the whole prompt is taken from the cache": ("law 1, M7", (Cache, "match", _match_all)),
    "a page is lost at each end": ("law 4, M17", (Pool, "retire", _one_page_short)),
    "pages are written in another order than granted": ("law 4, M3", (Handover, "grant", _grant_after_admission)),
    "a lone request is batched": ("DESIGN 4", (Scheduler, "turn", _lone_with_others)),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """One breach in place."""
    cls, attribute, function = BREACHES[name][1]
    saved = getattr(cls, attribute)
    setattr(cls, attribute, function)
    try:
        yield
    finally:
        setattr(cls, attribute, saved)


def found_by(name: str, seed: int, events: int) -> str:
    """What the simulation says of the breach with this seed; empty: nothing."""
    with planted(name):
        run = Run(seed, events)
        try:
            run.go()
        except Exception as error:  # noqa: BLE001 - any failure finds the breach; its text is the result
            return f"{type(error).__name__}: {error} (event {run.world.events})"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--only", default="", help="part of a breach's name")
    args = parser.parse_args()
    missed = 0
    for name, (law, _) in BREACHES.items():
        if args.only not in name:
            continue
        words = [found_by(name, seed, args.events) for seed in range(1, args.seeds + 1)]
        hits = [word for word in words if word]
        missed += not hits
        print(f"{len(hits):2}/{len(words)} {law:12} {name}\n      {hits[0][:150] if hits else 'NOT FOUND'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
