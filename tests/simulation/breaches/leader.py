"""Breaches inside one engine: steps, agreement, scheduling, pages, rooms."""

from typing import Any

import msgspec

from closeranks.engine.leader.admission import Admission
from closeranks.engine.leader.book import Book
from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.events import Release
from closeranks.engine.leader.pages import Pool
from closeranks.engine.leader.radix import Cache
from closeranks.engine.leader.rooms import Rooms
from closeranks.engine.leader.scheduler import Scheduler
from closeranks.engine.leader.steps import Steps
from tests.simulation.breaches.breach import Breach

LET_GO, SETTLE, SUBMITTED, ABORTED = Leader.let_go, Leader.settle, Admission.submitted, Leader.aborted
STEP_REPORT, ISSUE, MATCH = Steps.report, Steps.issue, Cache.match
RETIRE, PLAN_DECODE, BOOK_REPORT, JOINED = Pool.retire, Scheduler.plan_decode, Book.report, Leader.rank_joined
FAULT, RANK_FAULT, COMPILED = Leader.fault, Leader.rank_fault, Admission.compiled


def idle_steps_do_not_count(self: Steps, rows: Any, rooms: Any, at: float) -> Any:
    step = ISSUE(self, rows, rooms, at)
    if not rows:
        self.last -= 1
    return step


def short_reports_pass(self: Book, message: Any, at: float) -> Any:
    step = self.open.get(message.n)
    if step is not None:
        del step.entries[len(message.tokens) :]
    return BOOK_REPORT(self, message, at)


def reports_of_any_step(self: Steps, rank: int, n: int, digest: int, at: float) -> Any:
    return STEP_REPORT(self, rank, self.expected[rank], 0, at)


def rank_faults_are_swallowed(self: Leader, message: Any) -> None:
    self.stale("rankfault")


def threads_charge_too(self: Leader, message: Any) -> None:
    RANK_FAULT(self, msgspec.structs.replace(message, in_step=True))


def one_step_charged(self: Leader, name: str, detail: str, rank: int = -1, steps: Any = ()) -> None:
    FAULT(self, name, detail, rank, steps[:1])


def first_report_decides(self: Steps, rank: int, n: int, digest: int, at: float) -> Any:
    step = STEP_REPORT(self, rank, n, digest, at)
    if not isinstance(step, str) and rank == 0:
        step.missing = 0
    return step


def digests_are_not_compared(self: Steps, rank: int, n: int, digest: int, at: float) -> Any:
    return STEP_REPORT(self, rank, n, 0, at)


def whole_prompt_from_the_cache(self: Cache, hashes: Any, limit: int) -> list[int]:
    return MATCH(self, hashes, limit + 1)


def open_steps_are_not_waited_for(self: Leader, room: Any) -> None:
    busy, room.busy = room.busy, 0
    LET_GO(self, room)
    room.busy = busy


def surplus_tokens_leave(self: Leader, step: Any) -> None:
    SETTLE(self, step)
    self.out[:] = [Release(x.n, []) if isinstance(x, Release) else x for x in self.out]


def length_stop_found_late(self: Scheduler, decoding: Any, *lists: Any) -> Any:
    for room in decoding.values():
        room.max_new += 1
    try:
        return PLAN_DECODE(self, decoding, *lists)
    finally:
        for room in decoding.values():
            room.max_new -= 1


def ranks_may_differ(self: Leader, message: Any) -> None:
    first = next((x for x in self.joined if x is not None), None)
    if first is not None:
        message = msgspec.structs.replace(message, fingerprint=first.fingerprint)
    JOINED(self, message)


def page_lost_at_each_end(self: Pool, pages: Any, hashes: Any, valid: int) -> None:
    RETIRE(self, pages[:-1] if len(pages) > 3 else pages, hashes, min(valid, max(0, len(pages) - 1)))


def tombstones_are_forgotten(self: Admission, event: Any) -> None:
    self.leader.rooms.tombs.clear()
    SUBMITTED(self, event)


def grammars_are_not_waited_for(self: Admission, event: Any) -> None:
    SUBMITTED(self, msgspec.structs.replace(event, form=0))


def failed_grammars_are_waited_for(self: Admission, message: Any) -> None:
    if not message.error:
        COMPILED(self, message)


def no_tombstone(self: Rooms, room: Any, why: str) -> None:
    return None


def abort_of_the_unknown_is_ignored(self: Leader, event: Any) -> None:
    if event.room in self.rooms.open:
        ABORTED(self, event)


def nobody_is_retracted(self: Scheduler, short: Any) -> None:
    return None


def lone_with_others(self: Scheduler) -> Any:
    return None, self.decoding, self.prefilling


def nobody_is_overdue(self: Steps, at: float) -> int:
    return -1


def fault_goes_on(self: Leader, name: str, detail: str, rank: int = -1, steps: Any = ()) -> None:
    FAULT(self, name, detail, rank, steps)
    self.state = "ready"


def eviction_of_pages_in_use(self: Pool, pages: Any) -> None:
    for page in pages:
        self.refs[page] += 1


BREACHES = [
    Breach("a step without rows does not count", "law 1, M1", Steps, "issue", idle_steps_do_not_count),
    Breach("a report with too few tokens passes", "law 1, M2", Book, "report", short_reports_pass),
    Breach("a report counts for whatever step is due", "law 1, M3", Steps, "report", reports_of_any_step),
    Breach("a rank's fault is logged and swallowed", "law 2, M5", Leader, "rank_fault", rank_faults_are_swallowed),
    Breach("a thread's fault is charged to the step", "DESIGN 4, resume", Leader, "rank_fault", threads_charge_too),
    Breach("only the step that is due is charged", "DESIGN 4, resume", Leader, "fault", one_step_charged),
    Breach("tokens leave when the first rank reported", "law 1, M6", Steps, "report", first_report_decides),
    Breach("digests are not compared", "law 1, M9", Steps, "report", digests_are_not_compared),
    Breach("the whole prompt is taken from the cache", "law 1, M7", Cache, "match", whole_prompt_from_the_cache),
    Breach(
        "pages are reused while an open step has them", "law 4, M8", Leader, "let_go", open_steps_are_not_waited_for
    ),
    Breach("surplus tokens of overlap leave", "law 3, M8", Leader, "settle", surplus_tokens_leave),
    Breach("a row beyond the length stop", "law 1, M8", Scheduler, "plan_decode", length_stop_found_late),
    Breach("ranks of different weights are welcomed", "law 1, M10", Leader, "rank_joined", ranks_may_differ),
    Breach("an ended room begins again", "law 3, M11", Admission, "submitted", tombstones_are_forgotten),
    Breach("ends leave no tombstone", "law 3, M11", Rooms, "bury", no_tombstone),
    Breach("abort before submit is ignored", "law 3, M12", Leader, "aborted", abort_of_the_unknown_is_ignored),
    Breach("nobody is retracted", "law 3, M16", Scheduler, "relieve", nobody_is_retracted),
    Breach("a page is lost at each end", "law 4, M17", Pool, "retire", page_lost_at_each_end),
    Breach("a cached page is shared and may be evicted", "law 4, M17", Pool, "share", eviction_of_pages_in_use),
    Breach("rows begin before their grammar is there", "law 1", Admission, "submitted", grammars_are_not_waited_for),
    Breach("a grammar that failed is waited for", "law 2", Admission, "compiled", failed_grammars_are_waited_for),
    Breach("nobody is overdue", "law 2, M19", Steps, "overdue", nobody_is_overdue),
    Breach("a leader goes on after its fault", "law 2, M5", Leader, "fault", fault_goes_on),
    Breach("a lone request is batched", "DESIGN 4", Scheduler, "turn", lone_with_others),
]
