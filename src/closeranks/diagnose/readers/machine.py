"""The machine: nvidia-smi, ps, /proc, kernel log, container events."""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from closeranks.diagnose import names
from closeranks.diagnose.facts import Event, Fact, Gpu, Process, Value
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_CELL = re.compile(
    r"-?\d+(?:\.\d+)? ?(?:%|W|MiB|MHz|C|J)?|\[?(?:N/A|Not Supported|Unknown Error|GPU requires reset)\]?|"
)
_MEASURED = ("utilization", "power", "memory", "temperature", "clocks")


def _number(text: str) -> float | None:
    m = _NUMBER.search(text)
    return float(m[0]) if m else None


class NvidiaSmi:
    """`nvidia-smi --query-gpu=… --format=csv` with a header, and the rows of the plain table."""

    NAME = "nvidia-smi"
    ABOUT = "nvidia-smi: csv queries with a header, and the plain table"
    TOKENS = ("utilization.gpu", "%, ", " %,", "MiB /", "W /", ", [N/A]")

    def __init__(self) -> None:
        self.open = False
        self.columns: list[str] = []
        self.row = 0
        self.pending: str | None = None
        self.plain = 0

    def line(self, line: Line) -> Iterable[Fact]:
        """A header opens a table; rows follow until a line that is none."""
        text = line.text.strip()
        if "utilization.gpu" in text or ("power.draw" in text and "," in text):
            self.columns = [c.split("[")[0].strip() for c in text.split(",")]
            self.open, self.row = True, 0
            return
        if self.open and self.columns:
            cells = [c.strip() for c in text.split(",")]
            if len(cells) == len(self.columns) and self._measures(cells):
                yield self._csv(line, cells)
                self.row += 1
            elif text:
                self.open = False
        m = re.search(r"(\d+)C\s+P\d+\s+(\d+)W\s*/\s*(\d+)W\s*\|\s*(\d+)MiB\s*/\s*(\d+)MiB\s*\|\s*(\d+)%", text)
        if m:
            yield Gpu(
                src=line.src,
                index=str(self.plain),
                power=float(m[2]),
                power_limit=float(m[3]),
                mem_used=float(m[4]),
                mem_total=float(m[5]),
                util=float(m[6]),
            )
            self.plain += 1

    def _measures(self, cells: list[str]) -> bool:
        """Whether this is a row of the table and no other line with as many commas."""
        measured = [c for name, c in zip(self.columns, cells, strict=True) if name.startswith(_MEASURED)]
        return any(_number(c) is not None for c in measured) and all(_CELL.fullmatch(c) for c in measured)

    def _csv(self, line: Line, cells: list[str]) -> Gpu:
        by = dict(zip(self.columns, cells, strict=True))
        index = by.get("index") or by.get("node") or by.get("host") or str(self.row)
        index = re.sub(r"[^\w.-]", "", index)[:40]
        return Gpu(
            src=line.src,
            time=line.time,
            index=index,
            util=_number(by.get("utilization.gpu", "")),
            mem_util=_number(by.get("utilization.memory", "")),
            power=_number(by.get("power.draw", by.get("power.draw.instant", ""))),
            power_limit=_number(by.get("power.limit", "")),
            mem_used=_number(by.get("memory.used", "")),
            mem_total=_number(by.get("memory.total", "")),
        )

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        self.open = False
        return ()


class Ps:
    """Rows of ps whose command is a known process of an engine, and zombies."""

    NAME = "ps"
    ABOUT = "ps listings: engine processes, their state and CPU; command lines are recognised, never kept"
    TOKENS = ("PID", "sglang::", "VLLM::", "<defunct>", "launch_server", "vllm serve", "trtllm", "sglang_")
    _DEBUGGER = re.compile(r"(?:^|/)(gdb|lldb|cuda-gdb)\b.*\s(?:-p|--pid|attach)[ =]?(\d{1,9})\b")
    _CHILD = re.compile(r"spawn_main|multiprocessing\.(?:spawn|forkserver)|multiprocessing-fork")

    def __init__(self) -> None:
        self.open = False
        self.columns: list[str] = []
        self.at: Line | None = None
        self.seen = {"_rows": 0, "_foreign": 0, "_children": 0}

    def line(self, line: Line) -> Iterable[Fact]:
        """The header names the columns; without one, the usual orders are tried."""
        words = line.text.split()
        if "PID" in words and ("COMMAND" in words or "CMD" in words or "ARGS" in words):
            yield from self.end()
            self.columns, self.open, self.at = words, True, line
            self.seen = dict.fromkeys(self.seen, 0)
            return
        if not self.columns:
            return
        if not words:
            return
        at = next((i for i, c in enumerate(self.columns) if c in ("COMMAND", "CMD", "ARGS")), len(self.columns) - 1)
        if len(words) <= at or line.own_prefix:
            yield from self.end()
            return
        by = dict(zip(self.columns, words, strict=False))
        if not by.get("PID", "").isdecimal():
            yield from self.end()
            return
        command = " ".join(words[at:])
        who = names.from_title(command)
        self.seen["_rows"] += 1
        self.seen["_foreign"] += who is None and not re.search(r"(?i)vllm|sglang|\bps\b|grep", command)
        self.seen["_children"] += self._CHILD.search(command) is not None
        if m := self._DEBUGGER.search(command):
            yield Event(src=line.src, kind="debugger", data={"tool": m[1], "pid": int(m[2])})
        state = by.get("STAT", by.get("S", "?"))
        if not re.fullmatch(r"[A-Za-z<>+?]{1,6}", state):
            state = "?"
        if who is None and not state.startswith("Z"):
            return
        cpu = by.get("%CPU", by.get("C", ""))
        yield Process(src=line.src, who=who, pid=int(by["PID"][:12]), state=state, cpu=_number(cpu) if cpu else None)

    def end(self) -> Iterable[Fact]:
        """The listing, with what it holds beside an engine's own rows."""
        self.open = False
        if self.at is not None:
            data: dict[str, Value] = dict(self.seen)
            yield Event(src=self.at.src, kind="ps_listing", data=data)
        self.at = None


class Proc:
    """`/proc/<pid>/status`, and `/proc/<pid>/task/<pid>/stat` under a header that names it.

    Both tell of the main thread alone. `/proc/<pid>/stat` adds up all threads, so a helper that spins would hide a main
    thread that stands: it is not read.
    """

    NAME = "proc"
    ABOUT = "/proc/<pid>/status and task/<pid>/stat: state, switches, CPU time; two readings of one pid make a change"
    TOKENS = ("State:\t", "State: ", "ctxt_switches:", "Name:\t", "Pid:\t", "Pid: ", "Name: ", "/stat <==")
    _STAT = re.compile(r"^(\d{1,9}) \((.{1,64}?)\) ([A-Za-z]) (?:-?\d+ ){10}(\d+) (\d+) (?:-?\d+ ?){20,}$")
    _HEADER = re.compile(r"^==> /proc/(\d+)/task/\1/stat <==")

    def __init__(self) -> None:
        self.open = False
        self.now: dict[str, str] = {}
        self.at: Line | None = None

    def line(self, line: Line) -> Iterable[Fact]:
        """`nonvoluntary_ctxt_switches` is the last line of a reading of status; stat is one line after its header."""
        if self.open:
            self.open = False
            if stat := self._STAT.match(line.text.strip()):
                yield Process(
                    src=line.src,
                    who=names.from_title(stat[2]),
                    pid=int(stat[1]),
                    state=stat[3],
                    ticks_total=float(int(stat[4][:15]) + int(stat[5][:15])),
                )
                return
        if self._HEADER.match(line.text):
            self.open = True
            return
        m = re.match(
            r"^\s*(Name|State|Pid|PPid|voluntary_ctxt_switches|nonvoluntary_ctxt_switches):\s*(\S+)",
            line.text,
        )
        if not m:
            return
        if m[1] == "Name":
            self.now, self.at = {}, line
        self.now[m[1]] = m[2]
        if m[1] == "nonvoluntary_ctxt_switches" and self.now.get("Pid", "").isdecimal():
            pid = int(self.now["Pid"][:12])
            slept = _number(self.now.get("voluntary_ctxt_switches", "0"))
            who = names.from_title(self.now.get("Name", ""))
            state = self.now.get("State", "?")[:1]
            yield Process(
                src=(self.at or line).src,
                who=who,
                pid=pid,
                state=state,
                switches_total=slept,
                forced_total=_number(m[2]),
            )
            self.now = {}

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        self.open = False
        return ()


class KernelLog(SignatureReader):
    """dmesg and journalctl -k: kills for memory."""

    NAME = "kernel-log"
    ABOUT = "dmesg, journalctl -k: OOM kills with the task's name"
    SIGNATURES = (
        Sig("oom_kill", "Killed process", r"Killed process (?P<pid>\d+) \((?P<task>[\w:.-]{1,20})\)"),
        Sig("oom_kill", "oom-kill:", r"task=(?P<task>[\w:.-]{1,20}),pid=(?P<pid>\d+)"),
        Sig("oom_kill", "oom_reaper: reaped process", r"process (?P<pid>\d+) \((?P<task>[\w:.-]{1,20})\)"),
        Sig("ray_memory_kill", "memory monitor", r"(?i)kill"),
    )  # fmt: skip

    def line(self, line: Line) -> Iterable[Fact]:
        """Events of the line. A collector's clock says when the ring was read out, not when the process was killed."""
        for fact in super().line(line):
            yield replace(fact, time=None) if line.stamped else fact


class Cgroup(SignatureReader):
    """`cpu.stat` of a cgroup: how often its processes were held back by their CPU limit."""

    NAME = "cgroup-cpu"
    ABOUT = "cpu.stat: periods of a CPU limit, and in how many of them the processes were held back"
    SIGNATURES = (
        Sig("cpu_periods", "nr_periods", r"^\s*nr_periods (?P<n>\d+)\s*$"),
        Sig("cpu_throttled", "nr_throttled", r"^\s*nr_throttled (?P<n>\d+)\s*$"),
    )


class Containers:
    """kubectl get events / describe: restarts, kills, probes."""

    NAME = "containers"
    ABOUT = "Kubernetes events and container states: started, killing, probe failures, exit codes"
    TOKENS = (
        "Killing",
        "Started container",
        "Liveness probe",
        "Readiness probe",
        "Stopping container",
        "Unhealthy",
        "BackOff",
        "OOMKilling",
        "Evicted",
    )
    open = False
    _AGE = re.compile(r"^\s*(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\s")

    def line(self, line: Line) -> Iterable[Fact]:
        """One event. The object's kind (prefill, decode, …) is kept as a word when its name holds it."""
        text = line.text
        kind = ""
        if "probe failed" in text or "failed liveness probe" in text or "Unhealthy" in text:
            kind = "probe_failed"
        if "Killing" in text or "Stopping container" in text:
            kind = "container_killed"
        elif "Started" in text and "container" in text:
            kind = "container_started"
        elif "OOMKilling" in text:
            kind = "oom_kill"
        if not kind:
            return
        data: dict[str, Value] = {}
        if m := re.search(r"(?i)(prefill|decode|router|gateway|frontend)", text):
            data["object"] = m[1].lower()
        if "liveness" in text.lower():
            data["probe"] = "liveness"
        age = self._AGE.match(text)
        if age and any(age.groups()):
            d, h, mi, s = (int(g or 0) for g in age.groups())
            data["ago"] = ((d * 24 + h) * 60 + mi) * 60 + s
        yield Event(src=line.src, time=line.time, kind=kind, data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (NvidiaSmi, Ps, Proc, KernelLog, Cgroup, Containers)
