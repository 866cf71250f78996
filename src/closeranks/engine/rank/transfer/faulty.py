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
    """Wraps another backend; what `transfer.start` faults ask for is done to the writes that begin."""

    def __init__(self, inner: Backend[Any], injector: Injector) -> None:
        self.name = inner.name
        self.address = inner.address
        self.receives = True  # late writes are done in `progress`
        self._inner = inner
        self._injector = injector
        self._late: list[Write] = []
        self._stuck: list[Write] = []

    def meet(self, peer: Peer) -> None:
        self._inner.meet(peer)

    def start(self, send: Send) -> Write:
        fault = self._injector.act("transfer.start", transfer=send.transfer, room=str(send.room))
        if fault is None:
            return Write(send, None, 0.0, self._inner.start(send))
        write = Write(send, fault, time.monotonic() + fault.seconds)
        if fault.action == "stick":
            self._stuck.append(write)
        return write

    def poll(self, write: Write) -> str | None:
        if write.fault is not None and write.inner is None:
            if write.fault.action == "fail":
                return f"injected: {write.fault.spec}"
            if write.fault.action == "late":
                self._late.append(write)
                return f"injected: {write.fault.spec}"
            if time.monotonic() < write.until:
                return None
            self._stuck = [other for other in self._stuck if other is not write]
            try:
                write.inner = self._inner.start(write.send)
            except PeerUnusable as error:
                return str(error)
        return self._inner.poll(write.inner)

    def drop(self, instance: int) -> bool:
        if any(write.send.peer == instance for write in self._stuck):
            return False  # as with a real one: nobody can say that it will not go on
        return self._inner.drop(instance)

    def progress(self) -> bool:
        left = []
        for write in self._late:
            try:
                if write.inner is None and time.monotonic() >= write.until:
                    write.inner = self._inner.start(write.send)
            except PeerUnusable:
                continue  # there is nobody left to write to
            if write.inner is None or self._inner.poll(write.inner) is None:
                left.append(write)
        self._late = left
        return self._inner.progress()

    def close(self) -> None:
        self._inner.close()
