"""gdb and cuda-gdb: native stacks of a process, kernels resident on a device."""

import re
from collections.abc import Iterable, Iterator

from closeranks.diagnose import names
from closeranks.diagnose.facts import Fact, Frame, Kernel, Src, Stack, Thread
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers.pyspy import clean_file

_THREAD = re.compile(r"^\s*Thread (\d+) \(Thread (?:0x[0-9a-f]+) \(LWP (\d+)\)(?: \"([^\"]*)\")?\)")
_FRAME = re.compile(r"^\s*#(\d+)\s+(?:0x[0-9a-f]+ in )?(.+?) \(.*?\)(?: (?:at|from) (\S+?)(?::(\d+))?)?\s*$")
_SAFE = re.compile(r"[^\w.<>:~,*&$ -]")


class Gdb:
    """`thread apply all bt`. The main thread is the one with the smallest LWP, which is the process id."""

    NAME = "gdb"
    ABOUT = "gdb thread apply all bt"
    TOKENS = ("(LWP ", "attach ")

    def __init__(self) -> None:
        self.open = False
        self.threads: list[tuple[int, Thread]] = []
        self.head: tuple[int, str] | None = None
        self.frames: list[Frame] = []
        self.src = Src("", 0)

    def line(self, line: Line) -> Iterator[Fact]:
        """Headers and frames."""
        if m := _THREAD.match(line.text):
            self._close()
            if not self.threads:
                self.src = line.src
            self.head, self.open = (int(m[2]), m[3] or ""), True
        elif self.open and (m := _FRAME.match(line.text)):
            if len(self.frames) < 300:
                name = _SAFE.sub("", re.sub(r"\(.*", "", m[2]))[:160]
                self.frames.append(Frame(name or "?", clean_file((m[3] or "").rsplit("/", 1)[-1]), int(m[4] or 0)))
        elif self.open and line.own_prefix:
            yield from self.end()

    def _close(self) -> None:
        if self.head:
            lwp, name = self.head
            self.threads.append((lwp, Thread(name, tuple(self.frames))))
        self.head, self.frames = None, []

    def end(self) -> Iterator[Fact]:
        """All threads seen since the last flush are one process."""
        self._close()
        if self.threads:
            pid = min(lwp for lwp, _ in self.threads)
            threads = tuple(Thread(t.name, t.frames, main=lwp == pid) for lwp, t in self.threads)
            yield Stack(src=self.src, pid=pid, threads=threads, tool="gdb", who=names.from_title(threads[0].name))
        self.open, self.threads = False, []


class CudaGdb:
    """`info cuda kernels` tables and the instruction under the program counter."""

    NAME = "cuda-gdb"
    ABOUT = "cuda-gdb info cuda kernels, x/i $pc"
    TOKENS = (
        "info cuda kernels",
        "No CUDA kernels",
        "Active 0x",
        "TRYWAIT",
        "Switching focus to CUDA",
        "/ device",
        "device ",
    )
    open = False
    _ROW = re.compile(r"^\s*\*?\s*\d+\s+\S+\s+(\d+)\s+\d+\s+Active\s+\S+\s+\([\d,]+\)\s+\([\d,]+\)\s+(.*)$")

    def __init__(self) -> None:
        self.device = ""
        self.last: Kernel | None = None

    def line(self, line: Line) -> Iterable[Fact]:
        """A row, the absence of rows, or a spinning instruction."""
        if m := re.match(r"^\s*(?:\(cuda-gdb\) )?\s*(?:rank (\d+) */ *)?device (\d+)\s*$", line.text):
            self.device = m[2]
        elif "No CUDA kernels" in line.text:
            yield Kernel(src=line.src, device=self.device, name="")
        elif m := self._ROW.match(line.text):
            name = _SAFE.sub("", re.split(r"[<(]", m[2])[0])[:120]
            self.last = Kernel(src=line.src, device=m[1], name=name)
            yield self.last
        elif "TRYWAIT" in line.text and self.last is not None:
            yield Kernel(src=line.src, device=self.last.device, name=self.last.name, spinning=True)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (Gdb, CudaGdb)
