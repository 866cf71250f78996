"""An engine's pools and transfer threads without a model, in a process of its own, driven through a pipe."""

import contextlib
import hashlib
import os
import random
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from closeranks.protocol import Memory, Peer, Step
from tests.engine.rank.members import CONTEXT

T = TypeVar("T")


def _host(
    pipe: Connection, backend: str, instance: int, tp_size: int, sizes: dict[str, int], faults: list[str]
) -> None:
    import torch

    from closeranks.engine.rank.planes import PageLayout, Pool
    from closeranks.engine.rank.transfer import TransferThread, make
    from closeranks.faults import injector

    lock = threading.Lock()

    def say(*message: Any) -> None:
        with lock:
            pipe.send(message)

    layout = PageLayout(("k", "v"), sizes["layers"], sizes["shares"], sizes["head_dim"], torch.float32)
    pools = [Pool(layout, sizes["pages"], sizes["page_size"], rank, tp_size) for rank in range(tp_size)]
    threads = []
    memories = []
    drill = injector(faults)
    for rank, pool in enumerate(pools):
        moves = make(backend, pool, f"test-{instance:x}-{rank}", "tcp", True, drill)
        memories.append(pool.memory(moves.name, moves.address))
        thread = TransferThread(moves, pool, 1, lambda n: say("notice", n), lambda e: say("fault", repr(e)), 0.5, drill)
        thread.start()
        threads.append(thread)
    say("ready", memories)
    while True:
        what, *arguments = pipe.recv()
        if what == "step":
            for thread in threads:
                thread.meet(arguments[0].meet)
                thread.submit(arguments[0])
        elif what == "fill":
            source = random.Random(arguments[0])
            for pool in pools:
                for page in range(pool.num_pages):
                    for index in range(len(pool.shares)):
                        view = pool.share_view(page, index)
                        part = source.randbytes(min(len(view), 4096))
                        view[:] = (part * (len(view) // len(part) + 1))[: len(view)]
        elif what == "hash":
            say("bytes", [hashlib.blake2b(pool.bytes).digest() for pool in pools])
        elif what == "cut":
            say("bytes", cut_connections())
        elif what == "exit":
            for thread in threads:
                thread.stop()
            os._exit(0)
        else:
            page, share = arguments
            pool = next(p for p in pools if share in p.shares)
            view = pool.share_view(page, pool.shares.index(share))
            if what == "poke":
                view[len(view) // 2] ^= 1
            say("bytes", bytes(view))


def cut_connections() -> int:
    """Shut every TCP connection of this process; how many there were."""
    cut = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
        except OSError:
            continue  # no socket, or not connected
    return cut


class Host:
    """Handle on such a process."""

    def __init__(self, backend: str, tp_size: int, faults: tuple[str, ...] = (), **sizes: int) -> None:
        sizes = {"layers": 2, "shares": 4, "head_dim": 8, "pages": 12, "page_size": 4} | sizes
        self.tp_size = tp_size
        self.shares = sizes["shares"]
        self.instance = int.from_bytes(os.urandom(7), "big")
        self.pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_host, args=(there, backend, self.instance, tp_size, sizes, list(faults)))
        self.process.start()
        there.close()
        self.notices: list[Any] = []
        self.memories: list[Memory] = self._answer("ready")

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.join()
        self.pipe.close()

    def signal(self, number: int) -> None:
        """Some kernels answer "no such process" for one that has ended and is not yet waited for: it is gone."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    @property
    def peer(self) -> Peer:
        return Peer("test", self.instance, self.memories)

    def step(self, **fields: Any) -> None:
        self.pipe.send(("step", Step(1, 1, **fields)))

    def fill(self, seed: int) -> None:
        self.pipe.send(("fill", seed))

    def read(self, page: int, share: int) -> bytes:
        self.pipe.send(("read", page, share))
        return self._answer("bytes")

    def hash(self) -> list[bytes]:
        """One digest of all bytes per pool."""
        self.pipe.send(("hash",))
        return self._answer("bytes")

    def poke(self, page: int, share: int) -> None:
        self.pipe.send(("poke", page, share))
        self._answer("bytes")

    def cut(self) -> int:
        """Break all TCP connections of the process; how many there were."""
        self.pipe.send(("cut",))
        return self._answer("bytes")

    def hear(self, timeout_s: float) -> bool:
        """Take one message; False if there is none in time. A fault of a transfer thread fails the test."""
        if not self.pipe.poll(max(0.0, timeout_s)):
            return False
        what, value = self.pipe.recv()
        if what == "notice":
            self.notices.append(value)
            return True
        raise AssertionError(f"{what}: {value}")

    def wait(self, kind: type[T], timeout_s: float = 120.0) -> list[T]:
        """One notice of this kind of every rank, by rank, removed; other kinds stay."""
        until = time.monotonic() + timeout_s
        while True:
            found: dict[int, Any] = {}
            for notice in self.notices:
                if isinstance(notice, kind):
                    found.setdefault(notice.rank, notice)
            if len(found) == self.tp_size:
                for notice in found.values():
                    self.notices.remove(notice)
                return [found[rank] for rank in sorted(found)]
            if not self.hear(until - time.monotonic()):
                raise AssertionError(f"no {kind.__name__} of all ranks within {timeout_s} s: {self.notices}")

    def _answer(self, wanted: str) -> Any:
        while self.pipe.poll(60):
            what, value = self.pipe.recv()
            if what == wanted:
                return value
            if what != "notice":
                raise AssertionError(f"{what}: {value}")
            self.notices.append(value)
        raise AssertionError(f"no {wanted}")
