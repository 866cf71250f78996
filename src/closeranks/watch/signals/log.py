"""The engine's log, followed line by line. A raised error there is proof; most other lines only say what is going on.

Lines are searched for fixed texts; nothing of a line is kept but which text it held and the names of threads. What
clients send is in log lines too, and must say nothing of the engine: a line is searched up to where a request begins,
and of an access line only the path counts of a request that was carried out.
"""

import re
import time
from collections.abc import Sequence

from closeranks.evidence.gather import without_request
from closeranks.watch import procfs
from closeranks.watch.aside import Aside
from closeranks.watch.signals import Readings
from closeranks.watch.signals.tail import Tail
from closeranks.watch.snapshot import Blind, EngineSeen, Values
from closeranks.watch.snapshot import Signal as SignalName

LEFT_S = 60.0
"""The log of an engine that is gone is read for so long: its last words say whether that was wanted."""

_STARTS = (b"server_args=ServerArgs(", b"server_args={'", b"vLLM API server version", b"non-default args")
_READY = (
    b"The server is fired up and ready to roll",
    b"Application startup complete",
    b"throughput (token/s)",
    b"Avg generation throughput",
)
_ENDS = (b"SIGTERM received", b"Gracefully exiting", b"INFO:     Shutting down", b"Waiting for application shutdown",
         b"rank stopped", b"trigger received signal=SIG", b"API server: shutdown triggered")  # fmt: skip
_PAUSES = (b"Generation paused by pause_generation",)
_RESUMES = (b"Generation continued",)
_UPDATES = (b"update_weights_from", b"Update engine weights")
_UPDATED = (b"Update weights end", b"weights updated", b"throughput (token/s)")
_ACCESS = re.compile(rb' - "[A-Z]+ (?:/[^ ?"]*)?/([^/ ?"]*).* HTTP/[\d.]+" (\d{3})\b')
"""A request that was answered, as uvicorn tells it: the last part of its path and the status."""
_ASKED: dict[bytes, tuple[str, bool]] = {
    b"pause_generation": ("paused", True),
    b"pause": ("paused", True),
    b"sleep": ("paused", True),
    b"continue_generation": ("paused", False),
    b"resume": ("paused", False),
    b"wake_up": ("paused", False),
    b"release_memory_occupation": ("updating", True),
    b"resume_memory_occupation": ("updating", False),
    b"update_weights_from_disk": ("updating", False),  # carried out by the time that it is answered
    b"update_weights_from_distributed": ("updating", False),
    b"update_weights_from_tensor": ("updating", False),
}
_CRASHES: dict[bytes, str] = {
    b"Scheduler hit an exception": "the scheduler raised an exception",
    b"crashed with exit code": "a child process crashed",
    b"EngineCore encountered a fatal error": "EngineCore raised a fatal error",
    b"EngineCore failed to start": "EngineCore failed to start",
    b"EngineCore died unexpectedly": "EngineCore died",
    b"died unexpectedly, shutting down": "a worker process died",
    b"died unexpectedly (exit code": "a worker process died",
    b"EngineDeadError": "the engine is dead by its own account",
    b"Scheduler watchdog timeout": "the scheduler's own watchdog fired",
    b"RPC call to execute_model timed out": "a worker did not answer within the engine's own limit",
    b"Hang detected after": "the engine's own hang detector fired",
    b"Found rank divergence": "ranks disagree by the engine's own check",
    b"Watchdog caught collective operation timeout": "a collective ran into its time limit",
    b"Fatal Python error": "the interpreter ended by a fatal error",
}
_SAYS = re.compile(
    b"|".join(
        re.escape(text)
        for text in (
            *_STARTS, *_READY, *_ENDS, *_PAUSES, *_RESUMES, *_UPDATES, *_UPDATED, *_CRASHES, b"Exception in thread"
        )
    )
)  # fmt: skip
_THREAD = re.compile(rb"Exception in thread (?:Thread-\d+ \()?([\w:.-]{1,60})")
_HELPERS = re.compile(
    rb"^(bootstrap_thread|transfer_worker|decode_listener_thread|decode_thread|prefetch_\w+|backup_thread_func"
    rb"|process_(?:input|output)_sockets|\w*(?:nixl|mooncake|handshake|kv_)\w*)$",
    re.I,
)
_TIME = re.compile(rb"^.{0,80}?\b(?:(\d{4})-)?([01]\d)-([0-3]\d)[ T]([0-2]\d):([0-5]\d):([0-5]\d)")
SOON_S = 2.0
"""A line may bear a time that is so much before the start of its process, by rounding and steps of the clock."""


class Followed:
    """One engine's log: its files, and what it has said in this life. `born`: when that began (epoch seconds); lines
    that stood in the file before and bear an earlier time are of a former life."""

    def __init__(self, paths: Sequence[str], born: float = 0.0) -> None:
        self.paths = tuple(paths)
        self._born = born
        self._tails = {path: Tail(path) for path in self.paths}
        self._seen: set[str] = set()
        """Paths that have been read once."""
        self.begin()

    def begin(self) -> None:
        """A new life of the engine: nothing has been said yet."""
        self.ready = self.ending = self.paused = self.updating = False
        self.crash = self.thread = ""
        self.lines = 0
        self.skipped = 0

    def look(self) -> None:
        """Read what is new. Raises OSError when no file can be read."""
        errors: list[OSError] = []
        for path, tail in self._tails.items():
            try:
                lines, skipped = tail.read(), tail.skipped
            except OSError as error:
                errors.append(error)
                continue
            self.skipped, tail.skipped = self.skipped + skipped, 0
            former, first = False, path not in self._seen
            self._seen.add(path)
            for line in lines:
                at = _time_of(line) if first else None
                former = former if at is None else at < self._born - SOON_S
                if not former:
                    self.line(line)
        if errors and len(errors) == len(self.paths):
            raise errors[0]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read, by the names that they have now."""
        return tuple(tail.where for tail in self._tails.values())

    def close(self) -> None:
        """Let go of the files; a later look goes on."""
        for tail in self._tails.values():
            tail.close()

    def line(self, line: bytes) -> None:
        """Take in one line."""
        self.lines += 1
        if (asked := _ACCESS.search(line)) is not None:
            name, value = _ASKED.get(asked[1], ("", False))
            if name and asked[2].startswith(b"2"):
                setattr(self, name, value)
            return
        if _SAYS.search(line) is None:
            return
        line = without_request(line.decode(errors="replace")).encode()
        if any(text in line for text in _STARTS):
            self.begin()
            return
        if any(text in line for text in _READY):
            self.ready = True
            self.updating = self.updating and not any(text in line for text in _UPDATED)
            if b"throughput" in line:
                return
        if not self.crash and any(text in line for text in _ENDS):
            self.ending = True  # an engine that ends itself after a crash was not asked to
        if any(text in line for text in _PAUSES):
            self.paused = True
        elif any(text in line for text in _RESUMES):
            self.paused = False
        if any(text in line for text in _UPDATES):
            self.updating = True
        elif any(text in line for text in _UPDATED):
            self.updating = False
        if not self.ending and not self.crash:
            self.crash = next((said for text, said in _CRASHES.items() if text in line), "")
        found = _THREAD.search(line) if b"Exception in thread" in line else None
        if found and _HELPERS.search(found[1]) and not self.ending:
            self.thread = found[1].decode("ascii", "replace")

    def values(self) -> Values:
        """What has been said in this life."""
        now = time.monotonic()
        return {
            "at": now,
            "ready": self.ready,
            "ending": self.ending,
            "paused": self.paused,
            "updating": self.updating,
            "crash": self.crash,
            "thread": self.thread,
            "lines": float(self.lines),
            "skipped": float(self.skipped),
        }


def _time_of(line: bytes) -> float | None:
    """The time that a line bears, by the clock of this machine; without a year the last such day."""
    found = _TIME.match(line[:200])
    if found is None:
        return None
    now = time.time()
    month, day, hour, minute, second = (int(part) for part in found.groups()[1:])
    years = [int(found[1])] if found[1] else [time.localtime(now).tm_year, time.localtime(now).tm_year - 1]
    try:
        times = [time.mktime((year, month, day, hour, minute, second, 0, 0, -1)) for year in years]
    except (OverflowError, ValueError):
        return None
    return next((at for at in times if at < now + 86400), times[-1])


class LogSignal:
    """Key: engine."""

    name: SignalName = "log"
    every_s = 1.0
    limit_s = 8.0

    def __init__(self, given: dict[str, str] | None = None) -> None:
        self._given = given or {}
        self._followed: dict[str, tuple[tuple[int, int], Followed]] = {}
        self._seen: dict[str, float] = {}
        self._aside = Aside("log")

    def paths(self, engine: EngineSeen) -> tuple[str, ...]:
        """The log files of an engine: given by flag, else those behind its standard output and error."""
        given = self._given.get(engine.name)
        return (given,) if given else engine.logs

    def files(self, engine: EngineSeen) -> tuple[str, ...]:
        """The same by the names that they have now: after a rotation an engine may go on in what was renamed."""
        paths, followed = self.paths(engine), self._followed.get(engine.name)
        return followed[1].files if followed is not None and followed[1].paths == paths else paths

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """In a thread: a log may lie on a file system that hangs."""
        return await self._aside.run(lambda: self.read_now(engines))

    def read_now(self, engines: Sequence[EngineSeen]) -> Readings:
        """The reading itself; blocking."""
        found: Readings = {}
        for engine in engines:
            paths = self.paths(engine)
            if not paths:
                found[engine.name] = Blind(f"its output goes to no file: give --log {engine.name}=FILE")
                continue
            head = engine.head or engine.procs[0]
            life = (head.pid, head.start_time)
            old = self._followed.get(engine.name)
            if old is None or old[1].paths != paths:
                if old is not None:
                    old[1].close()
                age_s = (procfs.uptime_ticks() - head.start_time) / procfs.TICKS
                old = (life, Followed(paths, time.time() - age_s))
            elif old[0] != life:
                old[1].begin()
                old = (life, old[1])
            self._followed[engine.name] = old
            self._seen[engine.name] = time.monotonic()
            found[engine.name] = _look(*old)
        for name in self._followed.keys() - {e.name for e in engines}:
            if time.monotonic() - self._seen[name] < LEFT_S:
                found[name] = _look(*self._followed[name])
            else:
                self._followed[name][1].close()
        return found


def _look(life: tuple[int, int], followed: Followed) -> Values | Blind:
    """What was said, and by which life: that of an engine can be of another one by the time that it is judged."""
    try:
        followed.look()
    except OSError as error:
        return Blind(f"{error.filename or 'its log'}: {error.strerror}")
    return {**followed.values(), "pid": float(life[0]), "start": float(life[1])}
