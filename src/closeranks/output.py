"""Standard output streams that neither fail nor wait: a log line that the disk does not take must not end who wrote it,
one that nobody reads must not hold it. A leaf.
"""

import atexit
import contextlib
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any

LIMIT = 2**20
"""Characters that wait for a reader of standard error; what comes on top is lost, and counted."""
LAST_WORDS_S = 1.0
"""How long a process that ends waits for what it has said to be taken."""
_LONG = 2**16
"""Characters of a line that are passed on before its end is seen."""
_COST = 64
"""What a short text occupies besides its characters."""


class Unfailing:
    """Passes everything on to `inner`; what it refuses (OSError: full disk, closed pipe) is counted in `lost`."""

    def __init__(self, inner: IO[str]) -> None:
        self.inner = inner
        self.lost = 0
        """Characters."""

    def write(self, text: str) -> int:
        try:
            return self.inner.write(text)
        except OSError:
            self.lost += len(text)
            return len(text)

    def flush(self) -> None:
        try:
            self.inner.flush()
        except OSError:
            self.lost += 1  # how much of its buffer stays behind is not known

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def said_lost(lines: int) -> str:
    """The line in place of those that were lost."""
    return f"[{lines} log lines were lost: nobody took them]\n"


class Unblocking:
    """Hands lines to a thread that writes them to `inner`'s descriptor: no write ever waits for who reads there.

    A pipe whose reader stands still, a terminal after Ctrl-S, a disk that hangs: up to `limit` characters wait, further
    lines are counted instead (whole lines, until half of the queue is taken), and a line `tell(count)` stands in their
    place. So do lines that the descriptor refuses. The thread is a daemon: it holds no process at its end, see `end`.
    It takes no lock, so that its end with the process leaves none behind. A forked child has no such thread: nothing
    that it writes arrives.

    Raises OSError (io.UnsupportedOperation) if `inner` has no descriptor.
    """

    def __init__(self, inner: IO[str], limit: int = LIMIT, tell: Callable[[int], str] = said_lost) -> None:
        self.inner = inner
        self._fd = inner.fileno()
        self._encoding = getattr(inner, "encoding", None) or "utf-8"
        self._limit = limit
        self._tell = tell
        # In place of lines that are missing: how many were dropped up to here. An event: somebody waits for this point.
        self._queue: queue.SimpleQueue[str | int | threading.Event] = queue.SimpleQueue()
        self._over = False
        # Of those who write; a signal handler may write within a write.
        self._lock = threading.RLock()
        self._begun = ""
        self._put = 0
        self._full = False
        self._dropped = 0
        # Of the thread alone; others only read it.
        self._taken = 0
        self._failed = 0
        self._told = 0
        self._refused = False
        self._within = False
        with contextlib.suppress(OSError):
            inner.flush()
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    @property
    def lost(self) -> int:
        """Lines so far that found no room or were refused."""
        return self._dropped + self._failed

    def write(self, text: str) -> int:
        if self._over:
            return len(text)
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._offer(lines + newline)
            if len(self._begun) > _LONG:
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on also a line that has no end yet. Does not wait: see `drain`."""
        with self._lock:
            text, self._begun = self._begun, ""
            if text:
                self._offer(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all that was written has been taken. False: not within so long."""
        self.flush()
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(seconds)

    def end(self, seconds: float) -> None:
        """Wait as `drain` does, then take nothing more: once the interpreter has stopped its threads nobody would write
        it, and one that was stopped within a write would hold the lock for ever.
        """
        self.drain(seconds)
        self._over = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _offer(self, text: str) -> None:
        room = self._limit - (self._put - self._taken) - _COST
        if self._full and room < self._limit // 2:
            self._dropped += _lines(text)
            return
        if self._full:
            self._full = False
            self._queue.put(self._dropped)
        if len(text) > room:
            fits = text.rfind("\n", 0, max(0, room)) + 1
            self._dropped += _lines(text[fits:])
            self._full = True
            text = text[:fits]
        if text:
            self._put += len(text) + _COST
            self._queue.put(text)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, str):
                if not self._write(item):
                    self._failed += _lines(item)
                self._taken += len(item) + _COST
            dropped = self._dropped  # read before the queue is looked at: what was dropped later, has its place later
            if isinstance(item, int):
                self._tell_lost(item)
            elif self._queue.empty():
                self._tell_lost(dropped)
            if isinstance(item, threading.Event):
                item.set()

    def _tell_lost(self, dropped: int) -> None:
        lost = dropped + self._failed - self._told
        if lost > 0 and not self._refused and self._write(("\n" if self._within else "") + self._tell(lost)):
            self._told += lost

    def _write(self, text: str) -> bool:
        left = memoryview(text.encode(self._encoding, "backslashreplace"))
        self._refused = True
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # somebody has made the terminal or pipe that we share non-blocking
                writable = select.poll()
                writable.register(self._fd, select.POLLOUT)
                writable.poll()
            except OSError:
                return False
        self._refused = False
        self._within = not text.endswith("\n")
        return True


def _lines(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n"))


def fill_standard() -> None:
    """Put the null device where this process was started with closed standard streams (`>&-`).

    Else the next files that it opens, a lock or a socket, would be what it and its children write their output to. Call
    it before anything is opened. `sys.stdout` stays None: an answer cannot be given there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - as long as the process


def make_unfailing() -> None:
    """Wrap this process's standard output and error; call before anything keeps a reference to them."""
    if sys.stdout is not None:
        sys.stdout = Unfailing(sys.stdout)
    if sys.stderr is not None:
        sys.stderr = Unfailing(sys.stderr)


def make_unblocking(tell: Callable[[int], str] = said_lost) -> None:
    """As `make_unfailing`, and standard error waits for nobody. For processes that others depend on while they log.

    Standard output stays one that waits for its reader: what is printed there is an answer, of which nothing may lack.
    """
    if sys.stdout is not None:
        sys.stdout = Unfailing(sys.stdout)
    if sys.stderr is None:
        return
    try:
        stream = Unblocking(sys.stderr, tell=tell)
    except OSError:  # a stream of a test or an embedding program, without a descriptor: writing there waits for nobody
        sys.stderr = Unfailing(sys.stderr)
        return
    sys.stderr = stream
    atexit.register(stream.end, LAST_WORDS_S)
