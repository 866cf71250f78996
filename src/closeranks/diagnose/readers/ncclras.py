"""NCCL RAS (`ncclras`): text and JSON. One snapshot proves nothing; two that agree on a mismatch do."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from closeranks.diagnose.facts import Event, Fact, Ras, Setting, Src
from closeranks.diagnose.lines import Line

_HEAD = re.compile(r"^#(\S+) \(([0-9a-f]+)\) (MISMATCH|ERROR|INCOMPLETE)")
_LAUNCHED = re.compile(r"^\s*(\d+) ranks? ha(?:ve|s) launched up to operation (\d+)")
_RANK_AT = re.compile(r"^\s*Rank (\d+) (?:has )?(?:launched up to operation (\d+)|--)")
_SUMMARY = re.compile(r"^\s*\d+\s+\d+\s+\d+\s+\d+\s+\d+\s+(\d+)\s+([A-Z]+)\s+([A-Z]+)\s*$")


class RasText:
    """Blocks of a text report, alone or back to back."""

    NAME = "ncclras-text"
    ABOUT = "ncclras text reports"
    TOKENS = (
        "RUNNING",
        "ABORT  ",
        "FINALIZE",
        "NOCOMM",
        ") MISMATCH",
        ") INCOMPLETE",
        ") ERROR",
        "compiled with CUDA",
        "PEER_DEAD",
    )

    def __init__(self) -> None:
        self.open = False
        self._clear()
        self.src = Src("", 0)

    def _clear(self) -> None:
        self.comm, self.status, self.op = "", "", ""
        self.counts: list[tuple[int, int]] = []
        self.minority: list[int] = []
        self.missing = self.dead = 0

    def line(self, line: Line) -> Iterator[Fact]:
        """One line of a report."""
        text = line.text
        if m := re.match(r"^\s*NCCL version (\d[\w.]*) compiled with CUDA", text):
            yield from self.end()
            yield Setting(src=line.src, kind="version", name="nccl", value=m[1])
            yield Event(src=line.src, kind="ras_report")
        elif m := _SUMMARY.match(text):
            yield Ras(src=line.src, comm="", status=m[3], ranks=int(m[1]))
        elif m := _HEAD.match(text):
            yield from self.end()
            self.open, self.src = True, line.src
            self.comm, self.status = m[2], m[3]
        elif "PEER_DEAD" in text:
            yield Event(src=line.src, time=line.time, kind="ras_peer_dead")
        elif self.open:
            if m := re.search(r"have different (\w+) operation counts", text):
                self.op = m[1]
            elif m := _LAUNCHED.match(text):
                self.counts.append((int(m[1]), int(m[2])))
            elif m := _RANK_AT.match(text):
                if len(self.minority) < 64:
                    self.minority.append(int(m[1]))
                if m[2]:
                    self.counts.append((1, int(m[2])))
            elif m := re.search(r"Missing communicator data from (\d+) job process", text):
                self.missing = int(m[1])
            elif "considered dead" in text:
                self.dead += 1
            elif text.strip() and not text.startswith((" ", "\t")):
                yield from self.end()

    def end(self) -> Iterator[Fact]:
        """The block that ended."""
        if self.open and (self.counts or self.status):
            yield Ras(
                src=self.src,
                comm=self.comm,
                status=self.status,
                op=self.op,
                counts=tuple(self.counts),
                minority=tuple(self.minority),
                missing=self.missing,
                dead=self.dead,
            )
        self.open = False
        self._clear()


class RasJson:
    """`ncclras -f json`."""

    NAME = "ncclras-json"
    ABOUT = "ncclras -f json reports"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """One report."""
        if not isinstance(found, dict) or "communicators" not in found or "nccl_version" not in found:
            return None
        return list(self._facts(found, src))

    def _facts(self, found: dict[str, Any], src: Src) -> Iterator[Fact]:
        version = re.sub(r"[^\d.]", "", str(found["nccl_version"]))[:20]
        yield Setting(src=src, kind="version", name="nccl", value=version)
        yield Event(src=src, kind="ras_report")
        comms = found["communicators"]
        for comm in comms[:2000] if isinstance(comms, list) else ():
            if isinstance(comm, dict):
                yield from self._comm(comm, src)

    def _comm(self, comm: dict[str, Any], src: Src) -> Iterator[Fact]:
        per_op: dict[str, dict[int, list[int]]] = {}
        listed = comm.get("ranks")
        ranks = [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
        for r in ranks:
            counts = r.get("collective_counts")
            for op, n in (counts if isinstance(counts, dict) else {}).items():
                if isinstance(n, int):
                    rank = r.get("rank")
                    by_count = per_op.setdefault(re.sub(r"\W", "", str(op))[:40], {})
                    by_count.setdefault(n, []).append(rank if isinstance(rank, int) else 0)
        name = re.sub(r"\W", "", str(comm.get("hash", "")))[:40]
        missing = comm.get("missing_ranks_count")
        missing = missing if isinstance(missing, int) else 0
        uneven = {op: by for op, by in per_op.items() if len(by) > 1}
        for op, by in uneven.items():
            few = min(by.values(), key=len)
            counts_sorted = tuple(sorted(((len(v), k) for k, v in by.items()), reverse=True))
            yield Ras(
                src=src,
                comm=name,
                status="MISMATCH",
                op=op,
                counts=counts_sorted,
                minority=tuple(few[:64]),
                missing=missing,
                ranks=len(ranks),
            )
        if not uneven:
            yield Ras(src=src, comm=name, status="INCOMPLETE" if missing else "OK", missing=missing, ranks=len(ranks))


LINE_READERS = (RasText,)
DOCUMENT_READERS = (RasJson,)
