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
]  # fmt: skip

SHOWN: list[tuple[str, Bundle, str]] = [
    ("a-stall-after-the-last-token", [("engine.log.1", flow("03", 9)), ("engine.log", decode("05:01:40") + HUNG), ("s.txt", APART)], DESYNC),
    ("silence-of-a-log-that-is-written-every-ten-seconds", [("engine.log", "".join(decode(f"09:00:{s}", run=16) for s in (10, 20, 30, 40)) + "[2026-10-03 09:09:40] INFO:     10.0.0.9:1 - \"POST /generate HTTP/1.1\" 200 OK\n"), ("s.txt", APART)], DESYNC),
    ("the-gil-twice", [("s1.txt", gil("3.12.3")), ("s2.txt", gil("3.12.3"))], "GIL_DEADLOCK"),
    ("nobody-can-give-the-gil-up", [("s.txt", gil("3.11.9"))], "GIL_DEADLOCK"),
    ("loads-a-module-beside-a-spinning-device", [("s.txt", ONE_LOADS), ("smi.csv", smi((98, 150), (0, 70)))], "HOST_DEVICE_INTERLOCK"),
    ("asks-a-peer-and-tokens-come-slowly", [("s.txt", ENTRY_ASKS), ("d.log", decode("08:00:01", gen=1900.2) + "".join(decode(f"08:00:{s}", gen=88.1) for s in (10, 20, 30)))], "FRONTEND_OR_CPU_BOUND"),
    ("asks-a-peer-in-two-dumps", [("s1.txt", ENTRY_ASKS), ("s2.txt", ENTRY_ASKS)], "FRONTEND_OR_CPU_BOUND"),
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
