# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Crash text: faulthandler, Python tracebacks and exception lines, fatal signals, exit codes."""

import re
from collections.abc import Iterator

from closeranks.diagnose.facts import Event, Fact, Frame, Src, Stack, Thread, Value, Who
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader, carries_request
from closeranks.diagnose.readers.pyspy import clean_file, clean_name, role_of

_FRAME = re.compile(r'^\s*File "([^"]*)", line (\d+),? in (\S+)')
_THREAD = re.compile(r"^\s*(Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[([^\]]*)\])? \(most recent call first\)")


class Faulthandler:
    """`Thread 0x… (most recent call first):` blocks. There is no rank in them but a log prefix may bring one."""

    NAME = "faulthandler"
    ABOUT = "faulthandler dumps: Fatal Python error, Timeout, all threads"
    TOKENS = ("(most recent call first)",)

    def __init__(self) -> None:
        self.open = False
        self.threads: list[Thread] = []
        self.frames: list[Frame] = []
        self.head: tuple[str, bool] | None = None
        self.src = Src("", 0)
        self.who: Who | None = None
        self.time: float | None = None

    def line(self, line: Line) -> Iterator[Fact]:
        """Headers and frames; anything else ends the dump."""
        if m := _THREAD.match(line.msg):
            self._close()
            if not self.threads:
                self.src, self.who, self.time = line.src, line.who, line.time
            self.head, self.open = (m[3] or "", m[1] == "Current thread"), True
        elif self.open and (m := _FRAME.match(line.msg)):
            if len(self.frames) < 300:
                self.frames.append(Frame(clean_name(m[3]), clean_file(m[1]), int(m[2][:9])))
        elif self.open and line.text.strip():
            yield from self.end()

    def _close(self) -> None:
        if self.head is not None:
            name, _current = self.head
            top = self.frames[-1].name if self.frames else ""
            is_main = name in ("MainThread", "python3", "python") or top in ("<module>", "spawn_main", "_main")
            self.threads.append(Thread(name, tuple(self.frames), main=is_main))
        self.head, self.frames = None, []

    def end(self) -> Iterator[Fact]:
        """The dump that the file ended in."""
        self._close()
        if self.threads:
            seen_main = False
            threads = []
            for t in self.threads:
                threads.append(Thread(t.name, t.frames, main=t.main and not seen_main))
                seen_main = seen_main or t.main
            yield Stack(
                src=self.src,
                who=self.who,
                time=self.time,
                pid=None,
                threads=tuple(threads),
                tool="faulthandler",
                role=role_of(threads),
            )
        self.open, self.threads = False, []


# What a last line of a traceback begins with. The message after the colon is searched, never kept.
_EXCEPTION = re.compile(
    r"(?:^|[\s\]:|])((?:[A-Za-z_]\w*\.){0,6}[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout|Dead\w*|AcceleratorError))(?::|$|\s\()"
)
# Exceptions of native modules keep their C++ names: `nixl_cu12._bindings.nixlBackendError: …`.
_NATIVE = re.compile(r"^((?:[A-Za-z_]\w*\.){1,6}[a-z]\w*(?:Error|Exception))(?::|$)")
_CAUSES = (
    ("cuda_oom", r"CUDA out of memory|OutOfMemoryError|out of memory"),
    ("cuda_error", r"CUDA error|cudaError|illegal memory access|device-side assert|CUBLAS_STATUS|Xid"),
    ("address_in_use", r"EADDRINUSE|[Aa]ddress already in use"),
    ("store_timeout", r"waiting for clients|DistStoreError|Timed out after \d+ seconds|wait timeout after \d+ms, keys"),
    ("gloo_timeout", r"Timed out waiting \d+ms for (?:recv|send)"),
    ("gloo_size", r"op\.preamble\.length <= op\.nbytes"),
    ("peer_timeout", r"Read error.*Connection timed out"),
    ("peer_closed", r"Connection (?:closed|reset) by peer|Broken pipe"),
    ("deepep_timeout", r"DeepEP error: timeout"),
    ("nccl_error", r"NCCL error|ncclUnhandled|ncclSystemError|ncclRemoteError|ncclInternalError"),
    ("nccl_timeout", r"collective operation timeout"),
    ("rpc_timeout", r"RPC call to \w+ timed out"),
    ("kv_transfer", r"KVTransferError|KVPoll|transfer_infos"),
    ("engine_dead", r"EngineDeadError|Engine core initialization failed"),
    ("cancelled", r"cancelled"),
    ("permission", r"Permission denied"),
    ("connect_full_mesh", r"connectFullMesh"),
    ("no_space", r"No space left on device"),
)
_CAUSES_COMPILED = tuple((n, re.compile(p)) for n, p in _CAUSES)


def cause_of(text: str) -> str:
    """The known cause that an exception's text names, "" for any other."""
    return next((name for name, p in _CAUSES_COMPILED if p.search(text)), "")


class Exceptions:
    """Exception lines: type and known cause only. Continuation lines inherit the last prefix of a record."""

    NAME = "exceptions"
    ABOUT = "Last lines of tracebacks: exception type and known causes (the message itself is not kept)"
    TOKENS = ("Error", "Exception", "Traceback", "hit an exception", "terminate called")

    def __init__(self) -> None:
        self.open = False
        self.last: Line | None = None
        self.lines_left = 0

    def line(self, line: Line) -> Iterator[Fact]:
        """One exception line, with the rank and clock of the record that it belongs to."""
        text = line.text
        if line.own_prefix:
            self.last = line
        if "Traceback (most recent call last)" in text or "hit an exception" in text:
            self.open, self.lines_left = True, 120
            return
        if self.open and (f := _FRAME.match(line.msg)):
            at = self.last if self.last is not None else line
            named: dict[str, Value] = {"function": clean_name(f[3]), "file": clean_file(f[1].rsplit("/", 1)[-1])}
            yield Event(src=line.src, who=at.who, time=line.time, kind="traceback_frame", data=named)
            return
        self.lines_left -= 1
        if self.open and (self.lines_left <= 0 or (line.own_prefix and "Error" not in text)):
            self.open = False
        if carries_request(text) or "Watchdog caught" in text:
            return
        if text.lstrip().startswith(("File ", "raise ", "except ", "assert ")) and '"' in text + '"':
            return
        in_traceback = self.open
        m = _EXCEPTION.search(line.msg, 0, 400) or (_NATIVE.match(line.msg, 0, 400) if in_traceback else None)
        if m is None or ("INFO:" in text[:60]):
            return
        at = line if line.own_prefix or self.last is None else self.last
        # A traceback's last line starts at its record's margin; elsewhere a message must lead with the exception.
        if not in_traceback and m.start() > 80 and not line.own_prefix:
            return
        name = m[1].rsplit(".", 1)[-1]
        data: dict[str, Value] = {"type": name, "cause": cause_of(text), "traceback": in_traceback}
        yield Event(
            src=line.src,
            who=line.who or at.who,
            time=line.time if line.time is not None else at.time,
            kind="exception",
            data=data,
        )

    def end(self) -> Iterator[Fact]:
        """Nothing waits."""
        return iter(())


class Signals(SignatureReader):
    """Deaths: fatal signals, exit codes, segmentation faults."""

    NAME = "deaths"
    ABOUT = "Fatal signals, exit codes, aborts and segmentation faults in logs, containers and units"
    SIGNATURES = (
        Sig("fatal", "Fatal Python error", r"Fatal Python error: (?P<what>Segmentation fault|Aborted|Bus error|Floating point exception|[A-Za-z_]{3,40})"),
        Sig("fatal", "received at time=", r"\*\*\* (?P<what>SIG[A-Z]+) received"),
        Sig("fatal", "terminate called", r"(?=.)"),
        Sig("exit_code", "Exit Code", r"(?:Reason: +(?P<reason>\w+).*?)?Exit Code: +(?P<code>\d+)"),
        Sig("exit_code", "exited with code", r"exited with code (?P<code>\d+)"),
        Sig("exit_code", "Main process exited", r"code=(?P<reason>\w+), status=(?P<code>\d+)"),
        Sig("exit_code", "OOMKilled", r"(?P<reason>OOMKilled)"),
        Sig("killed_for_memory", "killed by the OOM killer", r"(?=.)"),
        Sig("killed_for_memory", "oom_kill event", r"Detected (?P<n>\d+) oom_kill event"),
        Sig("killed_for_memory", "killed due to memory pressure", r"(?P<n>[1-9]\d*) Workers"),
        Sig("child_crashed", "failed (exitcode:", r"failed \(exitcode: (?P<code>-?\d+)\)(?: local_rank: (?P<index>\d+))?"),
        Sig("child_crashed", "exited on signal", r"process rank (?P<index>\d+) .*?exited on signal (?P<signal>\d+)"),
        Sig("exit_code", "exitcode", r"exitcode\s*[:=]\s*(?P<code>-?\d+)"),
    )  # fmt: skip


LINE_READERS = (Faulthandler, Exceptions, Signals)
