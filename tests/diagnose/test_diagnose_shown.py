# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""What may be called shown. Each kind has a bundle that looks like the picture and is not it, and most the picture itself.

`ALLOWED`: a class with a star may be said as likely or undetermined only.
"""

import pytest

from closeranks.diagnose.judge import diagnose_texts
from tests.diagnose.variants import HEAD, LOOP, LOOP_DECODE, REDUCE, SYNC, WATCHDOG, decode, dump, ranks, tp

S = "sglang::scheduler_TP"
WRITING = (
    *REDUCE,
    "writing_check (sglang/srt/mem_cache/hiradix_cache.py:802)",
    "check_hicache_events (sglang/srt/mem_cache/hiradix_cache.py:1141)",
)
APART = dump(S + "0", HEAD + LOOP, pid=4000) + "".join(
    dump(S + str(i), WRITING + LOOP, pid=4000 + i) for i in range(1, 4)
)
ASKS = (
    "urlopen (urllib3/connectionpool.py:787)",
    "get (requests/api.py:73)",
    "try_ensure_parallel_info (disaggregation/common/conn.py:311)",
    "pop_preallocated (disaggregation/decode.py:655)",
)
ENTRY_ASKS = dump(S + "0", ASKS + LOOP_DECODE) + "".join(
    dump(S + str(i), HEAD + LOOP_DECODE, pid=100 + i) for i in range(1, 4)
)
LOADS = (
    "cuModuleLoadData (libcuda.so.590.48)",
    "load_binary (triton/compiler/compiler.py:400)",
    "run (triton/runtime/jit.py:700)",
    "forward_decode (model_runner.py:900)",
)
FORWARD = (*REDUCE, "forward (layers/linear.py:100)", "forward_decode (model_runner.py:900)")
ONE_LOADS = dump(S + "0", LOADS + LOOP) + dump(S + "1", FORWARD + LOOP, pid=101)


def smi(*rows: tuple[int, int]) -> str:
    head = "index, utilization.gpu [%], power.draw [W], power.limit [W]\n"
    return head + "".join(f"{i}, {util} %, {watt}.00 W, 700.00 W\n" for i, (util, watt) in enumerate(rows))


def flow(hours: str, minutes: int, step: int = 1, gen: float = 700.0) -> str:
    return "".join(decode(f"{hours}:{m:02}:01", run=16, gen=gen) for m in range(0, minutes, step))


def tokens(n: int) -> str:
    return f'sglang:generation_tokens_total{{model_name="m"}} {n}\n'


def stats(minute: int, gen: float, running: int = 12, waiting: int = 0, kv: float = 12.0) -> str:
    return f"(APIServer pid=10) INFO 11-20 10:{minute:02}:00 [loggers.py:120] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {gen} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {kv}%, Prefix cache hit rate: 1.0%\n"


def gil(version: str, pid: int = 7) -> str:
    text = dump(
        "VLLM::EngineCore",
        ("take_gil (libpython.so)", "PyEval_RestoreThread (libpython.so)", "step (vllm/v1/engine/core.py:280)"),
        pid,
        "active+gil",
        [("process_output", ("take_gil (libpython.so)", "run (threading.py:1010)"))],
    )
    return text.replace("Python v3.12.7", f"Python v{version}")


def kill(task: str, pid: int, at: str = "81123.118300") -> str:
    return f"[{at}] Memory cgroup out of memory: Killed process {pid} ({task}) total-vm:9kB, anon-rss:9kB\n"


def ps(*rows: tuple[int, str]) -> str:
    return "  PID  PPID STAT %CPU COMMAND\n" + "".join(f" {pid} 1 Sl 1.0 {title}\n" for pid, title in rows)


def orphan(at: str, request: str) -> str:
    return f"[2026-10-03 {at}] Received output for rid='{request}' but the state was deleted in TokenizerManager.\n"


def failed(at: str, room: int, state: str = "WaitingForInput") -> str:
    return f"[2026-10-03 {at} TP0] Decode transfer failed for request rank=0 decode_req.req.rid='q{room}' decode_req.req.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}): Request {room} timed out after 300.0s in KVPoll.{state}\n"


def leg(at: str) -> str:
    return f"2026-10-03 {at} ERROR prefill request failed: status=400 request_id=abc\n"


def report(missing: str) -> str:
    return f"Not all ranks joining collective: sequence number: 31117\ngroup info: 0:default_pg\ncollective: nccl:all_reduce\nmissing ranks: {{{missing}}}\nworld size: 4\n"


IDLE = dump(
    S + "0", ("recv_pyobj (zmq/sugar/socket.py:989)", "recv_requests (request_receiver.py:70)", *LOOP)
) + "".join(dump(S + str(i), HEAD + LOOP, pid=100 + i) for i in range(1, 4))
NOTHING = 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'
IN_USE = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
UP = "[2026-10-03 {}] The server is fired up and ready to roll!\n"
SIZE = "(EngineCore pid=1) INFO 11-20 09:00:00 [kv_cache_utils.py:1000] GPU KV cache size: 98,304 tokens\n"
FITS = "(EngineCore pid=1) INFO 11-20 09:00:00 [kv_cache_utils.py:1005] Maximum concurrency for 131,072 tokens per request: {}x\n"
OPTIONAL = """(Worker_TP0 pid=101) Traceback (most recent call last):
(Worker_TP0 pid=101)   File "/opt/x/utils.py", line 58, in _lazy_init
(Worker_TP0 pid=101)     import fast_kernels
(Worker_TP0 pid=101) ModuleNotFoundError: No module named 'fast_kernels'
"""
REFUSED = "".join(
    f'(APIServer pid=10) INFO:     10.0.0.1:4{i}000 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    for i in range(4)
)
SHARDS = (
    "(Worker_TP0 pid=101) Loading safetensors checkpoint shards:  {}% Completed | {}/163 [01:12<11:05,  4.53s/it]\n"
)
LISTENS = 'LISTEN 129    128    0.0.0.0:30000 0.0.0.0:* users:(("python3",pid=4000,fd=9))\n'
UNREAD = "".join(
    f'ESTAB  {900 + i} 0 10.0.0.1:30000 10.0.0.9:5{i:04} users:(("python3",pid=4000,fd=9))\n' for i in range(9)
)
KERNEL = "*      0      -   0 9912 Active 0xffffffff (132,1,1) (384,1,1) fused_moe_kernel<<<(132,1,1)>>> ()\n"
CUDA_GDB = (
    "(cuda-gdb) info cuda kernels\n"
    + KERNEL
    + "\n(cuda-gdb) device 1\n(cuda-gdb) info cuda kernels\nNo CUDA kernels.\n"
)
HUNG = "".join(WATCHDOG.format(i) for i in range(4))
DESYNC = "DESYNC_DIFFERENT_COLLECTIVE"
LIVE = ("NOT_HUNG_SLOW_OR_CAPACITY", "UNDETERMINED")

Bundle = list[tuple[str, str]]
OF_DECODE = NOTHING.replace('{tp_rank="0"', '{engine_type="decode",tp_rank="0"')
QUEUES = "".join(
    f'sglang:num_decode_{q}_queue_reqs{{engine_type="decode",tp_rank="0"}} 0.0\n' for q in ("prealloc", "transfer")
)
SMALL = "(EngineCore pid=8) INFO 11-20 09:50:00 [kv_cache_utils.py:1300] GPU KV cache size: 20,000 tokens\n(APIServer pid=3) INFO 11-20 09:49:00 [model.py:1680] Using max model len 131072\n"
QUEUED = "".join(stats(m, 0.0, 0, 1, 0.0) for m in range(5))

ALLOWED: list[tuple[str, Bundle, tuple[str, ...]]] = [
    (
        "a-stall-in-a-log-that-was-rotated-and-then-hours-of-tokens",
        [
            ("engine.log.1", decode("03:00:01") + WATCHDOG.format(0).replace("05:06:41", "03:05:06")),
            ("engine.log", flow("09", 10)),
            ("s.txt", APART),
        ],
        (DESYNC + "*", *LIVE),
    ),
    (
        "a-log-that-is-written-every-two-minutes",
        [("engine.log", flow("09", 10, 2) + "[2026-10-03 09:09:40] INFO:     10.0.0.9:1 - \"POST /generate HTTP/1.1\" 200 OK\n"), ("s.txt", APART)],
        (DESYNC + "*", *LIVE),
    ),
    (
        "a-stall-that-counters-outlived",
        [("engine.log", decode("05:01:40") + HUNG), ("s.txt", APART), ("m1.txt", tokens(10)), ("m2.txt", tokens(9000))],
        (DESYNC + "*", *LIVE),
    ),
    ("one-look-at-the-gil-on-3.12", [("s.txt", gil("3.12.3"))], ("GIL_DEADLOCK*",)),
    (
        "waits-for-the-gil-while-tokens-flow",
        [("s.txt", gil("3.11.9")), ("v.log", "".join(stats(m, 812.5) for m in range(5)))],
        ("GIL_DEADLOCK*", *LIVE),
    ),
    (
        "a-kernel-at-work",
        [("g.txt", CUDA_GDB), ("s.txt", ranks(tp(2, SYNC + LOOP))), ("engine.log", flow("09", 10))],
        ("DEVICE_HANG*", *LIVE),
    ),
    (
        "a-kernel-resident-on-devices-that-work",
        [("g.txt", CUDA_GDB), ("s.txt", ranks(tp(2, SYNC + LOOP))), ("smi.csv", smi((99, 640), (98, 630)))],
        ("DEVICE_HANG*", "UNDETERMINED"),
    ),
    (
        "loads-a-module-and-counts-tokens",
        [("s.txt", ONE_LOADS), ("smi.csv", smi((98, 610), (0, 70))), ("m1.txt", tokens(10)), ("m2.txt", tokens(9000))],
        LIVE,
    ),
    (
        "loads-a-module-beside-devices-that-nobody-uses",
        [("s.txt", ONE_LOADS), ("smi.csv", smi((98, 150), (98, 150), *[(0, 70)] * 6))],
        ("HOST_DEVICE_INTERLOCK*", "UNDETERMINED"),
    ),
    (
        "asks-a-peer-at-full-speed",
        [("s.txt", ENTRY_ASKS), ("d.log", "".join(decode(f"09:00:{i:02}", gen=5000) for i in range(40)))],
        ("FRONTEND_OR_CPU_BOUND*", *LIVE),
    ),
    ("a-kill-of-a-former-life", [("s.txt", APART), ("engine.log", decode("05:01:40") + HUNG), ("dmesg.txt", kill("sglang::schedul", 88121))], (DESYNC,)),
    ("a-kill-before-the-engine-came-up", [("engine.log", UP.format("04:00:00") + decode("05:01:40") + HUNG), ("dmesg.txt", kill("sglang::schedul", 9, "Sat Oct 03 03:00:00 2026"))], ("UNDETERMINED",)),
    ("a-foreign-python-on-one-host-of-two", [("s.txt", ranks(tp(2, SYNC + LOOP))), ("engine.log", HUNG[:-400]), ("flags.txt", "python3 -m sglang.launch_server --tp 4 --nnodes 2\n"), ("ps.txt", ps((4000, S + "0"), (4001, S + "1"))), ("dmesg.txt", kill("python3", 1777))], ("SYMMETRIC_WAIT", "UNDETERMINED")),
    ("a-foreign-python-and-a-list-that-lacks-a-rank", [("s.txt", ranks(tp(3, FORWARD + LOOP))), ("engine.log", HUNG), ("ps.txt", ps(*((4000 + i, S + str(i)) for i in range(3)))), ("dmesg.txt", kill("python3", 1777))], ("DEAD_PEER*",)),
    ("a-server-that-is-nobodys", [("s.txt", APART), ("engine.log", decode("05:01:40") + HUNG), ("dmesg.txt", kill("redis-server", 311))], (DESYNC,)),
    ("a-second-start-beside-an-engine-that-stands", [("old/s.txt", APART), ("old/engine.log", decode("05:01:40") + HUNG), ("again.log", IN_USE)], (DESYNC,)),
    ("a-compilation-that-ended-hours-ago", [("s.txt", ranks(tp(2, SYNC + LOOP))), ("engine.log", "[2026-10-03 01:00:00 TP0] Entering DeepGEMM JIT Pre-Compile session.\nDeepGEMM warmup:   1%|1  | 300/32768 [00:03<05:24, 100.11it/s]\nDeepGEMM warmup: 100%|###| 32768/32768 [05:11<00:00, 105.3it/s]\n" + UP.format("01:20:00") + decode("05:01:40") + HUNG)], ("SYMMETRIC_WAIT", "DEVICE_HANG", "UNDETERMINED")),
    ("an-optional-import-and-a-start-that-goes-on", [("v.log", OPTIONAL + REFUSED + SHARDS.format(10, 16) + SHARDS.format(22, 36))], ("NOT_HUNG_SLOW_OR_CAPACITY", "STARTUP", "UNDETERMINED")),
    ("idle-and-a-client-without-an-answer", [("s.txt", IDLE), ("m1.txt", NOTHING), ("m2.txt", NOTHING), ("curl.txt", "$ curl --max-time 90 http://10.0.0.2:30000/v1/completions -d @q.json\ncurl: (28) Operation timed out after 90001 milliseconds with 0 bytes received\n")], ("HEALTHY_IDLE*", "UNDETERMINED")),
    ("idle-and-a-request-that-its-router-waits-for", [("s.txt", IDLE), ("m1.txt", NOTHING), ("m2.txt", NOTHING), ("router.log", "2026-10-03T10:09:00.100200Z  WARN sglang_router::routers::http::pd_router: request still pending after 540s request_id=a1\n")], ("HEALTHY_IDLE*", "UNDETERMINED")),
    ("idle-decode-whose-transfers-nobody-counts", [("s.txt", IDLE), ("m1.txt", OF_DECODE), ("m2.txt", OF_DECODE)], ("HEALTHY_IDLE*", "UNDETERMINED")),
    ("idle-and-nobody-accepts", [("s.txt", IDLE), ("m1.txt", NOTHING), ("m2.txt", NOTHING), ("ss.txt", LISTENS)], ("FRONTEND_OR_CPU_BOUND*", "UNDETERMINED")),
    ("idle-and-nobody-reads", [("s.txt", IDLE), ("m1.txt", NOTHING), ("m2.txt", NOTHING), ("ss.txt", UNREAD)], ("FRONTEND_OR_CPU_BOUND*", "UNDETERMINED")),
    ("three-aborts-in-two-hours", [("engine.log", decode("08:00:01") + "".join(orphan(f"0{8 + i}:10:00", f"r{i}") + decode(f"0{8 + i}:10:40") for i in range(3)))], LIVE),
    ("aborts-of-one-minute", [("engine.log", decode("08:00:01") + "".join(orphan(f"08:10:0{i}", f"r{i}") for i in range(4)) + decode("08:11:40"))], ("REQUEST_LEAK*", *LIVE)),
    ("five-hours-of-transfers-after-a-restart", [("decode/decode.log", decode("08:00:01", more="pre-allocated usage: 0.01, ") + UP.format("09:00:00") + "".join(decode(t, more="pre-allocated usage: 0.01, ") for t in ("09:10:01", "13:59:01")) + "".join(failed(f"14:0{i}:00", 770 + i) for i in range(5)))], ("KV_TRANSFER", "UNDETERMINED")),
    ("prefill-was-replaced-hours-before", [("decode/decode.log", "".join(decode(t, more="pre-allocated usage: 0.01, ") for t in ("08:00:01", "13:59:01")) + "".join(failed(f"14:0{i}:00", 770 + i) for i in range(5))), ("prefill/prefill.log", UP.format("09:00:00"))], ("KV_TRANSFER", "UNDETERMINED")),
    ("another-requests-failure-of-hours-before", [("router.log", leg("08:00:00")), ("decode.log", failed("10:04:00", 991))], ("KV_TRANSFER*", "UNDETERMINED")),
    ("a-cache-that-the-engine-says-is-large-enough", [("v.log", SIZE + FITS.format("2.10") + "".join(stats(m, 0.0, 0, 1, 0.0) for m in range(4)))], ("UNSCHEDULABLE_REQUEST*", "UNDETERMINED")),
    ("a-queue-that-was-seen-for-a-moment", [("v.log", SMALL + stats(0, 90.0, 3, 0) + stats(1, 0.0, 0, 1, 0.0))], ("UNSCHEDULABLE_REQUEST*", "UNDETERMINED")),
    ("a-queue-that-waits-for-pages", [("v.log", SMALL + QUEUED + "(EngineCore pid=8) DEBUG 11-20 10:03:31 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.\n")], ("UNDETERMINED", "KV_TRANSFER*")),
    ("a-queue-behind-handshakes-that-fail", [("v.log", SMALL + QUEUED + "(Worker_TP0 pid=9) ERROR 11-20 10:03:31 [nixl_connector.py:827] Handshake failed for request cmpl-7, marking blocks as invalid\n")], ("UNDETERMINED", "KV_TRANSFER*")),
    ("a-queue-of-an-engine-that-was-paused", [("v.log", SMALL + '(APIServer pid=3) INFO:     10.0.0.7:4001 - "POST /pause HTTP/1.1" 200 OK\n' + QUEUED)], ("UNDETERMINED",)),
    ("a-queue-of-a-request-that-is-short", [("v.log", SMALL + "(APIServer pid=3) INFO 11-20 09:59:04 [logger.py:39] Received request cmpl-7: prompt: None, params: SamplingParams(n=1, max_tokens=48), prompt_token_ids_len=21, lora_request: None.\n" + QUEUED)], ("UNDETERMINED",)),
    ("a-queue-behind-a-grammar-that-compiles", [("v.log", SMALL + QUEUED), ("s.txt", dump("VLLM::EngineCore", ("compile_json_schema (xgrammar/compiler.py:212)", "grammar_init (vllm/v1/structured_output/__init__.py:150)", "run_busy_loop (vllm/v1/engine/core.py:1340)"), 8, "active+gil"))], ("FRONTEND_OR_CPU_BOUND*",)),
    ("two-servers-of-which-one-has-a-small-cache", [("a.log", SMALL.replace("131072", "8192") + QUEUED), ("b.log", SMALL.replace("20,000", "900,000"))], ("UNDETERMINED",)),
    ("missing-files-of-recorders", [("fr.txt", report("2, 3")), ("ls.txt", "nccl_trace_rank_0\nnccl_trace_rank_1\n")], ("UNDETERMINED",)),
    ("recorders-that-may-be-incomplete", [("fr.txt", report("3")), ("sh.txt", "$ torchfrtrace --allow-incomplete-ranks dumps\n")], ("UNDETERMINED",)),
    ("a-report-alone", [("fr.txt", report("3"))], ("MISSING_PARTICIPANT*",)),
]  # fmt: skip

SHOWN: list[tuple[str, Bundle, str]] = [
    ("a-stall-after-the-last-token", [("engine.log.1", flow("03", 9)), ("engine.log", decode("05:01:40") + HUNG), ("s.txt", APART)], DESYNC),
    ("silence-of-a-log-that-is-written-every-ten-seconds", [("engine.log", "".join(decode(f"09:00:{s}", run=16) for s in (10, 20, 30, 40)) + "[2026-10-03 09:09:40] INFO:     10.0.0.9:1 - \"POST /generate HTTP/1.1\" 200 OK\n"), ("s.txt", APART)], DESYNC),
    ("the-gil-twice", [("s1.txt", gil("3.12.3")), ("s2.txt", gil("3.12.3"))], "GIL_DEADLOCK"),
    ("nobody-can-give-the-gil-up", [("s.txt", gil("3.11.9"))], "GIL_DEADLOCK"),
    ("loads-a-module-beside-a-spinning-device", [("s.txt", ONE_LOADS), ("smi.csv", smi((98, 150), (0, 70)))], "HOST_DEVICE_INTERLOCK"),
    ("asks-a-peer-and-tokens-come-slowly", [("s.txt", ENTRY_ASKS), ("d.log", decode("08:00:01", gen=1900.2) + "".join(decode(f"08:00:{s}", gen=88.1) for s in (10, 20, 30)))], "FRONTEND_OR_CPU_BOUND"),
    ("asks-a-peer-in-two-dumps", [("s1.txt", ENTRY_ASKS), ("s2.txt", ENTRY_ASKS)], "FRONTEND_OR_CPU_BOUND"),
    ("a-kill-of-a-rank-that-is-missed", [("s.txt", ranks(tp(3, FORWARD + LOOP))), ("engine.log", decode("05:01:40") + HUNG), ("ps.txt", ps(*((4000 + i, S + str(i)) for i in range(3)))), ("flags.txt", "python3 -m sglang.launch_server --tp 4\n"), ("dmesg.txt", kill("sglang::schedul", 4003))], "DEAD_PEER"),
    ("a-kill-of-a-rank-that-was-dumped-before", [("s.txt", APART), ("engine.log", decode("05:01:40") + HUNG), ("ps.txt", ps(*((4000 + i, S + str(i)) for i in range(3)))), ("dmesg.txt", kill("sglang::schedul", 4003))], "DEAD_PEER"),
    ("a-cache-server-that-a-request-waits-for", [("s.txt", IDLE), ("m.txt", NOTHING.replace("queue_reqs{tp_rank=\"0\"} 0.0", "queue_reqs{tp_rank=\"0\"} 1.0")), ("dmesg.txt", kill("mooncake_master", 311))], "IPC_OR_EXTERNAL_LOST"),
    ("a-port-in-use", [("start.log", IN_USE)], "STARTUP"),
    ("an-import-that-ended-the-worker", [("v.log", OPTIONAL + REFUSED)], "CRASH_LOOKS_LIKE_HANG"),
    ("output-of-one-request-again-and-again", [("engine.log", "".join(orphan(f"08:1{i}:00", "r1") + decode(f"08:1{i}:30") for i in range(4)))], "REQUEST_LEAK"),
    ("a-restart-since-when-all-fail", [("decode/decode.log", decode("08:00:01", more="pre-allocated usage: 0.01, ") + UP.format("09:00:00") + "".join(failed(f"09:1{i}:00", 770 + i) for i in range(5)))], "STALE_PEER"),
    ("a-leg-that-failed-as-the-wait-began", [("router.log", leg("09:59:01")), ("decode.log", failed("10:04:00", 991))], "ROUTER"),
    ("a-cache-that-is-too-small", [("v.log", SIZE + FITS.format("0.75") + "".join(stats(m, 0.0, 0, 1, 0.0) for m in range(4)))], "UNSCHEDULABLE_REQUEST"),
    ("idle", [("s.txt", IDLE), ("m1.txt", NOTHING), ("m2.txt", NOTHING)], "HEALTHY_IDLE"),
    ("idle-decode-whose-transfers-are-counted", [("s.txt", IDLE), ("m1.txt", OF_DECODE + QUEUES), ("m2.txt", OF_DECODE + QUEUES)], "HEALTHY_IDLE"),
    ("a-queue-that-stands-for-minutes", [("v.log", SMALL + QUEUED)], "UNSCHEDULABLE_REQUEST"),
    ("a-rank-that-did-not-join-by-its-own-recorder", [("fr.txt", report("3")), ("ls.txt", "".join(f"nccl_trace_rank_{i}\n" for i in range(4)))], "MISSING_PARTICIPANT"),
    ("a-kernel-that-spins-in-a-stall", [("g.txt", CUDA_GDB), ("s.txt", ranks(tp(2, SYNC + LOOP))), ("engine.log", HUNG)], "DEVICE_HANG"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "evidence", "allowed"), ALLOWED, ids=[c[0] for c in ALLOWED])
def test_not_shown(name: str, evidence: Bundle, allowed: tuple[str, ...]) -> None:
    main = diagnose_texts(evidence).main
    said = {a.rstrip("*"): a for a in allowed}
    assert main.cls in said, main.summary
    assert not (said[main.cls].endswith("*") and main.certainty == "shown"), main.summary


@pytest.mark.parametrize(("name", "evidence", "cls"), SHOWN, ids=[c[0] for c in SHOWN])
def test_shown(name: str, evidence: Bundle, cls: str) -> None:
    main = diagnose_texts(evidence).main
    assert (main.cls, main.certainty) == (cls, "shown"), main.summary
