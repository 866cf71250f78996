"""NCCL as torch's watchdog and NCCL itself log it: timeouts, group counts, desync reports, transport warnings."""

import re
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from closeranks.diagnose.facts import Collective, Event, Fact, Frame, GroupStatus, Value, Who
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader
from closeranks.diagnose.readers.pyspy import clean_file, clean_name

_WORK = re.compile(
    r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+), NumelOut=(\d+))?(?:, Timeout\(ms\)=(\d+))?\)"
)
_STATUS = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)")
_GROUP = re.compile(
    r"\[PG (?:ID )?(\d+)"
    r"(?: \(?PG GUID ([\w.:-]{1,60})(?:\s*\(([^()]{0,80})\))?\)?| \(([^()]{0,80})\))?(?: Rank (\d+))?\]?"
)
_TRACE = re.compile(r"^#(\d+) (\S+) from (\S+?):(\d+)")


_OPS = frozenset(
    """allreduce broadcast allgather reducescatter alltoall alltoallv gather scatter reduce barrier send recv coalesced
    allgatherv alltoallsingle allgatherintotensorcoalesced monitoredbarrier recvanysource""".split()  # noqa: SIM905
)


def op_name(text: str) -> str:
    """`_ALLGATHER_BASE`, `nccl:_all_gather_base`, `ALLREDUCE` → `allgather`, `allgather`, `allreduce`."""
    word = text.lower().rsplit(":", 1)[-1].strip("_").removesuffix("_base").removesuffix("_coalesced")
    word = word.replace("_into_tensor", "").replace("_tensor", "").replace("_", "").split(" ")[0]
    return word if word in _OPS else "other"


class Watchdog:
    """`Watchdog caught collective operation timeout`, its group status, its stack trace."""

    NAME = "nccl-watchdog"
    ABOUT = "torch ProcessGroupNCCL watchdog: operation, sequence number, sizes, group status, failed stack"
    TOKENS = (
        "Watchdog caught collective",
        "last enqueued",
        "Stack trace of the failed collective",
        "watchdog got stuck",
        "Heartbeat monitor timed out",
    )

    def __init__(self) -> None:
        self.open = False
        self.trace: list[Frame] = []
        self.last: dict[int | None, Collective] = {}
        self.trace_rank: Who | None = None

    def line(self, line: Line) -> Iterator[Fact]:
        """One watchdog line."""
        text = line.text
        if m := _WORK.search(text):
            inner = re.search(r"\[Rank (\d+)\]|Rank (\d+)\]", text)
            place = int(inner[1] or inner[2]) if inner else None
            who = line.who or (Who(kind="torch", family="torch", rank=place) if inner else None)
            group = _GROUP.search(text)
            found = Collective(
                src=line.src,
                who=who,
                time=line.time,
                origin="watchdog",
                seq=int(m[1]),
                op=op_name(m[2]),
                numel_in=int(m[3]) if m[3] else None,
                numel_out=int(m[4]) if m[4] else None,
                timeout_ms=int(m[5]) if m[5] else None,
                group=_group_name(group) if group else "",
                state="timeout",
                p2p=m[2] in ("SEND", "RECV")
                or (m[2] == "COALESCED" and m[3] == m[4]),  # of collectives sizes are known
                place=place,
                numbered=bool(re.match(r"\s*\[rank\d+\]:", text)),
            )
            yield found
        elif m := _STATUS.search(text):
            group = _GROUP.search(text)
            at = re.search(r"at work(?: sequence id)?: (\d+)", text)
            rank = line.who or (Who(kind="torch", family="torch", rank=int(group[5])) if group and group[5] else None)
            yield GroupStatus(
                src=line.src,
                who=rank,
                time=line.time,
                group=_group_name(group) if group else "",
                enqueued=int(m[1]),
                completed=int(m[2]),
                failed_seq=int(at[1]) if at else None,
                place=int(group[5]) if group and group[5] else None,
            )
        elif "Stack trace of the failed collective" in text and "not found" not in text:
            self.open, self.trace, self.trace_rank = True, [], line.who
        elif self.open and (m := _TRACE.match(line.text.lstrip())):
            yield Event(
                src=line.src,
                who=self.trace_rank,
                time=line.time,
                kind="failed_collective_frame",
                data={"function": clean_name(m[2]), "file": clean_file(m[3].rsplit("/", 1)[-1]), "depth": int(m[1])},
            )
        elif self.open and line.own_prefix:
            self.open = False
        if "got stuck for" in text and (m := re.search(r"got stuck for (\d+) seconds", text)):
            yield Event(src=line.src, who=line.who, time=line.time, kind="watchdog_stuck", data={"seconds": int(m[1])})
        elif "Heartbeat monitor timed out" in text:
            yield Event(src=line.src, who=line.who, time=line.time, kind="heartbeat_timeout")

    def end(self) -> Iterator[Fact]:
        """Nothing waits."""
        self.open = False
        return iter(())


def group_name(guid: str, description: str) -> str:
    """A name of one process group: several may share a description (each tensor group of a Megatron job does), and most
    have none. Only the default group's is its own."""
    words = re.sub(r"[^\w.-]", "", description)[:60]
    if words == "default_pg":
        return words
    return f"{words} {guid}" if words and words != "undefined" and words != guid else f"guid {guid}"


def _group_name(m: re.Match[str]) -> str:
    if m[2]:
        return group_name(m[2], m[3] or "")
    return group_name(m[1], m[4]) if m[4] else f"pg {m[1]}"


class FingerPrints:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: two ranks of one group that are about to run different collectives."""

    NAME = "collective-fingerprints"
    ABOUT = "torch's collective fingerprints (TORCH_DISTRIBUTED_DEBUG=DETAIL): operation and shape of two ranks"
    TOKENS = ("CollectiveFingerPrint(",)
    open = False
    _RANK = re.compile(r"Rank (\d+)\s+is running collective: CollectiveFingerPrint\(([^)]{0,200})\)")

    def line(self, line: Line) -> Iterator[Fact]:
        """One mismatch: both sides in one event."""
        sides = self._RANK.findall(line.text)[:2]
        if len(sides) < 2:
            return
        data: dict[str, Value] = {}
        for key, (rank, text) in zip("ab", sides, strict=True):
            op, shape = re.search(r"OpType=(\w+)", text), re.search(r"TensorShape=\[([\d, ]{0,80})\]", text)
            data[f"rank_{key}"] = int(rank[:9])
            data[f"op_{key}"] = op_name(op[1]) if op else "other"
            data[f"shape_{key}"] = shape[1] if shape else ""
        yield Event(src=line.src, who=line.who, time=line.time, kind="fingerprint_mismatch", data=data)

    def end(self) -> Iterator[Fact]:
        """Nothing waits."""
        return iter(())


class DesyncReport:
    """TORCH_NCCL_DESYNC_DEBUG: who joined which collective, who did not."""

    NAME = "desync-report"
    ABOUT = "torch desync report: ranks that joined, finished, did not join"
    TOKENS = (
        "joined but didn't finish collective",
        "but didn't join collective",
        "started ranks",
        "] started ",
        "] finished ",
    )
    open = False

    def __init__(self) -> None:
        self.seq = 0

    def line(self, line: Line) -> Iterable[Fact]:
        """One line of the report."""
        text = line.text
        if m := re.search(r"\[([\d, ]+)\] joined but didn't finish collective #(\d+)", text):
            for rank in _ints(m[1]):
                yield self._event(line, "joined", rank, int(m[2]))
        elif m := re.search(r"\[([\d, ]+)\] (?:finished collective #\d+, )?but didn't join collective #(\d+)", text):
            for rank in _ints(m[1]):
                yield self._event(line, "not_joined", rank, int(m[2]))
        elif m := re.search(r"#(\d+) (?:started|finished) ranks", text):
            self.seq = int(m[1])
        elif self.seq and (m := re.search(r"\[([\d, ]+)\] started ([A-Z_]+)\s*$", text)):
            for rank in _ints(m[1]):
                yield Collective(
                    src=line.src,
                    who=Who(kind="torch", family="torch", rank=rank),
                    time=line.time,
                    origin="desync_report",
                    op=op_name(m[2]),
                    seq=self.seq,
                    group="",
                    state="started",
                )

    def _event(self, line: Line, kind: str, rank: int, seq: int) -> Event:
        who = Who(kind="torch", family="torch", rank=rank)
        return Event(src=line.src, who=who, time=line.time, kind=f"desync_{kind}", data={"seq": seq})

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d{1,6}", text)][:4096]


class NcclLog(SignatureReader):
    """NCCL's own lines, and the platform facts that break its transports."""

    NAME = "nccl-log"
    ABOUT = "NCCL INFO/WARN lines: init complete, transports, completion errors; PCIe access control"
    SIGNATURES = (
        Sig("nccl_ready", "Init COMPLETE", r"rank (?P<rank>\d+) nranks (?P<nranks>\d+)"),
        Sig("nccl_p2p", "via P2P", r"via P2P/(?P<how>\w+)"),
        Sig("nccl_net_error", "Got completion from peer", r"status=(?P<status>\d+)(?:.*?vendor err (?P<vendor>\d+))?"),
        Sig("nccl_net_error", "NCCL WARN NET/", r"(?i)error|timeout|failed|lost|down|unreachable|retry"),
        Sig("nccl_net_error", "ibv_", r"(?i)NCCL WARN.*(?:failed|error)"),
        Sig("peer_closed", "Connection closed by remote peer", r"remote peer(?: (?P<address>\d+\.\d+\.\d+\.\d+))?"),
        Sig("nccl_device_unopened", "Unable to open device", r"NCCL WARN NET/"),
        Sig("nccl_net_error", "socketPollConnect", r"(?i)NCCL WARN|connect"),
        Sig("nccl_net_error", "Endpoint timeout", r"(?=.)"),
        Sig("nccl_net_error", "Transport retry count exceeded", r"(?=.)"),
        Sig("nccl_net_error", "IBV_WC_RETRY_EXC_ERR", r"(?=.)"),
        Sig("link_down", "NETDEV WATCHDOG", r"(?=.)"),
        Sig("link_down", "Link is Down", r"(?=.)"),
        Sig("link_down", "ink down", r"(?i)(?:mlx\d|bnxt|eth\d|en[ps]\d|ib\d).*\blink down"),
        Sig("acs_redirect", "ACSCtl", r"ACSCtl:.*ReqRedir\+"),
        Sig("acs_off", "ACSCtl", r"ACSCtl:.*ReqRedir-"),
        Sig("xid", "NVRM: Xid", r"Xid .*?: (?P<xid>\d+)"),
        Sig("xid", "fallen off the bus", r"NVRM: +(?:.*\S )?fallen off the bus"),
    )  # fmt: skip

    def line(self, line: Line) -> Iterable[Fact]:
        """Events of the line. The driver tells of a GPU that is gone also without its number, which is 79."""
        for fact in super().line(line):
            bare = isinstance(fact, Event) and fact.kind == "xid" and fact.get("xid") is None
            yield replace(fact, data={"xid": 79}) if bare else fact


class FrTrace:
    """Text output of torchfrtrace / fr_trace."""

    NAME = "fr-trace"
    ABOUT = "torchfrtrace text: collectives that not all ranks joined"
    TOKENS = (
        "Not all ranks joining",
        "missing ranks:",
        "group info:",
        "collective: ",
        "sequence number:",
        "Collective sequence number",
        "expected ranks:",
        "nccl_trace_rank_",
        "allow-incomplete-ranks",
    )
    open = False
    _FILE = re.compile(r"nccl_trace_rank_(\d{1,5})(?!\d)")

    def __init__(self) -> None:
        self.head: dict[str, Value] = {}

    def line(self, line: Line) -> Iterable[Fact]:
        """Lines of one block; the line with the missing ranks makes the fact."""
        text = line.text
        if m := re.search(r"Not all ranks joining collective:?(?: sequence number)?:? ?(\d+)", text):
            self.head = {"seq": int(m[1])}
        elif m := re.search(r"^\s*group info: *(\S{1,40})", text):
            self.head["group"] = re.sub(r"[^\w:.-]", "", m[1])
        elif m := re.search(r"^\s*collective: *(\S+)", text):
            self.head["op"] = op_name(m[1])
        elif self.head and (m := re.search(r"missing ranks: *\{([\d, ]*)\}", text)):
            for rank in _ints(m[1]):
                who = Who(kind="torch", family="torch", rank=rank)
                yield Event(src=line.src, who=who, time=line.time, kind="fr_missing", data=dict(self.head))
        for m in self._FILE.finditer(text):
            yield Event(src=line.src, time=line.time, kind="recorder_file", data={"rank": int(m[1])})
        if "allow-incomplete-ranks" in text:
            yield Event(src=line.src, time=line.time, kind="recorder_files_incomplete")

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (Watchdog, FingerPrints, DesyncReport, NcclLog, FrTrace)
