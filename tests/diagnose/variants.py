# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""Cases of our own: the mechanisms of the public ones and of the fact tables, with other ranks, frames and wording.

`cases()` gives (name, evidence, class, may_be_certain). The texts follow the formats of the engines; none is a copy of
a public case. They are the check that rules fit a mechanism rather than a case, and they test catalog entries that no
public case covers.
"""

import json
from collections.abc import Iterable

Case = tuple[str, list[tuple[str, str]], str, bool]

LOOP_DECODE = (
    "event_loop_overlap_disagg_decode (disaggregation/decode.py:1811)",
    "dispatch_event_loop (scheduler.py:4140)",
)
LOOP_PREFILL = (
    "event_loop_overlap_disagg_prefill (disaggregation/prefill.py:709)",
    "dispatch_event_loop (scheduler.py:4140)",
)
LOOP = (
    "event_loop_overlap (sglang/srt/managers/scheduler.py:1330)",
    "run_scheduler_process (sglang/srt/managers/scheduler.py:4261)",
)
HEAD = (
    "broadcast (torch/distributed/distributed_c10d.py:2961)",
    "wrapper (torch/distributed/c10d_logger.py:83)",
    "broadcast_pyobj (sglang/srt/utils/common.py:1440)",
    "SchedulerRequestReceiver._broadcast_reqs_across_ranks (request_receiver.py:190)",
    "SchedulerRequestReceiver.recv_requests (request_receiver.py:97)",
)
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3061)", "wrapper (torch/distributed/c10d_logger.py:83)")
BUSY = (
    "poll (zmq/sugar/poll.py:106)",
    "wait (vllm/distributed/device_communicators/shm_broadcast.py:190)",
    "acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:690)",
    "dequeue (vllm/distributed/device_communicators/shm_broadcast.py:770)",
    "worker_busy_loop (vllm/v1/executor/multiproc_executor.py:960)",
)


def dump(
    title: str,
    frames: Iterable[str],
    pid: int = 100,
    state: str = "idle",
    others: Iterable[tuple[str, Iterable[str]]] = (),
) -> str:
    """One process as py-spy prints it."""
    out = [
        f"Process {pid}: {title}",
        "Python v3.12.7 (/usr/bin/python3.12)",
        "",
        f'Thread {pid} ({state}): "MainThread"',
    ]
    out += [f"    {f}" for f in frames]
    for i, (name, inner) in enumerate(others):
        out += [f'Thread {pid + 1000 + i} (idle): "{name}"', *(f"    {f}" for f in inner)]
    return "\n".join(out) + "\n\n"


def ranks(frames: dict[str, Iterable[str]], state: str = "idle") -> str:
    """Several processes, by title."""
    return "".join(dump(t, f, 4000 + i, state) for i, (t, f) in enumerate(frames.items()))


def tp(n: int, frames: Iterable[str], start: int = 0, prefix: str = "sglang::scheduler_") -> dict[str, Iterable[str]]:
    """`n` ranks at one place."""
    return {f"{prefix}TP{i}": frames for i in range(start, start + n)}


def decode(at: str, run: int = 7, gen: float = 210.5, queue: int = 0, rank: str = " TP0", more: str = "") -> str:
    """A batch line."""
    return f"[2026-10-03 {at}{rank}] Decode batch, #running-req: {run}, #token: 51200, token usage: 0.22, {more}cuda graph: True, gen throughput (token/s): {gen}, #queue-req: {queue}\n"


PD = "pre-allocated usage: 0.01, #prealloc-req: 0, #transfer-req: 3, #retracted-req: 0, "
OK = '[2026-10-03 {}] INFO:     10.9.0.3:40100 - "GET {} HTTP/1.1" {}\n'
WATCHDOG = "[2026-10-03 05:06:41 TP{}] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
SYNC = (
    "synchronize (torch/cuda/streams.py:233)",
    "process_batch_result_decode (scheduler_components/batch_result_processor.py:800)",
    "process_batch_result (scheduler.py:3921)",
)


def nccl(
    rank: int, seq: int, op: str, numel: int = 65536, at: str = "07:11:09.102938475", timeout: int = 600000
) -> str:
    """A watchdog line."""
    return (
        f"[rank{rank}]:[E1003 {at} ProcessGroupNCCL.cpp:685] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)={timeout}) ran for "
        f"{timeout + 7} milliseconds before timing out.\n"
    )


def recorder(last: int) -> str:
    """A flight recorder dump whose rank has enqueued `last` operations."""
    entry = {
        "process_group": ["2", "tp"],
        "collective_seq_id": last,
        "profiling_name": "nccl:all_reduce",
        "state": "started" if last == 901 else "completed",
        "is_p2p": False,
        "input_sizes": [[8]],
        "output_sizes": [[8]],
    }
    return json.dumps(
        {
            "version": "2.9",
            "pg_config": {"2": {"name": "2", "desc": "tp", "ranks": "[0, 1, 2, 3]"}},
            "pg_status": {
                "2": {
                    "last_enqueued_collective": last,
                    "last_started_collective": last,
                    "last_completed_collective": 900,
                }
            },
            "entries": [entry],
        },
        indent=1,
    )


def vworker(op: str, site: str) -> tuple[str, ...]:
    """A vLLM worker in a collective."""
    return (
        f"{op} (torch/distributed/distributed_c10d.py:2999)",
        f"{site} (vllm/v1/worker/gpu_model_runner.py:900)",
        "execute_model (vllm/v1/worker/gpu_worker.py:611)",
        *BUSY[4:],
    )


def _stack_cases() -> list[Case]:
    prefetch = (
        *REDUCE,
        "can_terminate_prefetch (hiradix_cache.py:902)",
        "check_prefetch_progress (hiradix_cache.py:931)",
        "_get_new_batch_prefill_raw (scheduler.py:2411)",
        *LOOP,
    )
    poll = (
        *REDUCE,
        "poll_and_all_reduce (disaggregation/utils.py:88)",
        "DecodeTransferQueue.pop_transferred (disaggregation/decode.py:1011)",
        "process_decode_queue (disaggregation/decode.py:1240)",
        *LOOP_DECODE,
    )
    stalled = decode("05:01:12") + WATCHDOG.format(2)
    sync_batch = (
        "all_gather_into_tensor (torch/distributed/distributed_c10d.py:4022)",
        "all_gather (scheduler_components/dp_attn.py:110)",
        "prepare_mlp_sync_batch_raw (scheduler_components/dp_attn.py:222)",
        *LOOP,
    )
    dp = {f"sglang::scheduler_DP{i}_TP{i}": sync_batch for i in range(4)}
    dp["sglang::scheduler_DP2_TP2"] = (*HEAD, *LOOP)
    event = ("cuEventSynchronize (libcuda.so.570.86.10)", *SYNC, *LOOP)
    extend = (
        "all_reduce (sglang/srt/distributed/parallel_state.py:570)",
        "forward (models/qwen3_moe.py:411)",
        "forward_extend (model_executor/model_runner.py:2711)",
        "run_batch (scheduler.py:2810)",
        *LOOP,
    )
    decode_fwd = (
        "all_reduce (sglang/srt/distributed/parallel_state.py:570)",
        "forward (models/qwen3_moe.py:411)",
        "forward_decode (model_executor/model_runner.py:2650)",
        "run_batch (scheduler.py:2810)",
        *LOOP,
    )
    trt_gather = (
        "gather (mpi4py/MPI/Comm.pyx:1440)",
        "tp_gather (tensorrt_llm/_torch/distributed/communicator.py:301)",
        "_enqueue_responses (tensorrt_llm/_torch/pyexecutor/py_executor.py:2011)",
        "_handle_errors (tensorrt_llm/_torch/pyexecutor/py_executor.py:1990)",
        "_executor_loop (tensorrt_llm/_torch/pyexecutor/py_executor.py:1011)",
    )
    trt_all = (
        "allgather (mpi4py/MPI/Comm.pyx:1460)",
        "tp_allgather (tensorrt_llm/_torch/distributed/communicator.py:290)",
        "_can_queue (tensorrt_llm/_torch/pyexecutor/py_executor.py:1202)",
        "_executor_loop (tensorrt_llm/_torch/pyexecutor/py_executor.py:1020)",
    )
    return [
        ("own-hicache-prefetch", [("stacks.txt", ranks(tp(1, prefetch) | tp(3, (*HEAD, *LOOP), 1))), ("s.log", stalled)], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-pd-poll", [("d.txt", ranks(tp(3, poll) | tp(5, (*HEAD, *LOOP_DECODE), 3))), ("d.log", decode("05:01:12", more=PD) + OK.format("05:09:02", "/health", "200 OK"))], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-pd-poll-no-corroboration", [("d.txt", ranks(tp(1, poll) | tp(1, (*HEAD, *LOOP_DECODE), 1)))], "DESYNC_DIFFERENT_COLLECTIVE", False),
        ("own-pd-poll-live", [("d.txt", ranks(tp(1, poll) | tp(1, (*HEAD, *LOOP_DECODE), 1))), ("m.prom", "".join(f'sglang:num_running_reqs{{tp_rank="0"}} 0.0\nsglang:num_decode_transfer_queue_reqs{{tp_rank="0"}} 2.0\nsglang:scheduler_stage_seconds_total{{category="idle",tp_rank="0"}} {t}\nsglang:generation_tokens_total{{tp_rank="0"}} 9.0\n' for t in (10.0, 15.0)))], "KV_TRANSFER", False),
        ("own-pd-poll-frozen", [("d.txt", ranks(tp(1, poll) | tp(1, (*HEAD, *LOOP_DECODE), 1))), ("m.prom", "".join(f'sglang:scheduler_stage_seconds_total{{category="{c}",tp_rank="{r}"}} 10.5\n' for _ in range(2) for c in ("idle", "run_batch") for r in (0, 1)))], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-pd-poll-switches", [("d.txt", ranks(tp(1, poll) | tp(1, (*HEAD, *LOOP_DECODE), 1))), ("proc.txt", "".join(f"Name:\tsglang::schedul\nState:\tS (sleeping)\nPid:\t{4000 + r}\nvoluntary_ctxt_switches:\t{n}\nnonvoluntary_ctxt_switches:\t4\n" for n in (100, 900) for r in (0, 1)))], "UNDETERMINED", False),
        ("own-long-step", [("d.txt", ranks(tp(2, extend))), ("proc.txt", "".join(f"Name:\tsglang::schedul\nState:\tS (sleeping)\nPid:\t{4000 + r}\nvoluntary_ctxt_switches:\t{n}\nnonvoluntary_ctxt_switches:\t4\n" for n in (100, 900) for r in (0, 1)))], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-startup-load", [("d.txt", ranks(tp(2, ("barrier (torch/distributed/distributed_c10d.py:5356)", "Scheduler.__init__ (sglang/srt/managers/scheduler.py:59)")) | tp(1, ("Model.load_weights (sglang/srt/models/llama.py:25)", "Scheduler.__init__ (sglang/srt/managers/scheduler.py:58)"), 2)))], "STARTUP", False),
        ("own-prefill-poll", [("p.txt", ranks(tp(2, (*REDUCE, "poll_and_all_reduce_attn_cp_tp_group (disaggregation/utils.py:99)", "pop_bootstrapped (disaggregation/prefill.py:402)", *LOOP_PREFILL)) | tp(2, (*HEAD, *LOOP_PREFILL), 2)))], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-dp-sync", [("dp.txt", ranks(dp)), ("x.log", stalled)], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-dp-event", [("all.txt", ranks({f"sglang::scheduler_DP{i}_TP{i}_EP{i}": event for i in range(8)})), ("x.log", stalled)], "SYMMETRIC_WAIT", False),
        ("own-mode-split", [("all.txt", ranks(tp(2, extend) | tp(2, decode_fwd, 2))), ("x.log", stalled)], "DESYNC_SAME_OP_SHAPE_OR_SEQ", True),
        ("own-trt-error-path", [("r.txt", ranks({"trtllm-worker --rank 0": trt_gather} | {f"trtllm-worker --rank {i}": trt_all for i in range(1, 4)}))], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-vllm-workers-split", [("w.txt", ranks({"VLLM::Worker_TP0": vworker("all_reduce", "_prepare_inputs"), "VLLM::Worker_TP1": vworker("broadcast", "_sync_tokens")})), ("e.log", "(EngineCore_DP0 pid=9) ERROR 10-03 05:10:00 [core.py:1210] TimeoutError: RPC call to execute_model timed out.\n")], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-vllm-dp-missing", [("w.txt", ranks({"VLLM::EngineCore_DP0": ("synchronize (torch/cuda/streams.py:233)", "sample_tokens (vllm/v1/worker/gpu_model_runner.py:3880)", "run_busy_loop (vllm/v1/engine/core.py:1170)"), "VLLM::EngineCore_DP1": (*REDUCE, "has_unfinished_dp (vllm/config/parallel.py:400)", "_has_global_unfinished_reqs (vllm/v1/engine/core.py:1240)", "run_busy_loop (vllm/v1/engine/core.py:1188)")}))], "MISSING_PARTICIPANT", True),
        ("own-gpu-all-spin", [("a.txt", ranks(tp(4, (*SYNC, *LOOP)))), ("smi.csv", "index, utilization.gpu [%], power.draw [W], power.limit [W]\n" + "".join(f"{i}, 100 %, {120 + i}.2 W, 700.00 W\n" for i in range(4)))], "DEVICE_HANG", False),
        ("own-gpu-one-idle", [("a.txt", ranks(tp(4, (*SYNC, *LOOP)))), ("smi.csv", "index, utilization.gpu [%], power.draw [W]\n" + "".join(f"{i}, {0 if i == 2 else 100} %, {121 + i}.0 W\n" for i in range(4)))], "DEVICE_HANG", False),
        ("own-lock-append", [("a.txt", dump("sglang::scheduler_TP0", ("ncclLocalOpAppend (libnccl.so.2)", "ncclProxySaveOp (libnccl.so.2)", "ncclAllReduce (libnccl.so.2)", "all_reduce (sglang/srt/distributed/parallel_state.py:570)", "forward_decode (model_executor/model_runner.py:2650)", *LOOP), 4, "active", [("", ("pthread_cond_wait (libc.so.6)", "ncclProxyGetPostedOps (libnccl.so.2)"))]) + dump("sglang::scheduler_TP1", (*HEAD, *LOOP), 5))], "RUNTIME_LIBRARY_DEADLOCK", True),
        ("own-dns", [("a.txt", ranks({"sglang::scheduler_TP0": ("getaddrinfo (socket.py:963)", "create_connection (urllib3/util/connection.py:60)", "request (requests/sessions.py:589)", "query_prefill_dp_ranks (disaggregation/common/conn.py:300)", *LOOP_DECODE)} | tp(3, (*HEAD, *LOOP_DECODE), 1)))], "FRONTEND_OR_CPU_BOUND", True),
        ("own-sglang-idle", [("a.txt", ranks(tp(1, ("recv_pyobj (zmq/sugar/socket.py:980)", "SchedulerRequestReceiver.recv_requests (request_receiver.py:88)", *LOOP)) | tp(1, (*HEAD, *LOOP), 1))), ("m.prom", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n')], "HEALTHY_IDLE", True),
        ("own-vllm-parked", [("a.txt", ranks({"VLLM::EngineCore": ("get (queue.py:171)", "_process_input_queue (vllm/v1/engine/core.py:1150)", "run_busy_loop (vllm/v1/engine/core.py:1166)"), "VLLM::Worker_TP0": BUSY, "VLLM::Worker_TP1": BUSY})), ("m.prom", 'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 2.0\n')], "IPC_OR_EXTERNAL_LOST", True),
        ("own-pp-slots", [("a.txt", ranks({"sglang::scheduler_PP0_TP0": ("send (torch/distributed/distributed_c10d.py:2460)", "send_tensor_dict (distributed/parallel_state.py:1190)", "_pp_send_dict_to_next_stage (scheduler_pp_mixin.py:990)", "event_loop_pp_disagg_prefill (scheduler_pp_mixin.py:301)"), "sglang::scheduler_PP1_TP0": ("recv (torch/distributed/distributed_c10d.py:2511)", "recv_tensor_dict (distributed/parallel_state.py:1250)", "_pp_recv_pyobj (scheduler_pp_mixin.py:871)", "event_loop_pp_disagg_prefill (scheduler_pp_mixin.py:322)")})), ("w.log", nccl(0, 77, "SEND") + nccl(1, 75, "RECV"))], "PP_STALL", True),
        ("own-module-load", [("a.txt", ranks({"sglang::scheduler_TP0": ("cuLibraryLoadData (libcuda.so.590)", "loadBinary (cuda_utils.so)", "_init_handles (triton/compiler/compiler.py:470)", "run (triton/runtime/jit.py:740)", "forward_decode (model_executor/model_runner.py:2650)", *LOOP), "sglang::scheduler_TP1": (*SYNC, *LOOP)})), ("smi.csv", "index, utilization.gpu [%], power.draw [W]\n0, 100 %, 119.0 W\n1, 0 %, 88.0 W\n")], "HOST_DEVICE_INTERLOCK", True),
        ("own-gil", [("a.txt", 'Process 71: VLLM::EngineCore\nPython v3.11.9 (/usr/bin/python3.11)\n\nThread 71 (active+gil): "MainThread"\n    take_gil (python3.11)\n    PyEval_RestoreThread (python3.11)\n    torch::profiler::impl::stop (libtorch_cpu.so)\n    stop (torch/profiler/profiler.py:801)\nThread 90 (idle): "Thread-3 (output)"\n    take_gil (python3.11)\n    recv (zmq/sugar/socket.py:790)\n')], "GIL_DEADLOCK", True),
        ("own-frontend-jinja", [("a.txt", dump("sglang::http_server/tokenizer_manager", ("render (jinja2/environment.py:1295)", "apply_chat_template (transformers/tokenization_utils_base.py:1621)", "_process_messages (entrypoints/openai/serving_chat.py:871)", "run (uvicorn/server.py:66)"), 9, "active+gil")), ("s.log", "".join(decode(f"05:0{i}:00", gen=800 + i) for i in range(5)) + "[2026-10-03 05:02:20] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:02:00. last_heartbeat time: 05:01:58\n")], "FRONTEND_OR_CPU_BOUND", True),
        ("own-startup-barrier", [("a.txt", ranks(tp(4, ("barrier (torch/distributed/distributed_c10d.py:4801)", "initialize_model_parallel (distributed/parallel_state.py:1801)", "init_torch_distributed (model_executor/model_runner.py:801)", "__init__ (scheduler.py:402)"))))], "STARTUP", False),
        ("own-compiling", [("a.txt", ranks({"sglang::scheduler_TP0": ("poll (subprocess.py:2011)", "communicate (subprocess.py:1209)", "make_cubin (triton/backends/nvidia/compiler.py:401)", "compile (triton/compiler/compiler.py:301)", "run (triton/runtime/jit.py:700)", "forward_decode (model_executor/model_runner.py:2650)", *LOOP)} | tp(1, (*SYNC, *LOOP), 1)))], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-comm-init", [("a.txt", ranks(tp(2, ("ncclCommInitRank (pynccl_wrapper.py:301)", "__init__ (distributed/device_communicators/pynccl.py:100)", "__init__ (distributed/parallel_state.py:250)", "initialize_model_parallel (distributed/parallel_state.py:1801)"))))], "STARTUP", False),
        ("own-one-of-many", [("a.txt", dump("sglang::scheduler_TP3", (*SYNC, *LOOP)))], "UNDETERMINED", False),
    ]  # fmt: skip


def _log_cases() -> list[Case]:
    fr = """Not all ranks joining collective: sequence number: 4410
internal record id: 4409
group info: 7:ep
collective: nccl:_reduce_scatter_base
missing ranks: {2, 3}
input sizes: [[1024, 7168]]
output sizes: [[256, 7168]]
world size: 4
expected ranks: {0, 1, 2, 3}
collective state: scheduled
"""
    desync = """\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
\t   - [0, 1, 3] joined but didn't finish collective #88 (count from 1)
\t     [2] finished collective #87, but didn't join collective #88 (count from 1)
\t - Snapshot of ranks' latest states:
\t   #88 started ranks:
\t     [0, 1, 3] started ALLGATHER
\t   #87 finished ranks:
\t     [2] finished ALLREDUCE
"""
    late = "[2026-10-03 05:11:3{} TP0] Decode transfer failed for request rank=0 decode_req.req.rid='q{}' decode_req.req.bootstrap_room=55{} with exception KVTransferError(bootstrap_room=55{}): Request 55{} timed out after 300.0s in KVPoll.{}\n"

    def room(i: int, state: str = "WaitingForInput") -> str:
        return late.format(i, i, i, i, i, state)

    stats = "(APIServer pid=3) INFO 10-03 05:0{}:00 [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: {} reqs, Waiting: {} reqs, GPU KV cache usage: {}%, Prefix cache hit rate: 1.0%\n"
    cell = "DeepEP timeout check failed: rank = {}, thread = {}, value = {})\n"
    column = "".join(cell.format(r, t, 1024 if t == 6 else 0) for r in (0, 2, 5) for t in range(8))
    gloo = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
    ss = 'ESTAB 0 {} 10.1.0.2:3418{} 10.1.0.1:5347 users:(("VLLM::Worker_TP",pid={},fd=166)) timer:(on,2.880ms,{})\n'
    lease = "(Worker_TP0 pid=7) WARNING 10-03 05:0{}:00 [base_worker.py:3032] Releasing expired KV blocks for request cmpl-{} which were retrieved by {} remote worker(s) before lease expired.\n"
    vps = "  PID STAT COMMAND\n 11 {}   /opt/v/bin/python /opt/v/bin/vllm serve m\n 12 Sl   VLLM::EngineCore\n 13 {}   VLLM::Worker_TP0\n"
    return [
        ("own-vllm-front-stopped", [("ps.txt", vps.format("Tl", "Rl"))], "FRONTEND_OR_CPU_BOUND", True),
        ("own-vllm-leg-lost", [("p.log", lease.format(1, "a", 0) + lease.format(1, "b", 0))], "KV_TRANSFER", False),
        ("own-vllm-fetched-late", [("p.log", lease.format(1, "a", 0) + "(Worker_TP0 pid=7) ERROR 10-03 05:02:00 [pull_worker.py:667] Potentially invalid KV blocks for unrecognized request cmpl-a were retrieved by a decode worker. They may have expired.\n")], "KV_TRANSFER", False),
        ("own-vllm-greets-nobody", [("d.log", "".join(f"(Worker_TP{r} pid=7{r}) ERROR 10-03 05:01:00 [base_worker.py:1354] NIXL transfer failure: handshake_failed | Context: {{'failure_type': 'handshake_failed'}}\n" for r in range(2)) + "(EngineCore pid=9) ERROR 10-03 05:01:00 [scheduler.py:3417] Failing 1 request(s) due to KV load failure (failure_policy=fail, 9 tokens affected).\n")], "KV_TRANSFER", False),
        ("own-network-silent", [("ss.txt", ss.format(6603, 1, 13, 10) + ss.format(0, 2, 13, 9) + ss.format(44, 3, 13, 1)), ("ps.txt", vps.format("Sl", "Rl"))], "NETWORK_OR_TRANSPORT", False),
        ("own-network-connects", [("ss.txt", ss.format(6603, 1, 13, 10)), ("a.txt", dump("sglang::scheduler_TP0", ("create_connection (urllib3/util/connection.py:73)", "_new_conn (urllib3/connection.py:199)", "query_prefill_dp_ranks (disaggregation/common/conn.py:300)", *LOOP_DECODE), pid=13))], "NETWORK_OR_TRANSPORT", False),
        ("own-watchdog-ops", [("w.log", nccl(0, 991, "ALLREDUCE") + nccl(1, 991, "_ALLGATHER_BASE", at="07:11:09.3") + nccl(2, 12, "BROADCAST"))], "DESYNC_DIFFERENT_COLLECTIVE", True),
        ("own-watchdog-sizes", [("w.log", "".join(nccl(r, 5120, "REDUCE_SCATTER" if False else "ALLREDUCE", 7168 * (64 if r == 6 else 63)) for r in range(8)))], "DESYNC_SAME_OP_SHAPE_OR_SEQ", True),
        ("own-fr-trace", [("fr.txt", fr)], "MISSING_PARTICIPANT", True),
        ("own-desync-report", [("d.log", desync)], "MISSING_PARTICIPANT", True),
        ("own-gloo-size", [("p.log", f"[2026-10-03 05:00:01 TP2] Scheduler hit an exception: Traceback (most recent call last):\n  File \"/app/sglang/srt/disaggregation/utils.py\", line 90, in poll_and_all_reduce\n{gloo}pair.cc:446] op.preamble.length <= op.nbytes. 12 vs 8\n[2026-10-03 05:00:01 TP0] {gloo}pair.cc:547] Connection closed by peer [10.1.1.4]:39000\n")], "DESYNC_SAME_OP_SHAPE_OR_SEQ", True),
        ("own-gloo-timeout", [("p.log", decode("03:00:00") + f"[2026-10-03 05:00:01 TP2] {gloo}unbound_buffer.cc:78] Timed out waiting 7200000ms for recv operation to complete\n")], "UNDETERMINED", False),
        ("own-peer-closed", [("p.log", decode("05:00:00") + "".join(f"[2026-10-03 05:00:01 TP{r}] {gloo}pair.cc:547] Connection closed by peer [10.1.1.4]:3900{r}\n" for r in (0, 1, 3)))], "DEAD_PEER", False),
        ("own-peer-unreachable", [("p.log", "".join(f"[2026-10-03 05:00:01 TP{r}] {gloo}pair.cc:538] Read error [10.1.1.9]:3900{r}: Connection timed out\n" for r in range(4, 8)))], "DEAD_PEER", False),
        ("own-oom-worker", [("dmesg", "[ 123.4] Out of memory: Killed process 777 (VLLM::Worker_TP) total-vm:1kB, anon-rss:2kB\n"), ("e.log", "(EngineCore pid=9) INFO 10-03 05:01:10 [shm_broadcast.py:700] No available shared memory broadcast block found in 60 seconds.\n")], "DEAD_PEER", True),
        ("own-worker-died", [("e.log", "(EngineCore pid=9) ERROR 10-03 05:01:14 [multiproc_executor.py:231] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n")], "DEAD_PEER", False),
        ("own-cuda-error", [("s.log", decode("05:00:00") + "[2026-10-03 05:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  File \"/app/sglang/srt/managers/scheduler.py\", line 2810, in run_batch\ntorch.AcceleratorError: CUDA error: an illegal memory access was encountered\n" + OK.format("05:02:00", "/health", "503 Service Unavailable"))], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-segfault", [("s.log", decode("05:00:00") + "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f1 (most recent call first):\n  File \"/app/a.py\", line 3 in forward\n")], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-503-forever", [("v.log", "[pod/wep-1/vllm] (Worker_DP3_EP3 pid=40) RuntimeError: CUDA error: unspecified launch failure\n" + '[pod/wep-1/vllm] (ApiServer_1 pid=4) INFO:     10.0.0.2:4 - "GET /health HTTP/1.1" 503 Service Unavailable\n' * 4)], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-deepep-column", [("t.log", column)], "MISSING_PARTICIPANT", True),
        ("own-bootstrap-thread", [("p.log", "[2026-10-03 05:00:01 TP1] Exception in thread Thread-5 (bootstrap_thread):\nTraceback (most recent call last):\nAssertionError: First message should be b'NixlMsgGuard'. Foreign traffic?\n"), ("d.log", room(1, "Bootstrapping") + room(2, "Bootstrapping") + decode("05:12:00", more=PD))], "KV_TRANSFER", True),
        ("own-one-sided", [("p.log", "[2026-10-03 05:06:30 TP1] NIXL transport error for room 553: backend\n"), ("d.log", room(3))], "KV_TRANSFER", True),
        ("own-retract", [("d.log", "[2026-10-03 05:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 6, #new_token_ratio: 0.5 -> 0.8\n" + "".join(decode(f"05:1{i}:00", run=2, more="pre-allocated usage: 0.0, #prealloc-req: 6, #transfer-req: 0, #retracted-req: 0, ") for i in range(3)))], "KV_TRANSFER", True),
        ("own-vllm-pull", [("d.log", "(EngineCore_DP0 pid=9) ERROR 10-03 05:01:14 [mooncake_connector.py:731] pulling kv_caches for ['r1'] failed: Timeout waiting for P side ready.\n" * 3)], "KV_TRANSFER", False),
        ("own-stale", [("d.log", decode("04:50:00", more=PD) + room(1) + room(2) + room(4)), ("p.log", "[2026-10-03 05:01:00] The server is fired up and ready to roll!\n")], "STALE_PEER", True),
        ("own-capacity", [("p.log", "".join(f"[2026-10-03 05:02:00] Some requests timed out when bootstrapping, room={i}\n" for i in range(5))), ("d.log", "".join(decode(f"05:0{i}:30", run=8, more="pre-allocated usage: 0.4, #prealloc-req: 12, #transfer-req: 0, #retracted-req: 0, ").replace("0.22", "0.97") for i in range(3)))], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-router-no-worker", [("r.log", "2026-10-03T05:00:00.100Z  WARN smg::router: No available workers model=x\n" * 3)], "ROUTER", True),
        ("own-router-leg", [("g.log", "2026-10-03T05:00:00.100Z ERROR sglang_router::pd: Prefill request failed status=503 request_id=abc\n"), ("d.log", room(6, "Bootstrapping"))], "ROUTER", True),
        ("own-ib", [("n.log", "h1:9:81 [3] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer 10.0.0.4<4000> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n" + nccl(3, 5, "ALLREDUCE"))], "NETWORK_OR_TRANSPORT", True),
        ("own-port", [("s.log", "[2026-10-03 05:00:00 DP2] Scheduler hit an exception: Traceback (most recent call last):\ntorch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29511, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n")], "STARTUP", True),
        ("own-store", [("s.log", "[2026-10-03 05:00:00 TP1] Init torch distributed begin.\ntorch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.\n")], "STARTUP", False),
        ("own-orphans", [("s.log", "[2026-10-03 05:00:00] Received output for rid='a' but the state was deleted in TokenizerManager.\n" * 5 + decode("05:00:30"))], "REQUEST_LEAK", True),
        ("own-false-alarm", [("s.log", "".join(f"[2026-10-03 05:0{i}:00] DetokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)\n" + decode(f"05:0{i}:04") for i in range(4)))], "HEALTHY_WATCHDOG_FALSE_POSITIVE", True),
        ("own-health-503-busy", [("s.log", "".join(decode(f"05:00:{i}0") for i in range(3)) + "[2026-10-03 05:00:35] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:00:15. last_heartbeat time: 05:00:14\n" + "".join(decode(f"05:01:{i}0") for i in range(3)))], "HEALTHY_WATCHDOG_FALSE_POSITIVE", True),
        ("own-long-prompt", [("s.log", "".join(f"[2026-10-03 05:0{i}:07 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.1{i}, #running-req: 0, #queue-req: 2\n" for i in range(7)))], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-too-big", [("v.log", "(EngineCore pid=9) INFO 10-03 05:00:00 [kv_cache_utils.py:1300] GPU KV cache size: 20,000 tokens\n(APIServer pid=3) INFO 10-03 04:59:00 [model.py:1680] Using max model len 131072\n" + stats.format(1, 0.0, 0, 3, 0.0))], "UNSCHEDULABLE_REQUEST", True),
        ("own-zombie-core", [("ps.txt", "USER PID %CPU STAT COMMAND\nroot 1 0.1 Ssl vllm serve m\nroot 88 0.0 Z [VLLM::EngineCor] <defunct>\n"), ("a.log", '(APIServer pid=1) INFO:     10.0.0.2:4 - "GET /health HTTP/1.1" 200 OK\n')], "HEALTH_FALSE_OK_ENGINE_DEAD", False),
        ("own-watchdog-alike", [("w.log", "".join(nccl(r, 4711, "ALLREDUCE") for r in range(4)))], "SYMMETRIC_WAIT", False),
        ("own-watchdog-absent", [("w.log", "".join(nccl(r, 4711, "ALLREDUCE") for r in range(8) if r != 5))], "MISSING_PARTICIPANT", False),
        ("own-first-collective", [("w.log", "h:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 - Init COMPLETE\n" + "".join(nccl(r, 1, "ALLREDUCE") for r in range(2)))], "NETWORK_OR_TRANSPORT", False),
        ("own-p2p-sends", [("w.log", nccl(0, 501, "SEND", 7168) + nccl(1, 499, "RECV", 3584))], "PP_STALL", False),
        ("own-pp-batches", [("p.log", "".join(f"[2026-10-03 05:00:{i:02d} PP{i % 2} TP0] Prefill batch, #new-seq: 1, #new-token: {100 + i // 2}, #cached-token: 0, token usage: 0.1, #running-req: 0, #queue-req: 2, #inflight-req: 1\n" for i in range(7)) + OK.format("05:04:00", "/health", "200 OK"))], "PP_STALL", False),
        ("own-recorder-laggard", [(f"nccl_trace_rank_{r}", recorder(900 if r == 2 else 901)) for r in range(4)], "MISSING_PARTICIPANT", True),
        ("own-engine-dead-500", [("v.log", "(EngineCore_DP0 pid=9) ERROR 10-03 05:01:14 [core.py:900] EngineCore encountered a fatal error.\n" + '(APIServer pid=1) INFO:     10.0.0.2:4 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n')], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-gauges-stay", [("m.prom", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_decode_transfer_queue_reqs{tp_rank="0"} 4.0\nsglang:generation_tokens_total{tp_rank="0"} 77.0\n' * 2)], "KV_TRANSFER", False),
        ("own-one-leg", [(f"{side}/{name}", text) for side, held in (("decode", '"decode_transfer_queue_reqs": 2'), ("prefill", '"prefill_bootstrap_queue_reqs": 0')) for name, text in (("m.prom", f'sglang:num_running_reqs{{tp_rank="0"}} 0.0\nsglang:generation_tokens_total{{engine_type="{side}"}} 77.0\n' * 2), ("loads.json", f'{{"timestamp": 1000.0, "loads": [{{"dp_rank": 0, "timestamp": 999.5, "num_running_reqs": 0, "disaggregation": {{"mode": "{side}", {held}}}}}]}}'))], "KV_TRANSFER", False),
        ("own-leaked-cache", [("v.log", "".join(stats.format(i, 0.0, 0, 0, 41.5) for i in range(3)))], "REQUEST_LEAK", False),
        ("own-start-without-end", [("s.log", "[2026-10-03 05:00:00 TP0] Init torch distributed begin.\n[2026-10-03 05:00:40 TP0] Load weight end. elapsed=3.1 s\n[2026-10-03 05:00:00 TP1] Load weight begin. avail mem=3 GB\n")], "STARTUP", False),
        ("own-idle-stats", [("v.log", "".join(stats.format(i, 0.0, 0, 0, 0.0) for i in range(3)))], "HEALTHY_IDLE", True),
        ("own-detokenizer-stopped", [("ps.txt", "  PID STAT COMMAND\n 11 Sl   sglang::scheduler_TP0\n 12 Tl   sglang::detokenizer\n"), ("s.log", decode("05:00:00"))], "IPC_OR_EXTERNAL_LOST", True),
        ("own-rank-stopped", [("ps.txt", "  PID STAT COMMAND\n 11 Sl   sglang::scheduler_TP0\n 12 Tl   sglang::scheduler_TP1\n"), ("s.txt", dump("sglang::scheduler_TP0", (*HEAD, *LOOP)))], "MISSING_PARTICIPANT", True),
        ("own-prefill-probe", [("p.log", "".join(f"[2026-10-03 05:00:{i}0 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.4, #running-req: 0, #queue-req: 3, #inflight-req: 1\n" for i in (0, 1, 2, 4, 5)) + "[2026-10-03 05:00:35] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:00:15. last_heartbeat time: 05:00:14\n")], "HEALTHY_WATCHDOG_FALSE_POSITIVE", True),
        ("own-laggard-gpu", [("smi.csv", "index, utilization.gpu [%], power.draw [W]\n" + "".join(f"{i}, {0 if i == 3 else 100} %, 118.0 W\n" for i in range(4))), ("s.log", WATCHDOG.format(1))], "UNDETERMINED", False),
        ("own-engine-dead-200", [("v.log", "(EngineCore_DP0 pid=9) ERROR 10-03 05:01:14 [core.py:900] EngineCore encountered a fatal error.\n" + '(APIServer pid=1) INFO:     10.0.0.2:4 - "GET /health HTTP/1.1" 200 OK\n' * 2)], "HEALTH_FALSE_OK_ENGINE_DEAD", False),
        ("own-slow-but-flowing", [("v.log", stats.format(1, 31.5, 4, 9, 99.1) + stats.format(2, 30.9, 4, 11, 99.3) + stats.format(3, 31.0, 4, 12, 99.2))], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-compile", [("s.log", "[2026-10-03 05:00:00 TP0] Entering DeepGEMM JIT Pre-Compile session. It may take a long time\nDeepGEMM warmup:  10%|#         | 100/1000 [00:10<01:30, 10.0it/s]\nDeepGEMM warmup:  20%|##        | 200/1000 [00:20<01:20, 10.0it/s]\n(EngineCore pid=9) INFO 10-03 05:01:10 [shm_broadcast.py:700] No available shared memory broadcast block found in 60 seconds.\n")], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-counters-move", [("m.prom", 'vllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 100.0\nvllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 900.0\n')], "NOT_HUNG_SLOW_OR_CAPACITY", True),
        ("own-broken-gpu", [("dmesg.txt", "[812.1] NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus.\n"), ("s.txt", "".join(dump(f"sglang::scheduler_TP{i}", ("synchronize (torch/cuda/streams.py:200)", "process_batch_result (sglang/srt/managers/scheduler.py:900)", *LOOP), pid=i + 2) for i in range(2)))], "DEVICE_HANG", False),
        ("own-idle-but-retracted", [("s.txt", dump("sglang::scheduler_TP0", ("poll (zmq/sugar/poll.py:106)", "recv_requests (sglang/srt/managers/scheduler.py:1100)", *LOOP))), ("m.prom", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\nsglang:num_retracted_reqs{tp_rank="0"} 2.0\n')], "UNDETERMINED", False),
        ("own-incident-digest", [("incidents/decode/manifest.json", json.dumps({"schema": 1, "reason": "digest: ranks differ", "exit_codes": {"leader": 70, "rank0": None, "rank1": None}, "engine": "decode", "epoch": 4, "detected": 1.79e9, "fault": {"name": "digest", "rank": 1, "step": 20}}))], "DESYNC_SAME_OP_SHAPE_OR_SEQ", True),
        ("own-full-accept-queue", [("ss.txt", "State  Recv-Q Send-Q Local Address:Port Peer Address:Port\nLISTEN 129    128    0.0.0.0:30000 0.0.0.0:*\n"), ("m.prom", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n')], "FRONTEND_OR_CPU_BOUND", False),
        ("own-nothing", [("x.log", "hello\nworld\n")], "UNDETERMINED", False),
        ("own-ras-lag", [("r.txt", "NCCL version 2.30.4 compiled with CUDA 13.0\n#0-0 (aa11) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n  15 ranks have launched up to operation 900\n  1 rank has launched up to operation 812\n  Rank 7 -- GPU 7 managed by process 9 on node a\n"), ("r2.txt", "#0-0 (aa11) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n  15 ranks have launched up to operation 900\n  1 rank has launched up to operation 812\n  Rank 7 -- GPU 7 managed by process 9 on node a\n")], "MISSING_PARTICIPANT", True),
    ]  # fmt: skip


def cases() -> list[Case]:
    """All of them."""
    return [*_stack_cases(), *_log_cases()]
