"""The verdict on a bundle, in a process of its own: it can be given up, and what it needs of memory goes with it.

python -m closeranks.watch.verdict < FILES > ANSWER      (both msgpack)
"""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from closeranks.watch.patience import within
from closeranks.watch.procfs import TICKS, main_thread

LIMIT_S = 20.0
"""Seconds of CPU that a diagnosis may use: on a machine without a free one it takes as long as it takes, but no longer
than `LONGEST_S`, for recovery waits for it."""
LONGEST_S = 60.0
log = structlog.get_logger()


class Judged(msgspec.Struct, frozen=True):
    """The verdict, with its reports as text."""

    cls: str
    certainty: str
    summary: str
    engine: str = ""
    files: dict[str, str] = {}
    """`verdict.json`, `verdict.html`, `verdict.md` and `issue.md`."""


NONE = Judged("UNDETERMINED", "undetermined", "no verdict")
SOUND = frozenset({"HEALTHY_IDLE", "HEALTHY_WATCHDOG_FALSE_POSITIVE", "NOT_HUNG_SLOW_OR_CAPACITY", "STARTUP"})
"""Verdicts that say that nothing is wrong with the engine."""


def beside_proof(judged: Judged, proof: str) -> Judged:
    """A diagnosis of stacks and logs that finds nothing is undetermined beside a death or a part that is stopped: the
    watch has seen that, and its reports stay as they are. `proof`: what was seen, in words."""
    if judged.cls not in SOUND:
        return judged
    said = f"{proof}; what else was kept shows no fault of its own ({judged.cls}: {judged.summary})"
    return msgspec.structs.replace(judged, cls=NONE.cls, certainty=NONE.certainty, summary=said[:500])


def by_signs(judged: Judged, cls: str, signs: str) -> Judged:
    """A diagnosis that finds nothing where the watch has seen a fault that has a class of its own is that class, and
    likely, or undetermined; its reports stay as they are. `signs`: what was seen, in words."""
    if judged.cls not in SOUND | {NONE.cls}:
        return judged
    said = f"{signs}; what else was kept does not tell more ({judged.cls}: {judged.summary})"
    certainty = NONE.certainty if cls == NONE.cls else "likely"
    return msgspec.structs.replace(judged, cls=cls, certainty=certainty, summary=said[:500])


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used; 0 when it is gone."""
    now = main_thread(pid)
    return now.all_ticks / TICKS if now is not None else 0.0


class Judge:
    """Runs diagnoses. `prepare` starts the child ahead, so that its imports are over when the evidence is there.

    `limit_s`: CPU seconds of one, by `used_s(pid)`; `longest_s`: what it may take whatever it got of the CPU.
    """

    def __init__(
        self, limit_s: float = LIMIT_S, longest_s: float = LONGEST_S, used_s: Callable[[int], float] = cpu_s
    ) -> None:
        self._limit_s, self._longest_s, self._used_s = limit_s, longest_s, used_s
        self._ready: asyncio.subprocess.Process | None = None

    async def prepare(self) -> None:
        """Have a child waiting; one at a time. A machine that gives no process is no error here."""
        if self._ready is None:
            try:
                self._ready = await _child()
            except OSError as error:
                log.warning("no process for a diagnosis ahead", error=error.strerror)

    async def judge(self, files: Mapping[str, bytes]) -> Judged:
        """Diagnose the files of a bundle. Never raises: without an answer it is undetermined, and says why."""
        process, self._ready = self._ready, None
        began = time.monotonic()
        try:
            if process is None or process.returncode is not None:
                process = await _child()
            asked = asyncio.create_task(process.communicate(msgspec.msgpack.encode(dict(files))))
            pid = process.pid
            if not await within(asked, self._longest_s, lambda: self._used_s(pid) >= self._limit_s):
                took, used = time.monotonic() - began, self._used_s(pid)
                asked.cancel()
                said = f"no verdict: cut off after {took:.0f} s, in which it used {used:.1f} s of CPU"
                return msgspec.structs.replace(NONE, summary=said)
            out, err = await asked
        except OSError as error:
            return msgspec.structs.replace(NONE, summary=f"no verdict: {error.strerror or error}")
        finally:
            await _end(process)
        try:
            return msgspec.msgpack.decode(out, type=Judged)
        except msgspec.DecodeError:
            last = err.decode(errors="replace").strip().rpartition("\n")[2]
            return msgspec.structs.replace(NONE, summary=f"no verdict: {last[:200]}")

    async def close(self) -> None:
        """End a child that waits."""
        process, self._ready = self._ready, None
        await _end(process)


async def _child() -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "closeranks.watch.verdict"]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)


async def _end(process: asyncio.subprocess.Process | None) -> None:
    if process is not None and process.returncode is None:
        process.kill()
        await process.wait()


def main() -> None:
    """The child's side."""
    from closeranks.diagnose.judge import diagnose_texts
    from closeranks.diagnose.report import json_report, markdown, page

    raw = sys.stdin.buffer.read()
    if not raw:  # it was not needed
        return
    files = msgspec.msgpack.decode(raw, type=dict[str, bytes])
    verdict = diagnose_texts(files.items())
    found = verdict.main
    reports = {
        "verdict.json": json_report.render(verdict),
        "verdict.html": page.render(verdict),
        "verdict.md": markdown.render(verdict),
        "issue.md": markdown.issue(verdict),
    }
    answer = Judged(found.cls, found.certainty, found.summary, found.engine, reports)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
