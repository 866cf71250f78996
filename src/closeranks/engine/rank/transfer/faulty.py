"""A backend whose transfers stick, fail or write late on demand: for drills and for tests of who trusts what."""

import time
from dataclasses import dataclass
from typing import Any

from closeranks.faults import Fault, Injector
from closeranks.protocol import Peer, Send

from .base import Backend
from .plan import PeerUnusable


@dataclass
class Write:
    """An open write; `inner` is the real one, None until it is begun."""

    send: Send
    fault: Fault | None
    until: float
    inner: Any = None


class FaultyBackend:
    """Wraps another backend; what `transfer.start` faults ask for is done to the writes that begin.

    A `late` one is what a backend should not do and may: it reports a failure and writes afterwards. What no backend
    may do it does not do either: write to a peer that it has dropped.
    """

    def __init__(self, inner: Backend[Any], injector: Injector) -> None:
        self.name = inner.name
        self.address = inner.address
        self.receives = inner.receives
        self._inner = inner
        self._injector = injector
        self._held: list[Write] = []

    def meet(self, peer: Peer) -> None:
        self._inner.meet(peer)

    def start(self, send: Send) -> Write:
        fault = self._injector.act("transfer.start", transfer=send.transfer, room=str(send.room))
        if fault is None:
            return Write(send, None, 0.0, self._inner.start(send))
        write = Write(send, fault, time.monotonic() + fault.seconds)
        if fault.action != "fail":
            self._held.append(write)
        return write

    def poll(self, write: Write) -> str | None:
        fault = write.fault
        if fault is None:
            return self._inner.poll(write.inner)
        if fault.action in ("fail", "late"):
            return f"injected: {fault.spec}"
        if write.inner is None:
            if time.monotonic() < write.until:
                return None
            self._held = [other for other in self._held if other is not write]
            try:
                write.inner = self._inner.start(write.send)
            except PeerUnusable as error:
                return str(error)
        return self._inner.poll(write.inner)

    def moved(self, write: Write) -> int:
        return 0 if write.inner is None else self._inner.moved(write.inner)

    def drop(self, instance: int) -> bool:
        if any(write.send.peer == instance for write in self._held):
            return False  # as with a real one: nobody can say that it will not go on
        return self._inner.drop(instance)

    def progress(self) -> bool:
        self._held = [write for write in self._held if not self._written(write)]
        return self._inner.progress()

    def _written(self, write: Write) -> bool:
        """Go on with a write that was reported as failed long ago; whether it has ended."""
        if write.fault is None or write.fault.action != "late" or time.monotonic() < write.until:
            return False
        if write.inner is None:
            try:
                write.inner = self._inner.start(write.send)
            except PeerUnusable:
                return True
        return self._inner.poll(write.inner) is not None

    def close(self) -> None:
        self._inner.close()
