"""Blocking reads beside the loop, each kind in a thread of its own, so that one that hangs takes no other with it.

The threads of `asyncio.to_thread` are few and shared: a log on a file system that hangs would take one at each look,
until no process is read any more; and the interpreter waits for them when it ends.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
IDLE_S = 10.0
"""A thread without a call for so long ends."""


class Aside:
    """Calls of one kind, one at a time. A caller that gives up leaves its call behind: the next one waits until that
    has come back, for as long as it likes. The thread is kept from one call to the next: a new one costs more than
    most calls."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._free = asyncio.Event()
        self._free.set()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = threading.Lock()
        self._threads = 0

    async def run(self, what: Callable[[], T]) -> T:
        """What the call returns or raises. OSError when no thread is to be had."""
        while not self._free.is_set():
            await self._free.wait()
        self._free.clear()
        loop = asyncio.get_running_loop()
        came: asyncio.Future[T] = loop.create_future()

        def over(result: T | None, error: BaseException | None) -> None:
            self._free.set()
            if came.done():  # given up
                return
            if error is not None:
                came.set_exception(error)
            else:
                came.set_result(result)  # type: ignore[arg-type]  # T may hold None

        def work() -> None:
            result: T | None = None
            failed: BaseException | None = None
            try:
                result = what()
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over, result, failed)

        try:
            self._give(work)
        except RuntimeError as error:
            self._free.set()
            raise OSError(f"no thread for {self._kind}: {error}") from error
        return await came

    def _give(self, work: Callable[[], None]) -> None:
        """To the thread that waits, or a new one. RuntimeError when there is none to be had."""
        with self._idle:
            if not self._threads:
                threading.Thread(target=self._serve, name=f"aside {self._kind}", daemon=True).start()
                self._threads = 1
            self._calls.put(work)

    def _serve(self) -> None:
        while True:
            try:
                work = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._idle:  # a call that comes now finds no thread, or is already here
                    if self._calls.empty():
                        self._threads = 0
                        return
                continue
            work()
            del work  # what it holds is the caller's, and free
