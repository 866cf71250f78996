# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""Further cases of our own: what process lists, the kernel's log, helpers and clusters say by a line or two."""

from tests.diagnose.variants import HEAD, LOOP, OK, Case, decode, dump

STATS = "(APIServer pid=1) INFO 10-03 05:00:{:02d} [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 11.2%, Prefix cache hit rate: 3.0%\n"
STILL = (
    STATS.format(10, 120.5)
    + STATS.format(20, 0.0)
    + STATS.format(30, 0.0)
    + '(APIServer pid=1) INFO:     10.0.0.9:44 - "GET /health HTTP/1.1" 200 OK\n' * 3
)
PS = "USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND\n"
API = "root 1 2.1 0.4 9000000 900000 ? Ssl Aug17 12:01 /usr/bin/python3 /usr/local/bin/vllm serve /m --port 8000\n"
OTHER = "root 90 0.0 0.0 16000 9000 ? S Aug17 0:00 /usr/bin/python3 -c from multiprocessing.resource_tracker import main;main(38)\n"
CHILD = "root 91 9.0 0.4 9000000 900000 ? Rl Aug17 9:00 /usr/bin/python3 -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=3, pipe_handle=5)\n"
RAISED = (
    "[2026-10-03 04:59:01 TP0] Load weight end. elapsed=21.10 s\nDetokenizerManager hit an exception:\nTraceback (most recent call last):\n"
    '  File "/x/sglang/srt/managers/detokenizer_manager.py", line 402, in run_detokenizer_process\n    manager = DetokenizerManager(server_args, port_args)\nOSError: Unable to load vocabulary from file.\n'
)
REFUSED = "".join(OK.format(f"05:0{n}:08", "/health_generate", "503 Service Unavailable") for n in range(4))
COMPILES = (
    "compile_json_schema (xgrammar/compiler.py:212)",
    "dispatch_json (sglang/srt/constrained/xgrammar_backend.py:214)",
    "process_input_requests (sglang/srt/managers/scheduler.py:1501)",
    *LOOP,
)
COMPLAINS = "[2026-10-03 05:00:40] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:00:20. last_heartbeat time: 05:00:02\n"
GRAMMAR = dump("sglang::scheduler_TP0", COMPILES, 700, "active+gil") + dump(
    "sglang::scheduler_TP1", (*HEAD, *LOOP), 701
)
BUS = "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n               NVRM: fallen off the bus and is not responding to commands.\n"
SYNC = (
    "synchronize (torch/cuda/streams.py:231)",
    "get_output (vllm/v1/worker/gpu_model_runner.py:221)",
    "worker_main (vllm/v1/executor/multiproc_executor.py:650)",
)
HELD = "  PID STAT COMMAND\n  610 Sl   sglang::scheduler_TP0\n  611 tl   sglang::scheduler_TP1\n"


def column(ranks: tuple[int, ...], absent: int, prefix: str = "") -> str:
    """DeepEP's matrix of some ranks of one node, on which one peer is missing."""
    return "".join(
        f"{prefix}DeepEP timeout check failed: rank = {r}, thread = {t}, value = {1024 if t == absent else 0})\n"
        for r in ranks
        for t in range(8)
    )


def cases() -> list[Case]:
    """All of them."""
    waits = "INFO 10-03 05:0{}:00 ray_utils.py:214] Waiting for creating a placement group of specs for {} seconds. specs=[{{'GPU': 1.0}}].\n"
    pings = "2026-10-03T05:00:{:02d}.158212Z  INFO x::distributed::zmq: ZmqActiveMessageLeader: Ping timed out. Retrying...\n"
    return [
        ("own-helper-raised", [("s.log", RAISED + REFUSED)], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-core-not-listed", [("ps.txt", PS + API + OTHER), ("v.log", STILL)], "HEALTH_FALSE_OK_ENGINE_DEAD", False),
        ("own-core-untitled", [("ps.txt", PS + API + OTHER + CHILD), ("v.log", STILL)], "UNDETERMINED", False),
        ("own-list-filtered", [("ps.txt", PS + API), ("v.log", STILL)], "UNDETERMINED", False),
        ("own-off-the-bus", [("dmesg.txt", BUS), ("s.txt", "".join(dump(f"VLLM::Worker_TP{i}", SYNC, 300 + i, "active") for i in range(2)))], "DEVICE_HANG", False),
        ("own-exit-139", [("describe.txt", "    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    139\n")], "CRASH_LOOKS_LIKE_HANG", True),
        ("own-grammar-after-tokens", [("s.txt", GRAMMAR), ("s.log", decode("05:00:01") + COMPLAINS)], "FRONTEND_OR_CPU_BOUND", False),
        ("own-deepep-two-pods", [("all.log", column((0, 1, 4), 3, "[pod/dec-0/vllm] ") + column((0, 2, 6), 5, "[pod/dec-1/vllm] "))], "MISSING_PARTICIPANT", True),
        ("own-debugger-left", [("ps.txt", HELD + "  991 S    gdb -p 611\n"), ("s.txt", dump("sglang::scheduler_TP0", (*HEAD, *LOOP), 610))], "MISSING_PARTICIPANT", True),
        ("own-waits-for-gpus", [("head.log", "".join(waits.format(n, 10 << (2 * n)) for n in range(4)))], "STARTUP", True),
        ("own-leader-pings", [("v.log", "".join(pings.format(n) for n in range(12)))], "STARTUP", False),
    ]  # fmt: skip
