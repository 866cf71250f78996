# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""vLLM's log: throughput lines, executor and connector messages, start-up."""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader, value

_FIELDS = (
    ("prompt", r"Avg prompt throughput: ([\d.]+)"),
    ("gen", r"Avg generation throughput: ([\d.]+)"),
    ("running", r"Running: (\d+)"),
    ("waiting", r"(?:Waiting|Pending): (\d+)"),
    ("deferred", r"Deferred: (\d+)"),
    ("fetching", r"(\d+) in progress"),
    ("kv", r"KV cache usage: ([\d.]+)"),
    ("preempted", r"Preemptions: (\d+)"),
)


class Throughput:
    """`Engine 000: Avg prompt throughput: …`, also the old form and when a progress bar shares the line."""

    NAME = "vllm-throughput"
    ABOUT = "vLLM throughput lines: running, waiting, tokens per second, KV usage"
    TOKENS = ("Avg prompt throughput", "Avg generation throughput")
    open = False

    def line(self, line: Line) -> Iterable[Fact]:
        """One throughput line."""
        data = {k: value(m[1]) for k, p in _FIELDS if (m := re.search(p, line.text))}
        m = re.search(r"Engine (\d+):", line.text)
        if m:
            data["engine"] = int(m[1])
        yield Event(src=line.src, who=line.who, time=line.time, kind="vllm_stats", data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Vllm(SignatureReader):
    """What vLLM's processes print when something is wrong, and at start."""

    NAME = "vllm-log"
    ABOUT = "vLLM log lines: shm_broadcast, RPC timeouts, dead workers and engine cores, connectors, KV size"
    SIGNATURES = (
        Sig("shm_wait", "No available shared memory broadcast block", r"(?=.)"),
        Sig("rpc_timeout", "RPC call to", r"RPC call to (?P<call>\w{1,40}) timed out"),
        Sig("engine_dead", "EngineDeadError", r"EngineDeadError(?=[:('\"]|\s*$)"),
        Sig("engine_dead", "EngineCore encountered", r"(?=.)"),
        Sig("engine_dead", "Engine core proc", r"Engine core proc \S+ died unexpectedly"),
        Sig("engine_start_failed", "Engine core initialization failed", r"(?:.*?'EngineCore\w{0,12}': (?P<code>-?\d{1,5}))?"),
        Sig("engine_start_failed", "EngineCore failed to start", r"(?=.)"),
        Sig("rank_exception", "WorkerProc hit an exception", r"(?=.)", whole=True),
        Sig("rank_exception", "WorkerProc failed to start", r"(?=.)", whole=True),
        Sig("rank_exception", "Error executing method", r"(?=.)", whole=True),
        Sig("worker_died", "died unexpectedly", r"(?:.*?rank=\[?(?P<rank>\d+)|.*?Worker proc \S*?(?P<index>\d+))?.*?died unexpectedly"),
        Sig("worker_died", "died, exit code", r"Worker \w+ pid (?P<pid>\d+) died, exit code: (?P<code>-?\d+)"),
        Sig("worker_died", "The node was terminated", r"(?=.)"),
        Sig("worker_died", "A worker died or was killed", r"(?=.)"),
        Sig("worker_died", "has been marked dead because", r"(?=.)"),
        Sig("worker_died", "WorkerCrashedError", r"(?=.)"),
        Sig("worker_died", "ActorDiedError", r"(?=.)"),
        Sig("kv_pull_failed", "pulling kv_caches for", r"failed(?P<reason>: Timeout waiting for P side ready)?"),
        Sig("kv_expired", "Releasing expired KV blocks", r"(?:.*?retrieved by (?P<by>\d+) remote worker)?"),
        Sig("kv_handshake_failed", "NIXL transfer failure", r"failure: [a-z_]{0,20}handshake_"),
        Sig("kv_pull_failed", "NIXL transfer failure", r"(?=.)"),
        Sig("kv_pull_failed", "Declining expired remote read", r"(?=.)"),
        Sig("kv_read_expired", "Potentially invalid KV blocks", r"(?=.)"),
        Sig("kv_pull_failed", "Failed to load KV", r"(?=.)"),
        Sig("kv_load_failed", "due to KV load failure", r"(?P<requests>\d+) request\(s\) due to KV load failure"),
        Sig("kv_moved", "KV Transfer metrics:", r"Num successful transfers=(?P<ok>\d+)"),
        Sig("kv_handshake_failed", "NIXL handshake failed", r"(?=.)"),
        Sig("kv_handshake_failed", "Handshake failed for request", r"(?=.)"),
        Sig("stale_agent", "NIXL_ERR_REMOTE_DISCONNECT", r"(?=.)"),
        Sig("stale_agent", "NIXL_ERR_NOT_FOUND", r"(?=.)"),
        Sig("stale_agent", "Remote I/O error", r"(?=.)"),
        Sig("stale_agent", "NIXL_ERR_INVALID_PARAM", r"(?=.)"),
        Sig("stale_agent", "NIXL agent metadata", r"(?:mismatch|stale|invalid)"),
        Sig("kv_size", "KV cache size:", r"KV cache size: (?P<tokens>[\d,]+) tokens"),
        Sig("max_len", "max model len", r"max model len (?P<tokens>\d+)"),
        Sig("max_concurrency", "Maximum concurrency for", r"for (?P<tokens>[\d,]+) tokens per request: (?P<times>[\d.]+)x"),
        Sig("waits_for_pages", "WAITING_FOR_REMOTE_KVS", r"(?=.)"),
        Sig("asked", "max_tokens=", r"max_tokens=(?P<most>\d+).*?prompt_token_ids_len=(?P<tokens>\d+)"),
        Sig("core_wait", "core engine proc(s) to start", r"Waiting for (?P<n>\d+) (?:local, \d+ remote )?core engine proc"),
        Sig("cluster_wait", "Waiting for creating a placement group", r"for (?P<seconds>\d+) seconds"),
        Sig("leader_ping", "ActiveMessageLeader: Ping timed out", r"(?=.)"),
        Sig("started", "Application startup complete", r"(?=.)"),
        Sig("start_step", "Loading weights took", r"(?P<step>Loading weights took)"),
        Sig("start_step", "Graph capturing finished", r"(?P<step>Graph capturing finished)"),
        Sig("start_step", "Model loading took", r"(?P<step>Model loading took)"),
        Sig("compile", "torch.compile takes", r"(?=.)"),
        Sig("compile", "Compiling a graph", r"(?=.)"),
        Sig("socket_thread_dead", "Exception in thread", r"Exception in thread (?:Thread-\d+ \()?(?P<thread>process_input_sockets|process_output_sockets)"),
        Sig("aborted", "Aborted request", r"(?=.)"),
        Sig("paused", "POST /pause", r'"POST /pause[ ?][^"]{0,200}" 200'),
        Sig("paused", "POST /sleep", r'"POST /sleep[ ?][^"]{0,200}" 200'),
        Sig("resumed", "POST /resume", r'"POST /resume[ ?][^"]{0,200}" 200'),
        Sig("resumed", "POST /wake_up", r'"POST /wake_up[ ?][^"]{0,200}" 200'),
    )  # fmt: skip


LINE_READERS = (Throughput, Vllm)
