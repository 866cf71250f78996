# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Where a process stands: its main thread's frames → one `Position`.

Innermost frames decide, read outwards to the first frame that means something. The tables are the mechanisms of the
engines, by function name (line numbers move with every release) and, where a name is common, by file.
"""

import re
from collections.abc import Iterable

import msgspec

from closeranks.diagnose.facts import Frame, Stack, Thread

_PLUMBING = {"wrapper", "broadcast_pyobj", "_all_reduce_attn_groups", "inner", "decorate_context"}
CONTROL = ("hicache", "pd_poll", "dp_sync", "grammar", "error_path")  # sites of collectives outside the forward pass


class Position(msgspec.Struct, frozen=True):
    """What one main thread is doing.

    `kind`: collective, p2p, device_wait, device_launch, module_load, kernel_call, ep_dispatch, nccl_internal, idle,
    wait_workers, blocking_io, gil, exiting, launcher, transfer_wait, compile, host_work, lock, running, unknown.
    `op`: the operation (`broadcast`, `all_reduce`, `synchronize`, …). `site`: what it is for (`loop_head`, `hicache`,
    `pd_poll`, `dp_sync`, `pp`, `startup`, `forward`, …). `path`: names from the decisive frame outwards.
    """

    kind: str
    op: str = ""
    site: str = ""
    path: tuple[str, ...] = ()
    frame: Frame | None = None
    active: bool = False

    @property
    def callers(self) -> tuple[str, ...]:
        """The functions that led here, innermost first, without those that only pass the call on."""
        return tuple(n for n in self.path[1:] if n not in _PLUMBING)

    @property
    def call(self) -> tuple[str, ...]:
        """Which call of a control loop this is: two callers. Empty where ranks may stand in different layers."""
        return self.callers[:2] if self.site in CONTROL else ()

    @property
    def where(self) -> str:
        """`all_reduce in writing_check`, for people."""
        names = self.callers
        inner = f" in {names[0]}" if names else ""
        return f"{self.op or self.kind.replace('_', ' ')}{inner}"


COLLECTIVES = {
    "all_reduce", "allreduce", "broadcast", "broadcast_object_list", "broadcast_object", "all_gather", "allgather",
    "all_gather_object", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "alltoall", "barrier", "monitored_barrier", "gather",
    "gather_object", "scatter", "scatter_object_list", "reduce", "tp_gather", "tp_allgather", "tp_broadcast",
    "pp_broadcast", "cp_allgather", "bcast", "all_reduce_coalesced", "broadcast_tensor_dict", "gatherv",
}  # fmt: skip
_P2P = {
    "recv", "send", "irecv", "isend", "recv_object", "send_object", "recv_object_list", "send_object_list",
    "recv_tensor_dict", "send_tensor_dict", "irecv_tensor_dict", "isend_tensor_dict", "batch_isend_irecv",
    "recv_tensor", "send_tensor", "pp_recv", "pp_send", "wait_pp_recv",
}  # fmt: skip
_DIST_FILE = re.compile(
    r"distributed_c10d|parallel_state|pynccl|communicat|comm\w*\.py|device_communicators|dist\w*\.py|mpi|gloo|custom_all_reduce|engine/rank/collectives/"
)
_DEVICE_WAIT = {
    "synchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize", "cudaStreamSynchronize",
    "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaMemcpy", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoH_v2", "tolist", "item", "THPVariable_tolist", "_local_scalar_dense", "cpu", "nonzero",
    "hipStreamSynchronize", "hipEventSynchronize", "is_nonzero", "__bool__",
}  # fmt: skip
_DEVICE_LAUNCH = {
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaGraphLaunch",
    "cuGraphLaunch",
    "cudaLaunchCooperativeKernel",
    "hipLaunchKernel",
    "hipModuleLaunchKernel",
}
_MODULE_LOAD = {
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleLoad",
    "cuLibraryLoadData",
    "cuModuleLoadFatBinary",
    "cuModuleUnload",
    "hipModuleLoadData",
    "cuModuleGetFunction",
    "cudaFuncGetAttributes",
}
# Driver calls that wait for the whole device, though they do not look like it.
_IMPLICIT_SYNC = {
    "cudaFree",
    "cuMemFree_v2",
    "cuMemFree",
    "cudaMalloc",
    "cuMemAlloc_v2",
    "cudaHostAlloc",
    "cuMemHostAlloc",
    "cudaFreeHost",
    "cuMemHostRegister_v2",
    "cudaHostRegister",
    "cudaHostUnregister",
    "cudaStreamDestroy",
    "cudaEventDestroy",
    "cuMemUnmap",
}
_NCCL_INTERNAL = re.compile(
    r"^(ncclLocalOpAppend|ncclProxySaveOp|SaveProxy|ncclProxyGetPostedOps|ncclProxyCallBlocking|ncclCommAbort|commReclaim|ncclCommDestroy|ncclTransportP2pSetup|ncclProxyPost)"
)
_BLOCKING_IO = re.compile(
    r"^(urlopen|getaddrinfo|create_connection|connect|getresponse|_make_request|do_handshake|read_status|_read_status|readinto|http_request|query_prefill_dp_ranks|try_ensure_parallel_info|gethostbyname|sock_connect|fsync|flush)$"
)
_BLOCKING_FILE = re.compile(
    r"urllib3|requests/|http/client|httpx|httpcore|socket\.py|ssl\.py|etcd|grpc|disaggregation/"
)
_HTTP_FILE = re.compile(r"urllib3/|requests/|http/client|httpx/|httpcore/|urllib/request")
_COMPILE_FILE = re.compile(
    r"torch/_inductor|torch/_dynamo|triton/compiler|triton/backends|triton/runtime/build|cpp_extension|deep_gemm/jit|deep_gemm_wrapper|tvm_ffi|flashinfer/jit|cutlass|ninja|tilelang"
)
_LOCK_FILE = re.compile(r"filelock/|file_baton\.py|portalocker/")
FILE_LOCK = "file lock"
_COMPILE_NAME = re.compile(
    r"^(ptxas|nvcc|_jit_compile|compile_fx|make_cubin|make_ptx|_compile_kernel|build_extension|compile_deep_gemm|make_llir)$"
)
_HOST_WORK = re.compile(
    r"^(encode|_encode_plus|apply_chat_template|_process_messages|tokenize|batch_encode|__call__|decode|batch_decode|build_fsm|create_fsm_index|compile_grammar|compile_json_schema|compile_regex|_compile|fast_deserialize|dumps|loads|deepcopy|render|preprocess|_preprocess|load_image|process_images|resize|format|collect|search|match|sub|findall|finditer|fullmatch|split|extract_\w+|parse_\w+|detect_and_parse)$"
)
_HOST_FILE = re.compile(
    r"(?:^|/)re/__init__|(?:^|/)re\.py|tool_parser|function_call/|reasoning|tokeniz|transformers/|jinja2|outlines|xgrammar|llguidance|interegular|lm_format|PIL/|serving_|chat_template|image|video|audio|json/|copy\.py|pickle|regex|multimodal"
)
_GRAMMAR_FILE = re.compile(r"xgrammar|outlines|llguidance|structured_output/|constrained/")
_KERNEL_FILE = re.compile(
    r"sgl_kernel/|flashinfer/|flash_attn|deep_gemm|deepgemm|triton/runtime/jit|torch/_ops\.py|_custom_ops\.py|flash_mla|aiter/|cutlass_|vllm/_C|marlin|fla/ops|kernels/"
)
_EP_FILE = re.compile(r"deep_ep|deepep|mori_ep|nixl_ep|pplx|uccl|flashinfer_a2a|mooncake_ep")
_EP_NAME = re.compile(
    r"^(dispatch\w*|combine\w*|low_latency_(?:dispatch|combine)|internode_\w+|intranode_\w+|notify_dispatch|_dispatch_core)$"
)
_RENDEZVOUS = re.compile(
    r"^(ncclCommInitRank\w*|ncclCommInitAll|init_process_group|_new_process_group_helper|rendezvous|_create_c10d_store|"
    r"_tcp_rendezvous\w*|connectFullMesh|new_group|_store_based_barrier)$"
)
_TRANSFER = re.compile(
    r"checkGenTransferStatus|checkContextTransferStatus|check_gen_transfer_status|check_context_transfer_status|CacheTransceiver|requestAndReceive|respondAndSend|wait_for_layer_load|wait_for_save|start_load_kv"
)

# Outward frames → what the wait is for. The first table that matches from the inside wins.
_SITES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(p))
    for name, p in (
        (
            "hicache",
            r"^(writing_check|loading_check|check_hicache_events|_process_hicache_events|check_prefetch_progress|_?can_terminate_prefetch|drain_storage_control_queues|_all_reduce_attn_groups|prefetch_thread_func|_sync_\w*ready_counts|write_backup)$|hicache",
        ),
        (
            "pd_poll",
            r"^(poll_and_all_reduce\w*|pop_transferred|pop_bootstrapped|_update_handshake_waiters|process_disagg_prefill_inflight_queue|resolve_waiting_queue_bootstrap|resolve_deferred_releases|pop_preallocated|_poll_\w+|check_bootstrap)$",
        ),
        (
            "dp_sync",
            r"^(\w*prepare_mlp_sync_batch\w*|coordinate_batch_across_dp|_?has_(?:global_)?unfinished(?:_reqs|_dp)\w*|_synchronize_dp_ranks|sync_\w*dp\w*|num_tokens_across_dp|get_dp_padding|_can_queue)$",
        ),
        ("grammar", r"grammar"),
        ("error_path", r"^(_handle_errors|_enqueue_responses|handle_error\w*)$"),
        (
            "loop_head",
            r"^(recv_requests|_broadcast_reqs_across_ranks|recv_reqs|_fetch_new_requests|_broadcast_new_requests|_fetch_and_\w+|broadcast_pyobj_loop)$",
        ),
        (
            "pp",
            r"^(_?pp_\w+|_pp_recv\w*|_pp_send\w*|event_loop_pp_comm|_pp_receive\w*|send_intermediate\w*|recv_intermediate\w*|irecv_tensor_dict|recv_tensor_dict|send_tensor_dict|isend_tensor_dict)$",
        ),
        (
            "startup",
            r"^(dist_barrier_after_load|load_model|load_weights\w*|init_model_worker|init_process_group|_new_process_group_helper|init_distributed_environment|initialize_model_parallel|init_torch_distributed|capture|graph_capture|capture_model|register_graph_buffers|init_device|profile_run|determine_available_memory|warmup\w*|kernel_warmup|warm_up\w*|compile_or_warm_up_model|init_cuda_graphs|init_memory_pool|initialize_kv_caches?|_initialize_kv_caches|ncclCommInitRank\w*|rendezvous|init_worker_distributed_environment)$",
        ),
        (
            "encoder",
            r"^(encode_\w*|vision\w*|visual\w*|get_image_feature|embed_multimodal|_run_encoder|get_multimodal_embeddings)$",
        ),
    )
)
_PP_FILE = re.compile(r"(?:^|/)(?:pp_utils|pp_handler|p2p_communication)\.py$")
_FORWARD = re.compile(
    r"^(forward\w*|execute_model|run_batch|_dummy_run|verify|forward_batch\w*|_forward_step|_forward_step\w*|execute_dummy_batch|replay|sample_tokens|_model_forward|run_model|model_forward|draft\w*|propose\w*)$"
)
_MODE = re.compile(
    r"^(forward_extend|forward_decode|forward_idle|_dummy_run|execute_dummy_batch|forward_batch_verify|forward_batch_generation|forward_target_extend|forward_draft_extend\w*|run_eagle_verify|replay)$"
)
_SKIP = re.compile(
    r"^(wrapper|_wrapped_call_impl|_call_impl|inner|decorate_context|__call__|_fn|__torch_function__|\?|poll|select|epoll_wait|futex\w*|"
    r"pthread_cond_\w*|__futex\w*|syscall|ppoll|__poll|__GI___poll|sched_yield|nanosleep|clock_nanosleep|wait|_?acquire\w*|result|func|wrapped|"
    r"__libc_start\w*|read|__read|recvfrom|0x[0-9a-f]+|std::\w+.*|gloo::.*|c10d?::.*|at::.*|torch::.*|pybind11::.*)$"
)


def position(thread: Thread | None) -> Position:
    """The position of one main thread."""
    if thread is None or not thread.frames:
        return Position("unknown")
    frames = thread.frames
    found = _decide(thread)
    path = tuple(f.name for f in frames[found[2] :])[:40]
    site = found[3] or _site(frames[found[2] :])
    return Position(found[0], found[1], site, path, frames[found[2]], thread.active)


def _site(frames: Iterable[Frame]) -> str:
    forward = ""
    for f in frames:
        for name, pattern in _SITES:
            if pattern.search(f.name):
                return name
        if _PP_FILE.search(f.file):
            return "pp"
        if f.name == "__init__" and re.search(r"scheduler|model_runner|worker|engine/core|engine_core", f.file):
            return "startup"
        if not forward and _FORWARD.match(f.name):
            forward = "forward"
    return forward


def _decide(thread: Thread) -> tuple[str, str, int, str]:
    """(kind, op, index of the decisive frame, site if it is known already)."""
    frames = thread.frames
    names = [f.name for f in frames]
    joined = " ".join(names[:60])
    for i, f in enumerate(frames[:4]):
        if f.name in ("take_gil", "PyEval_AcquireThread", "PyGILState_Ensure", "PyEval_RestoreThread"):
            return "gil", f.name, i, "gil"
    if "_shutdown" in names[:6] and any(f.file.endswith("threading.py") for f in frames[:6]):
        return "exiting", "_shutdown", names.index("_shutdown"), "exit"
    for i, f in enumerate(frames[:12]):
        if _NCCL_INTERNAL.match(f.name):
            return "nccl_internal", f.name, i, ""
    fallback: tuple[str, str, int, str] | None = None
    for i, f in enumerate(frames[:60]):
        kind = _frame_kind(f, i, frames)
        if kind is not None:
            return kind[0], kind[1], i, kind[2]
        if fallback is None and not _SKIP.match(f.name):
            fallback = (
                "running" if thread.active else "lock" if _lock_inside(frames[:i]) else "running",
                f.name,
                i,
                "",
            )
    if "event_loop" in joined and fallback is None:
        return "running", names[0], 0, ""
    return fallback or ("unknown", names[0], 0, "")


def _lock_inside(inner: Iterable[Frame]) -> bool:
    return any(
        f.name in ("wait", "acquire", "get", "result", "join") and ("threading" in f.file or "queue" in f.file)
        for f in inner
    )


def _frame_kind(f: Frame, i: int, frames: tuple[Frame, ...]) -> tuple[str, str, str] | None:
    name, file = f.name, f.file
    outer = [g.name for g in frames[i + 1 : i + 8]]
    between_ranks = bool(_DIST_FILE.search(file)) and "shm_broadcast" not in file  # vLLM's message queue is no group
    if name in COLLECTIVES and between_ranks:
        return "collective", name, ""
    if _RENDEZVOUS.match(name):
        return "collective", name, "startup"
    if name in _P2P and between_ranks:
        return "p2p", name, ""
    if name in _MODULE_LOAD:
        return "module_load", name, ""
    if name in _IMPLICIT_SYNC:
        return "implicit_sync", name, ""
    if name in _DEVICE_LAUNCH:
        return "device_launch", name, ""
    if m := _TRANSFER.search(name):
        return "transfer_wait", m[0], "transfer"
    if name in _DEVICE_WAIT and (
        name not in ("synchronize", "cpu", "item", "tolist", "nonzero", "__bool__") or _device_file(file) or i == 0
    ):
        p2p = next((o for o in outer if o in _P2P), "")
        if p2p:
            return "p2p_device", p2p, "pp"
        coll = next((o for o in outer if o in COLLECTIVES), "")
        return ("collective_device", coll, "") if coll else ("device_wait", name, "")
    if name == "_value" and "jax/" in file:
        return "device_wait", name, "forward"
    if _EP_NAME.match(name) and _EP_FILE.search(file):
        return "ep_dispatch", name, "ep"
    if _idle(f, outer, frames, i):
        return "idle", name, "idle"
    if name in ("get_response", "_wait_for_response", "wait_for_response", "collective_rpc") and any(
        o
        in ("step", "step_with_batch_queue", "run_busy_loop", "execute_model", "_process_engine_step", "sample_tokens")
        for o in [*outer, *(g.name for g in frames[i:])]
    ):
        return "wait_workers", name, "wait_workers"
    if name in ("dequeue", "acquire_read") and any(
        o in ("get_response", "_wait_for_response", "collective_rpc") for o in outer
    ):
        return "wait_workers", "dequeue", "wait_workers"
    if name in (
        "_launch_subprocesses",
        "wait_for_ready",
        "_wait_for_scheduler_ready",
        "wait_for_engine_startup",
        "_wait_for_engine_ready",
        "wait_for_completion_or_failure",
    ):
        return "launcher", name, "launcher"
    if name in ("acquire", "wait", "__enter__") and _LOCK_FILE.search(file):
        return "lock", FILE_LOCK, ""
    if _COMPILE_NAME.match(name) or (
        i < 25
        and _COMPILE_FILE.search(file)
        and name not in ("run", "_init_handles", "launch_metadata", "_recv_msg", "_read_thread")
    ):
        grammar = next((g.name for g in frames[i : i + 8] if _GRAMMAR_FILE.search(g.file)), "")
        return ("host_work", grammar, "host_work") if grammar else ("compile", name, "")
    if _HTTP_FILE.search(file) or (_BLOCKING_IO.match(name) and _BLOCKING_FILE.search(file)):
        return "blocking_io", name, "blocking_io"
    if name in ("getaddrinfo", "gethostbyname", "urlopen"):
        return "blocking_io", name, "blocking_io"
    if _HOST_FILE.search(file) and _HOST_WORK.match(name):
        return "host_work", name, "host_work"
    if name in ("write", "flush", "emit") and ("logging" in file or "<std" in file):
        return "blocking_io", name, "log_write"
    if _KERNEL_FILE.search(file) and i <= 3:
        return "kernel_call", name, ""
    return None


def _device_file(file: str) -> bool:
    return bool(re.search(r"cuda|torch|streams\.py|libcu|npu|hip|xpu|musa|event", file))


_SERVER_LOOP = re.compile(r"run_forever|uvicorn|run_until_complete|Runner|serve")


def _idle(f: Frame, outer: list[str], frames: tuple[Frame, ...], i: int) -> bool:
    """Polling for the next message, with nothing in between: a loop that waits for work."""
    near = [f.name, *outer]
    if "recv_requests" in near or "recv_reqs" in near or "recv_from_tokenizer" in near:
        return f.name in (
            "recv_pyobj",
            "recv",
            "poll",
            "recv_requests",
            "recv_multipart",
            "recv_from_tokenizer",
            "_recv_requests",
            "_pull_raw_reqs",
        )
    if f.name in ("dequeue", "acquire_read", "wait") and "worker_busy_loop" in near:
        return not any(o in ("get_response", "_wait_for_response", "collective_rpc") for o in near)
    if f.name in ("get", "_process_input_queue", "poll") and "_process_input_queue" in near:
        return True
    if f.name in ("poll", "_next") and any(g.name == "_next" and "engine/rank/" in g.file for g in frames[i : i + 4]):
        return True
    if f.name in ("sock_recv", "recv_pyobj", "recv") and any("event_loop" in o for o in near):
        return True
    if f.name in ("select", "poll", "epoll_wait", "_run_once") and i <= 2 and any(_SERVER_LOOP.search(o) for o in near):
        return True
    if i == 0 and f.name in ("run", "run_until_complete") and re.search(r"runners\.py|uvloop", f.file):
        return True  # uvloop's loop has no frame of its own: innermost is what called it
    return f.name in ("idle_sleep", "maybe_sleep_on_idle", "_maybe_sleep", "sleep_on_idle", "maybe_sleep")


def mode_of(p: Position) -> str:
    """The forward mode that the path names (`forward_extend`, `forward_decode`, …), "" for none."""
    return next((n for n in p.path if _MODE.match(n)), "")


def same_call(a: Position, b: Position) -> bool:
    """Whether two ranks at one site stand in the same call. Of a cut dump only the callers that are left count."""
    return all(x == y for x, y in zip(a.call, b.call, strict=False))


def compiles_grammar(stack: Stack) -> str:
    """The function in which a helper thread compiles a grammar, "" if none does."""
    for t in stack.threads:
        at = position(t)
        if not t.main and at.kind == "host_work" and t.active and any(_GRAMMAR_FILE.search(f.file) for f in t.frames):
            return at.op
    return ""


def helper_threads(stack: Stack) -> dict[str, Thread]:
    """Helper threads by what they run: `bootstrap_thread`, `transfer_worker`, `prefetch_thread_func`, …"""
    found: dict[str, Thread] = {}
    for t in stack.threads:
        m = re.search(r"\((\w+)\)", t.name)
        if m:
            found[m[1]] = t
        for f in t.frames:
            if f.name in ("bootstrap_thread", "transfer_worker", "decode_listener_thread", "decode_thread"):
                found.setdefault(f.name, t)
    return found
