# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""SGLang's log: batch lines, watchdogs, health, transfer, start-up, and the scheduler's own debug print."""

import re
from collections.abc import Iterable
from zlib import crc32

from msgspec.structs import replace

from closeranks.diagnose.facts import Event, Fact, Setting, StackFailed
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader, carries_request, value

_FIELDS = {
    "#running-req": "running",
    "#queue-req": "queue",
    "#new-seq": "new_seq",
    "#new-token": "new_tokens",
    "#token": "tokens",
    "token usage": "usage",
    "#prealloc-req": "prealloc",
    "#transfer-req": "transfer",
    "#transferring-req": "inflight",
    "#inflight-req": "inflight",
    "#bootstrap-req": "bootstrap",
    "#unbootstrapped-req": "bootstrap",
    "#retracted-req": "retracted",
    "gen throughput (token/s)": "gen",
    "input throughput (token/s)": "input",
}
_RID = re.compile(r"rid='([\w-]{1,64})'")
_FIELD = re.compile(r"(#[a-z-]+|(?:(?<=, )|(?<=\. ))token usage|(?:gen|input) throughput \(token/s\)): (\d+(?:\.\d+)?)")


class Batch:
    """`Prefill batch, …` and `Decode batch, …`: progress, queues and, by their fields, the role of the engine."""

    NAME = "sglang-batch"
    ABOUT = "SGLang batch lines (old and new forms): running, queued, in transfer, throughput"
    TOKENS = ("Prefill batch", "Decode batch")
    open = False

    def line(self, line: Line) -> Iterable[Fact]:
        """One batch line."""
        if not line.msg.startswith(("Prefill batch", "Decode batch")):
            return
        kind = "prefill_batch" if line.msg.startswith("Prefill") else "decode_batch"
        data = {_FIELDS[k]: value(v) for k, v in _FIELD.findall(line.msg) if k in _FIELDS}
        if not data:
            return
        role = ""
        if kind == "decode_batch" and ("pre-allocated usage" in line.msg or "#transfer-req" in line.msg):
            role = "decode"
        elif kind == "prefill_batch" and (
            "#unbootstrapped" in line.msg or "#inflight" in line.msg or "#bootstrap-req" in line.msg
        ):
            role = "prefill"
        if role:
            data["role"] = role
        yield Event(src=line.src, who=line.who, time=line.time, kind=kind, data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Pool:
    """`Scheduler debug info:` and the pool lines after it, which carry no prefix of their own."""

    NAME = "sglang-debug-info"
    ABOUT = "SGLang scheduler debug print: batch size and pool per rank (requests in it are never read)"
    TOKENS = ("Scheduler debug info", "[full] total=", "self.max_total_num_tokens=", "batch_size()=")
    open = False

    def __init__(self) -> None:
        self.last: Line | None = None

    def line(self, line: Line) -> Iterable[Fact]:
        """The rank of the header goes to the lines under it."""
        if "Scheduler debug info" in line.text:
            self.last = line
            yield Event(src=line.src, who=line.who, time=line.time, kind="debug_info")
            return
        at = line if line.own_prefix or self.last is None else self.last
        if carries_request(line.text):
            return
        kind = "batch_size" if "batch_size()=" in line.text else "pool"
        found = re.findall(
            r"\b(total|available|evictable|protected|max_total_num_tokens|available_size|evictable_size|protected_size"
            r"|batch_size\(\))=(\d+)",
            line.text,
        )
        data = {
            k.removesuffix("_size").replace("max_total_num_tokens", "total").removesuffix("()"): int(v)
            for k, v in found
        }
        if data:
            yield Event(src=line.src, who=at.who, time=at.time, kind=kind, data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class PySpyFailed:
    """py-spy that could not read a process: no evidence about that rank."""

    NAME = "pyspy-failed"
    ABOUT = "Failed dumps: permission denied, py-spy missing, timeouts"
    TOKENS = (
        "Pyspy failed",
        "py-spy: not found",
        "Failed to copy",
        "Failed to suspend",
        "Permission denied (os error 13)",
    )
    open = False

    def line(self, line: Line) -> Iterable[Fact]:
        """One failure per line that names a process, or per bare error."""
        pid = re.search(r"(?:--pid|PID)[ =](\d+)", line.text)
        if pid is None and "not found" not in line.text:
            return
        reason = "py-spy not installed" if "not found" in line.text else "permission denied or unreadable"
        yield StackFailed(src=line.src, who=line.who, time=line.time, pid=int(pid[1]) if pid else None, reason=reason)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Versions:
    """Versions and platform that SGLang and vLLM print at start."""

    NAME = "versions"
    ABOUT = "Versions of engine, NCCL, torch, CUDA, and the machine's architecture, wherever they are printed"
    TOKENS = (
        "nccl==",
        "NCCL version",
        "aarch64",
        "x86_64",
        "sglang==",
        "vllm==",
        "version 0.",
        "torch==",
        "SGLang v",
        "version=",
        "nixl==",
    )
    open = False
    _VERSION = re.compile(
        r"(?i)\b(nccl|sglang|vllm|torch|nixl|tensorrt[-_]llm|deep[-_]?ep|flashinfer|dynamo|cuda)"
        r"(?:==| version[ :=]+v?|[ _-]version=['\"]?| v)(\d+\.\d+[\w.+]*)"
    )

    def line(self, line: Line) -> Iterable[Fact]:
        """Every version named in the line."""
        for m in self._VERSION.finditer(line.text):
            name = m[1].lower().replace("_", "-")
            yield Setting(src=line.src, time=line.time, kind="version", name=name, value=m[2])
        if "vLLM API server version" in line.text or "LLM engine (v" in line.text:
            m2 = re.search(r"(?:version |\(v)(\d+\.\d+[\w.+]*)", line.text)
            if m2:
                yield Setting(src=line.src, time=line.time, kind="version", name="vllm", value=m2[1])
        m3 = re.search(r"\b(aarch64|x86_64)\b", line.text)
        if m3 and not re.search(
            r"cpython-\d+-x86_64|/lib/(?:x86_64|aarch64)-linux|(?:x86_64|aarch64)-linux-gnu", line.text
        ):
            yield Setting(src=line.src, time=line.time, kind="arch", name=m3[1], value=m3[1])

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Sglang(SignatureReader):
    """Everything else that SGLang prints and that decides something."""

    NAME = "sglang-log"
    ABOUT = "SGLang log lines: watchdog, health check, aborts, transfer and bootstrap failures, crashes, start-up steps"
    SIGNATURES = (
        Sig("watchdog", "atchdog timeout (self", r"(?P<part>\w+ ?\w*?) ?[wW]atchdog timeout \(self\.watchdog_timeout=(?P<timeout>[\d.]+)(?:, self\.soft=(?P<soft>True|False))?"),
        Sig("watchdog", "Watchdog timeout (self", r"Watchdog timeout \(self\.watchdog_timeout=(?P<timeout>[\d.]+)"),
        Sig("health_failed", "Health check failed", r"(?:.*?last (?P<limit>\d+) seconds.*?tic start time: (?P<tic>[\d:]+).*?last_heartbeat time: (?P<heartbeat>[\d:]+))?"),
        Sig("stack_dump", "Pyspy dump for PID", r"Pyspy dump for PID (?P<pid>\d+)"),
        Sig("transfer_worker_error", "Unexpected transfer worker error", r"for room (?P<room>\d+)"),
        Sig("transfer_worker_error", "assert room in self.transfer_infos", r"(?=.)"),
        Sig("transfer_error", "NIXL transport error for room", r"room (?P<room>\d+)"),
        Sig("transfer_error", "NIXL transfer encountered ERR", r"room[= ](?P<room>\d+)"),
        Sig("transfer_odd_state", "treating as undone", r"(?=.)"),
        Sig("transfer_error", "left a handle running", r"(?:.*?room[= ](?P<room>\d+))?"),
        Sig("transfer_error", "Transfer thread failed because of", r"(?=.)"),
        Sig("peer_blacklisted", "Decode instance could be dead", r"(?=.)"),
        Sig("helper_thread_dead", "First message should be", r"(?=.)"),
        Sig("helper_thread_dead", "bootstrap_thread died on", r"engine_rank=(?P<rank>\d+)"),
        Sig("helper_thread_dead", "Exception in thread", r"Exception in thread (?:Thread-\d+ \()?(?P<thread>bootstrap_thread|transfer_worker|decode_thread|decode_listener_thread|heartbeat_checker|prefetch_thread_func|backup_thread_func|NixlHandshake)"),
        Sig("transfer_aborted", "failed for request", r"(?P<side>Decode|Prefill) (?:transfer|handshake|bootstrap) failed for request(?:.*?bootstrap_room=(?P<room>\d+))?.*: Aborted by (?:AbortReq|decode-side abort notification)"),
        Sig("transfer_failed", "transfer failed for request", r"(?P<side>Decode|Prefill) transfer failed for request(?:.*?bootstrap_room=(?P<room>\d+))?(?:.*?timed out after (?P<after>[\d.]+)s in KVPoll\.(?P<state>\w+))?"),
        Sig("transfer_failed", "handshake failed for request", r"(?P<side>Decode) handshake failed for request(?:.*?bootstrap_room=(?P<room>\d+))?(?:.*?timed out after (?P<after>[\d.]+)s in KVPoll\.(?P<state>\w+))?"),
        Sig("transfer_failed", "bootstrap failed for request", r"(?P<side>Prefill) bootstrap failed for request(?:.*?bootstrap_room=(?P<room>\d+))?(?:.*?timed out after (?P<after>[\d.]+)s in KVPoll\.(?P<state>\w+))?"),
        Sig("transfer_failed", "s in KVPoll.", r"Request (?P<room>\d+) timed out after (?P<after>[\d.]+)s in KVPoll\.(?P<state>\w+)"),
        Sig("bootstrap_timeout", "timed out when bootstrapping", r"(?:.*?room=(?P<room>\d+))?"),
        Sig("transfer_timeout", "fail to receive KV Cache transfer done signal", r"(?=.)"),
        Sig("room_failed", "FailedEvent", r"(?:.*?room=(?P<room>\d+))?.*?FailedEvent(?: \((?P<after>[\d.]+) s)?"),
        Sig("peer_lost", "Lost connection with prefill instance", r"(?:.*?(?P<affected>\d+) requests? affected)?"),
        Sig("peer_fetch_failed", "Could not fetch prefill parallel info", r"(?=.)"),
        Sig("context_corruption", "Context corruption detected", r"(?=.)"),
        Sig("release_timeout", "Deferred KV release for room", r"room (?P<room>\d+) timed out"),
        Sig("memory_leak", "memory leak detected", r"(?=.)"),
        Sig("pool_mismatch", "pool memory leak", r"(?=.)"),
        Sig("retract", "Retract requests", r"#retracted_reqs: (?P<n>\d+)"),
        Sig("retract", "Decode out of memory happened", r"#retracted_reqs: (?P<n>\d+)"),
        Sig("retract", "KV cache pool is full", r"(?:.*?#retracted_reqs: (?P<n>\d+))?"),
        Sig("rank_exception", "Scheduler hit an exception", r"(?=.)", whole=True),
        Sig("helper_exception", "Manager hit an exception", r"(?P<part>Detokenizer|Tokenizer)Manager hit an exception"),
        Sig("helper_exception", "DataParallelController hit an exception", r"(?P<part>DataParallelController)"),
        Sig("child_crashed", "crashed with exit code", r"Subprocess (?P<part>\w+?)(?:_(?P<index>\d+))? \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)"),
        Sig("child_crashed", "Rank 0 scheduler is dead", r"(?=.)"),
        Sig("child_crashed", "scheduler is dead. Please check", r"(?:.*?Rank (?P<index>\d+) scheduler)?"),
        Sig("teardown", "SIGQUIT received", r"(?=.)"),
        Sig("teardown", "Received sigquit from a child process", r"(?=.)"),
        Sig("orphan_output", "the state was deleted in", r"Received output for rid="),
        Sig("abort", "Abort request in waiting queue", r"reason: (?P<reason>waiting timeout|running timeout|[a-z ]{3,30})"),
        Sig("abort", "AbortReq", r"(?=.)"),
        Sig("abort", "Abort waiting request", r"(?=.)"),
        Sig("started", "fired up and ready to roll", r"(?=.)"),
        Sig("start_step", "Load weight begin", r"(?P<step>Load weight begin)"),
        Sig("start_step", "Load weight end", r"(?P<step>Load weight end)"),
        Sig("start_step", "Capture cuda graph begin", r"(?P<step>Capture cuda graph begin)(?:.*?avail mem=(?P<gb>[\d.]+) GB)?"),
        Sig("start_step", "Capture cuda graph end", r"(?P<step>Capture cuda graph end)"),
        Sig("start_step", "Init torch distributed begin", r"(?P<step>Init torch distributed begin)"),
        Sig("start_step", "Init torch distributed ends", r"(?P<step>Init torch distributed end)"),
        Sig("registered_graphs", "cuda graph addresses", r"Registering (?P<n>\d+) cuda graph addresses"),
        Sig("host_pool", "host memory for hierarchical KV cache", r"Allocating (?P<gb>[\d.]+) GB host memory"),
        Sig("jit_session", "JIT Pre-Compile session", r"(?=.)"),
        Sig("jit_session", "DeepGEMM JIT Compiling", r"(?=.)"),
        Sig("rank_divergence", "Found rank divergence for", r"for (?P<n>\d+) event"),
        Sig("rank_divergence", "duplicate-reclaim victims diverged", r"(?=.)"),
        Sig("misrouted", "follow_bootstrap_room conflict", r"(?=.)"),
        Sig("capacity", "running=", r"running=(?P<running>\d+) waiting=(?P<waiting>\d+)"),
        Sig("received", "requests received", r"(?P<n>\d+) requests received"),
        Sig("too_long", "longer than the model's context length", r"(?=.)"),
        Sig("too_long", "exceeds the maximum allowed length", r"(?=.)"),
        Sig("paused", "pause_generation", r'"POST /pause_generation|paused by'),
        Sig("resumed", "continue_generation", r'"POST /continue_generation|continued by'),
    )  # fmt: skip

    def line(self, line: Line) -> Iterable[Fact]:
        """Events of the line. Of a request only a digest is kept, which tells whether two lines are of one."""
        for fact in super().line(line):
            rid = _RID.search(line.text) if isinstance(fact, Event) and fact.kind == "orphan_output" else None
            yield replace(fact, data={"_request": crc32(rid[1].encode())}) if rid else fact


LINE_READERS = (Batch, Pool, PySpyFailed, Versions, Sglang)
