"""py-spy: dumps as text, dumps as JSON, and snapshots of `py-spy top`. Locals are skipped, titles only recognised."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from closeranks.diagnose import names
from closeranks.diagnose.facts import Event, Fact, Frame, Src, Stack, Thread, Who
from closeranks.diagnose.lines import Line

_PROCESS = re.compile(r"^\s*(?:\S+\s)?Process (\d+): ?(.*)$")
_THREAD = re.compile(r"^(\s*)Thread (\d+|0x[0-9A-Fa-f]+)(?: \(([a-z+]+)\))(?:: \"(.*)\")?\s*$")
_FRAME = re.compile(r"^(\s*)(\S.*?) \(([^()]*?)(?::(\d+))?\)\s*$")
_DUMP_FOR = re.compile(r"Pyspy dump for PID (\d+)")
_SAFE_NAME = re.compile(r"[^\w.<>:~ ,*&$-]")
MAX_FRAMES = 300


def clean_name(name: str) -> str:
    """A function's name: the last component of a qualified Python name; C++ names keep their scopes, lose arguments."""
    name = name.strip().split("(")[0]
    if "." in name and "::" not in name:
        name = name.rsplit(".", 1)[-1]
    return _SAFE_NAME.sub("", name)[:120] or "?"


def clean_file(file: str) -> str:
    """A file name of a frame, with nothing in it but path characters."""
    return re.sub(r"[^\w./<>+@-]", "", file)[:200]


def role_of(threads: Iterable[Thread]) -> str:
    """`decode` or `prefill` when a frame of the main loop says so."""
    for thread in threads:
        if thread.main:
            for f in thread.frames:
                if "disagg_decode" in f.name or f.file.endswith("disaggregation/decode.py"):
                    return "decode"
                if "disagg_prefill" in f.name or f.file.endswith("disaggregation/prefill.py"):
                    return "prefill"
    return ""


def mark_main(threads: list[Thread], pid: int | None) -> tuple[Thread, ...]:
    """Flag the thread that decides: by name, else the only one, else none."""
    if any(t.main for t in threads):
        return tuple(threads)
    named = [i for i, t in enumerate(threads) if t.name == "MainThread"]
    if not named and len(threads) == 1 and not threads[0].name:
        named = [0]
    return tuple(
        Thread(t.name, t.frames, t.active, t.gil, True) if named and i == named[0] else t for i, t in enumerate(threads)
    )


def _own_clock(line: Line) -> float | None:
    """The engine's clock: a collector's may be in another time zone."""
    return None if line.stamped else line.time


class PySpyText:
    """`py-spy dump`, alone, embedded in a log, several processes in a row, cut at any place."""

    NAME = "pyspy-text"
    ABOUT = "py-spy dump as text, also with --native, --locals (skipped), --subprocesses, and inside logs"
    TOKENS = ("Process ", "Thread ", "Pyspy dump for PID")

    def __init__(self) -> None:
        self.open = False
        self._reset(None, None, None, Src("", 0), None)

    def _reset(self, pid: int | None, title: str | None, who: Who | None, src: Src, time: float | None) -> None:
        self.pid, self.title, self.who, self.src, self.time = pid, title, who, src, time
        self.threads: list[Thread] = []
        self.head: tuple[str, bool, bool, bool] | None = None
        self.frames: list[Frame] = []
        self.base = self.indent = -1
        self.started = False
        self.python = ""

    def line(self, line: Line) -> Iterator[Fact]:
        """A header starts or extends a dump; a line that is neither header nor frame ends it."""
        text = line.text
        if m := _DUMP_FOR.search(text):
            yield from self._flush()
            self._reset(int(m[1]), None, line.who, line.src, _own_clock(line))
            return
        if (m := _PROCESS.match(text)) and not text.rstrip().endswith((".", ",")):
            pid, title = int(m[1]), m[2]
            keep = self.pid == pid and not self.threads and self.head is None
            if not keep:
                yield from self._flush()
                self._reset(pid, title, None, line.src, _own_clock(line))
            self.title, self.src = title, line.src
            self.who = names.from_title(title) or self.who
            self.open = True
            return
        if m := _THREAD.match(text):
            self._close_thread()
            if not self.started and self.title is None and self.pid is None:
                self._reset(None, None, None, line.src, _own_clock(line))
            self.started = self.open = True
            name = m[4] or ""
            native_main = self.pid is not None and m[2] == str(self.pid) and not name
            self.head = (
                name[:80],
                m[3].startswith("active"),
                m[3] == "active+gil",
                name == "MainThread" or native_main,
            )
            self.base, self.indent = len(m[1]), -1
            return
        if not self.open:
            return
        if self.head is not None and self._frame(text):
            return
        if m := re.match(r"\s*Python v(\d\.\d{1,2})\.", text):
            self.python = m[1]
        if not text.strip() or text.lstrip().startswith(("Python v", "Parent Process", "---", "Reason:")):
            return
        if self.head is None and self.title is not None:  # a header without threads yet, then something else
            if line.own_prefix:
                yield from self._flush()
            return
        if line.own_prefix or len(text) - len(text.lstrip()) <= self.base:
            yield from self._flush()

    def _frame(self, text: str) -> bool:
        """Whether `text` belongs to the open thread: a frame, a bare address, or locals (skipped)."""
        indent = len(text) - len(text.lstrip())
        if self.indent >= 0 and indent >= self.indent + 4:
            return True  # Arguments:, Locals: and what they hold
        if indent <= self.base:
            return False
        m = _FRAME.match(text)
        if m is None:
            return bool(re.match(r"\s*(?:0x[0-9a-f]+|Arguments:|Locals:)", text))
        if self.indent < 0:
            self.indent = indent
        if len(self.frames) < MAX_FRAMES:
            self.frames.append(Frame(clean_name(m[2]), clean_file(m[3]), int((m[4] or "0")[:9])))
        return True

    def _close_thread(self) -> None:
        if self.head is not None:
            name, active, gil, main = self.head
            self.threads.append(Thread(name, tuple(self.frames), active, gil, main))
        self.head, self.frames, self.indent = None, [], -1

    def _flush(self) -> Iterator[Fact]:
        self._close_thread()
        if self.threads:
            threads = mark_main(self.threads, self.pid)
            yield Stack(
                src=self.src,
                who=self.who,
                time=self.time,
                pid=self.pid,
                threads=threads,
                tool="py-spy",
                python=self.python,
                role=role_of(threads) or names.role_in_path(self.title or ""),
            )
        self.open = False
        self._reset(None, None, None, self.src, None)

    def end(self) -> Iterator[Fact]:
        """The dump that the file ended in."""
        yield from self._flush()


class PySpyJson:
    """`py-spy dump --json`: an array of threads of one process, without a title."""

    NAME = "pyspy-json"
    ABOUT = "py-spy dump --json, several arrays back to back"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """One process per array."""
        if not (isinstance(found, list) and found and all(isinstance(t, dict) and "frames" in t for t in found)):
            return None
        if not any("thread_id" in t or "thread_name" in t for t in found):
            return None
        return list(self._stacks(found, src))

    def _stacks(self, found: list[dict[str, Any]], src: Src) -> Iterator[Fact]:
        by_pid: dict[int | None, list[dict[str, Any]]] = {}
        for t in found:
            pid = t.get("pid")
            by_pid.setdefault(pid if isinstance(pid, int) else None, []).append(t)
        for pid, group in by_pid.items():
            threads = []
            command = ""
            for t in group:
                frames = t.get("frames")
                parsed = (
                    [_json_frame(f) for f in frames[:MAX_FRAMES] if isinstance(f, dict)]
                    if isinstance(frames, list)
                    else []
                )
                name = str(t.get("thread_name") or "")[:80]
                main = name == "MainThread" or (not name and pid is not None and t.get("os_thread_id") == pid)
                threads.append(Thread(name, tuple(parsed), bool(t.get("active")), bool(t.get("owns_gil")), main))
                info = t.get("process_info")
                if isinstance(info, dict):
                    command = str(info.get("command_line") or "")
            marked = mark_main(threads, pid)
            yield Stack(
                src=src,
                who=names.from_title(command),
                pid=pid,
                threads=marked,
                tool="py-spy json",
                role=role_of(marked) or names.role_in_path(command),
            )


def _json_frame(f: dict[str, Any]) -> Frame:
    line = f.get("line")
    file = clean_file(str(f.get("short_filename") or f.get("filename") or "?"))
    return Frame(clean_name(str(f.get("name") or "?")), file, line if isinstance(line, int) else 0)


class PySpyTop:
    """A snapshot of `py-spy top`: the functions with the largest own time."""

    NAME = "pyspy-top"
    ABOUT = "py-spy top snapshots"
    TOKENS = ("%Own", "GIL: ", "%  ")
    open = False
    _ROW = re.compile(r"^\s*(\d+(?:\.\d+)?)%\s+(\d+(?:\.\d+)?)%\s+[\d.]+s\s+[\d.]+s\s+([\w.<>:]+)\s+\(([^)]*)\)")

    def line(self, line: Line) -> Iterable[Fact]:
        """One row."""
        if m := self._ROW.match(line.text):
            data = {
                "own": float(m[1]),
                "total": float(m[2]),
                "function": m[3].rsplit(".", 1)[-1][:80],
                "file": clean_file(m[4]),
            }
            yield Event(src=line.src, kind="top_row", data=data)
        elif m := re.search(r"GIL: (\d+(?:\.\d+)?)%, Active: (\d+(?:\.\d+)?)%", line.text):
            yield Event(src=line.src, kind="top_head", data={"gil": float(m[1]), "active": float(m[2])})

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (PySpyText, PySpyTop)
DOCUMENT_READERS = (PySpyJson,)
