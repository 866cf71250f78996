"""The rank's transfer thread: owns the backend, takes work from the step loop, answers with notices.

The step loop only puts work on a queue; it never waits for a transfer. Every piece of work is immutable and is answered
exactly once (`Sent`, `Checked`, `Dropped`), whatever happens to the peer. Long work is cut into slices, so that one
transfer does not hold up another, or a drop. Anything unexpected ends the rank.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from closeranks.faults import Injector
from closeranks.protocol import Check, Checked, Dropped, FromRank, Peer, Progress, Send, Sent, Step

from ..checksum import bytes_sum, share_sum
from ..planes import Pool
from .base import Backend
from .plan import PeerUnusable

HASH_SLICE = 1 << 20
"""Bytes hashed in one go, about 0.1 ms: in the gaps of the transfers, so that no connection runs dry meanwhile."""
_OPEN_S, _IDLE_S, _ALONE_S = 0.0003, 0.005, 0.5
"""How long the thread waits for new work: with open writes, with peers (at most), without peers."""
_FADE = 0.1
"""With peers it waits for this part of the time since bytes last moved: often while they come, rarely after."""

TELL_S = 0.5
"""Time between two notices that long work advances."""

Work = Peer | Send | Check | int
"""What the step loop hands over; a number is a peer instance to drop."""


@dataclass
class _Sending:
    """A `Send` under way: ended when the backend says so, answered when its sums are known too."""

    send: Send
    write: Any
    since: float
    outcome: str | None = None
    sums: list[list[int]] = field(default_factory=list)
    reported: bool = False
    mark: tuple[int, int] = (0, 0)
    """How far it was when the leader was last told."""


@dataclass
class _Checking:
    """A `Check` under way."""

    check: Check
    done: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)


class TransferThread:
    """Runs `backend` on its own thread. `notify` takes notices, `fault` an exception that ends the rank."""

    def __init__(
        self,
        backend: Backend[Any],
        pool: Pool,
        epoch: int,
        notify: Callable[[FromRank], None],
        fault: Callable[[BaseException], None],
        stuck_s: float = 30.0,
        injector: Injector | None = None,
        checksums: bool = True,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._epoch = epoch
        self._notify = notify
        self._fault = fault
        self._stuck_s = stuck_s
        self._injector = injector
        self._checksums = checksums
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._unusable: dict[int, str] = {}
        self._peers: dict[int, str] = {}
        self._sending: list[_Sending] = []
        self._checking: list[_Checking] = []
        self._dropping: list[int] = []
        self._tell_at = 0.0
        self._checked_pages = self._checked_told = 0
        self._moved = 0.0
        self._busy = False
        self._log = structlog.get_logger().bind(rank=pool.rank, backend=backend.name)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        """Begin to take work."""
        self._thread.start()

    def meet(self, peers: list[Peer]) -> None:
        """Make peers known before the sends that follow."""
        for peer in peers:
            self._work.put(peer)

    def submit(self, step: Step) -> None:
        """Take a step's sends, checks and drops, when the device has done it. Returns at once."""
        for send in step.sends:
            self._work.put(send)
        for check in step.checks:
            self._work.put(check)
        for instance in step.drop:
            self._work.put(instance)

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread between two slices of work; open writes are abandoned. For the end of the process."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._take():
                self._advance()
            self._backend.close()
        except BaseException as error:  # noqa: BLE001 - reported, it ends the rank
            self._fault(error)

    def _take(self) -> bool:
        """Accept all work that is there, or wait for the first for a moment. False: stop."""
        try:
            wait = self._pause()
            work = self._work.get(timeout=wait) if wait else self._work.get_nowait()
            while work is not None:
                self._accept(work)
                work = self._work.get_nowait()
        except queue.Empty:
            return True
        return False

    def _pause(self) -> float:
        if self._checking or any(len(sending.sums) < len(sending.send.pages) for sending in self._sending):
            return 0.0
        if self._sending:
            return 0.0 if self._busy else _OPEN_S
        if not self._peers or not self._backend.receives:
            return _ALONE_S
        age = time.monotonic() - self._moved
        return 0.0 if self._busy else min(_IDLE_S, max(_OPEN_S, _FADE * age))

    def _accept(self, work: Work) -> None:
        now = time.monotonic()
        if isinstance(work, Peer):
            self._meet(work)
        elif isinstance(work, Send):
            for page, _ in work.pages:
                self._pool.offset(page, 0)
            self._send(work, now)
        elif isinstance(work, Check):
            if len(work.sums) != len(work.pages) or any(len(s) <= max(self._pool.shares) for s in work.sums):
                raise ValueError(f"check of room {work.room}: sums do not cover {len(work.pages)} pages and all shares")
            for page in work.pages:
                self._pool.offset(page, 0)
            if self._injector and work.pages and self._injector.act("rank.arrived", room=str(work.room)):
                self._pool.share_view(work.pages[0], 0)[0] ^= 1
            self._checking.append(_Checking(work))
            self._moved = now
        else:
            self._dropping.append(work)

    def _meet(self, peer: Peer) -> None:
        self._unusable.pop(peer.instance, None)
        try:
            self._backend.meet(peer)
        except PeerUnusable as error:
            self._unusable[peer.instance] = str(error)
            self._log.warning("peer unusable", peer=peer.engine, instance=f"{peer.instance:x}", error=str(error))
        else:
            self._peers[peer.instance] = peer.engine
            self._moved = time.monotonic()

    def _send(self, send: Send, now: float) -> None:
        problem = self._unusable.get(send.peer, "")
        if send.peer in self._dropping:
            problem = f"peer instance {send.peer:x} is being dropped"
        if not problem and send.pages:
            try:
                self._sending.append(_Sending(send, self._backend.start(send), now))
            except PeerUnusable as error:
                problem = str(error)
        if problem or not send.pages:
            self._notify(Sent(self._epoch, self._pool.rank, send.transfer, problem, []))

    def _advance(self) -> None:
        """One slice of everything that is open."""
        self._busy = self._backend.progress()
        left: list[_Sending] = []
        for sending in self._sending:
            if not self._advance_sending(sending):
                left.append(sending)
        self._sending = left
        if self._checking and self._advance_checking(self._checking[0]):
            self._checking.pop(0)
        if self._dropping:
            self._dropping = [instance for instance in self._dropping if not self._drop(instance)]
        if self._busy or left:
            self._moved = time.monotonic()
        if left or self._checking:
            self._tell(time.monotonic())

    def _tell(self, now: float) -> None:
        """Tell the leader which long work has advanced: slow is not stuck."""
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_S
        moving = []
        for sending in self._sending:
            mark = (0 if sending.outcome is not None else self._backend.moved(sending.write), len(sending.sums))
            if now - sending.since > TELL_S and mark != sending.mark:
                moving.append(sending.send.transfer)
            sending.mark = mark
        checking, self._checked_told = self._checked_pages != self._checked_told, self._checked_pages
        if moving or checking:
            self._notify(Progress(self._epoch, self._pool.rank, 0, 0, moving, checking))

    def _advance_sending(self, sending: _Sending) -> bool:
        if sending.outcome is None:
            sending.outcome = self._backend.poll(sending.write)
        send = sending.send
        budget = HASH_SLICE if not self._busy or sending.outcome is not None else 0
        while not sending.outcome and len(sending.sums) < len(send.pages) and budget > 0:
            sending.sums.append(self._sums(send.pages[len(sending.sums)][0]))
            budget -= self._pool.page_bytes
        if sending.outcome is None:
            age = time.monotonic() - sending.since
            if age > self._stuck_s and not sending.reported:
                sending.reported = True
                self._log.error(
                    "transfer does not end; its pages stay held until it does or an epoch ends",
                    transfer=send.transfer,
                    room=str(send.room),
                    peer=self._peers.get(send.peer, ""),
                    instance=f"{send.peer:x}",
                    age_s=round(age, 1),
                )
            return False
        if sending.outcome:
            self._notify(Sent(self._epoch, self._pool.rank, send.transfer, sending.outcome, [], unsure=True))
            return True
        if len(sending.sums) < len(send.pages):
            return False
        self._notify(Sent(self._epoch, self._pool.rank, send.transfer, "", sending.sums))
        return True

    def _sums(self, page: int) -> list[int]:
        if not self._checksums:
            return [0] * len(self._pool.shares)
        if self._pool.bytes is None:
            return [share_sum(share) for share in self._pool.tensor[page]]
        return [bytes_sum(self._pool.share_view(page, index)) for index in range(len(self._pool.shares))]

    def _advance_checking(self, checking: _Checking) -> bool:
        check = checking.check
        budget = HASH_SLICE
        while checking.done < len(check.pages) and budget > 0:
            page, sums = check.pages[checking.done], check.sums[checking.done]
            for share, found in zip(self._pool.shares, self._sums(page), strict=True):
                if found != sums[share]:
                    checking.bad.append((page, share))
            checking.done += 1
            self._checked_pages += 1
            budget -= self._pool.page_bytes
        if checking.done < len(check.pages):
            return False
        self._notify(Checked(self._epoch, self._pool.rank, check.room, checking.bad))
        return True

    def _drop(self, instance: int) -> bool:
        if not self._backend.drop(instance):
            return False
        self._peers.pop(instance, None)
        self._unusable.pop(instance, None)
        self._notify(Dropped(self._epoch, self._pool.rank, instance))
        return True
