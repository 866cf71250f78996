# ruff: noqa: E501, RUF005 - evidence stays in one piece, as engines print it
"""Look-alikes: evidence close to a known picture, with the classes that may be said of it.

A class with a star may be said as likely or undetermined only. Each was written against the rules, to catch one of them
certain and wrong.
"""

import pytest

from closeranks.diagnose.judge import diagnose_texts
from tests.diagnose.variants import BUSY, HEAD, LOOP, LOOP_DECODE, LOOP_PREFILL, PD, REDUCE, decode, dump, nccl

V = "VLLM::Worker_TP"
S = "sglang::scheduler_TP"
POLL = ("poll (zmq/sugar/poll.py:106)", "recv_requests (sglang/srt/managers/scheduler.py:1100)")


def g(n: str, v: float, e: str = "0") -> str:
    return f'vllm:{n}{{engine="{e}",model_name="m"}} {v}\n'


def tr(r: int, fr: tuple[str, ...]) -> str:
    return dump(f"python train.py --local-rank={r}", fr, pid=60 + r)


C: list[tuple[str, list[tuple[str, str]], tuple[str, ...]]] = []
UP = "[2026-10-03 {}] The server is fired up and ready to roll!\n"
FAILED = "[2026-10-03 05:30:0{n} TP{r}] Decode transfer failed for request rank={r} decode_req.req.rid='{n}' decode_req.req.bootstrap_room=77{n} with exception KVTransferError(bootstrap_room=77{n}): lost\n"
C.append(
    (
        "a-pair-that-was-restarted-together-and-worked-until-its-link-broke",
        [
            ("prefill/engine.log", UP.format("04:00:00") + UP.format("05:00:02")),
            (
                "decode/engine.log",
                UP.format("04:00:00")
                + decode("04:50:00", more=PD)
                + UP.format("05:00:00")
                + "".join(decode(f"05:1{n}:00", more=PD) for n in range(3))
                + "".join(FAILED.format(n=n, r=n % 2) for n in range(6)),
            ),
        ],
        ("KV_TRANSFER", "NETWORK_OR_TRANSPORT", "UNDETERMINED"),
    )
)
C.append(
    (
        "vllm-fetch-pending",
        [
            ("s.txt", "".join(dump(V + str(i), BUSY, pid=10 + i) for i in range(4))),
            (
                "m.txt",
                g("num_requests_running", 0)
                + g("num_requests_waiting", 0)
                + 'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 3\n',
            ),
        ],
        ("UNDETERMINED", "KV_TRANSFER", "IPC_OR_EXTERNAL_LOST"),
    )
)
m2 = (
    g("num_requests_running", 0)
    + g("num_requests_waiting", 0)
    + 'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 3\n'
    + g("generation_tokens_total", 500)
)
C.append(
    (
        "vllm-fetch-twice",
        [("s.txt", "".join(dump(V + str(i), BUSY, pid=10 + i) for i in range(4))), ("m1.txt", m2), ("m2.txt", m2)],
        ("KV_TRANSFER", "IPC_OR_EXTERNAL_LOST"),
    )
)
C.append(
    (
        "sgl-idle-8",
        [
            (
                "s.txt",
                dump(S + "0", POLL + LOOP) + "".join(dump(S + str(i), HEAD + LOOP, pid=10 + i) for i in range(1, 8)),
            ),
            ("m.txt", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
        ],
        ("HEALTHY_IDLE",),
    )
)
C.append(
    (
        "sgl-idle-missing",
        [
            (
                "s.txt",
                dump(S + "0", POLL + LOOP)
                + "".join(dump(S + str(i), HEAD + LOOP, pid=10 + i) for i in range(1, 8) if i != 5),
            ),
            ("m.txt", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED", "MISSING_PARTICIPANT*"),
    )
)
C.append(
    (
        "pd-two",
        [
            ("p.txt", dump(S + "0", POLL + LOOP_PREFILL) + dump(S + "1", HEAD + LOOP_PREFILL, pid=2)),
            (
                "d.txt",
                dump(S + "0", REDUCE + ("poll_and_all_reduce (disaggregation/utils.py:50)",) + LOOP_DECODE, pid=30)
                + dump(S + "1", HEAD + LOOP_DECODE, pid=31),
            ),
            (
                "d.log",
                "[2026-06-17 21:34:31 TP0] Decode batch, #running-req: 9, #token: 11, token usage: 0.31, pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 4, gen throughput (token/s): 311.20, #queue-req: 0\n[2026-06-17 21:40:31 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
            ),
        ],
        ("DESYNC_DIFFERENT_COLLECTIVE",),
    )
)
C.append(
    (
        "vllm-core-dead",
        [
            (
                "ps.txt",
                "USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND\nroot 1 0.1 0 0 0 ? Ssl 10:00 0:10 vllm serve m --tensor-parallel-size 2\nroot 44 0 0 0 0 ? Z 10:00 0:01 [VLLM::EngineCor] <defunct>\n",
            ),
            ("l.log", 'INFO:     10.0.0.1:5 - "GET /health HTTP/1.1" 200 OK\n' * 4),
        ],
        ("HEALTH_FALSE_OK_ENGINE_DEAD", "CRASH_LOOKS_LIKE_HANG"),
    )
)
C.append(
    (
        "vllm-stopped",
        [
            (
                "ps.txt",
                "USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND\nroot 1 0.1 0 0 0 ? Ssl 10:00 0:10 vllm serve m --tensor-parallel-size 2\nroot 44 0 0 0 0 ? Tl 10:00 0:01 VLLM::Worker_TP1\nroot 43 0 0 0 0 ? Rl 10:00 0:01 VLLM::Worker_TP0\n",
            ),
            (
                "s.txt",
                dump(
                    V + "0",
                    REDUCE
                    + (
                        "forward (vllm/model_executor/models/llama.py:9)",
                        "execute_model (vllm/v1/worker/gpu_worker.py:5)",
                    ),
                    pid=43,
                ),
            ),
        ],
        ("MISSING_PARTICIPANT",),
    )
)
C.append(
    (
        "torch-dataloader",
        [
            (
                "s.txt",
                "".join(
                    tr(
                        i,
                        (
                            "all_reduce (torch/distributed/distributed_c10d.py:2800)",
                            "wrapper (torch/distributed/c10d_logger.py:83)",
                            "step (train.py:50)",
                        ),
                    )
                    for i in (0, 1, 2)
                )
                + tr(
                    3,
                    (
                        "_try_get_data (torch/utils/data/dataloader.py:1250)",
                        "__next__ (torch/utils/data/dataloader.py:700)",
                        "main (train.py:40)",
                    ),
                ),
            )
        ],
        ("MISSING_PARTICIPANT", "DESYNC_DIFFERENT_COLLECTIVE*"),
    )
)
wd = "[rank{r}]:[E617 21:34:31.1 ProcessGroupNCCL.cpp:682] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
C.append(
    (
        "torch-wd-ops",
        [
            (
                "l.log",
                wd.format(r=0, op="ALLREDUCE", n=5)
                + wd.format(r=1, op="ALLREDUCE", n=5)
                + wd.format(r=2, op="BROADCAST", n=5),
            )
        ],
        ("DESYNC_DIFFERENT_COLLECTIVE", "UNDETERMINED"),
    )
)
C.append(
    (
        "torch-wd-size",
        [("l.log", wd.format(r=0, op="_ALLGATHER_BASE", n=512) + wd.format(r=1, op="_ALLGATHER_BASE", n=640))],
        ("DESYNC_SAME_OP_SHAPE_OR_SEQ",),
    )
)
C.append(
    (
        "trt-hang",
        [("l.log", "[06/17/2026-21:34:31] [TRT-LLM] [E] Hang detected on rank 0 in PyExecutor.\n")],
        ("UNDETERMINED", "SYMMETRIC_WAIT", "MISSING_PARTICIPANT"),
    )
)
C.append(
    (
        "vllm-shm-compile",
        [
            (
                "l.log",
                "(EngineCore_DP0 pid=9) INFO 06-17 21:34:31 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).\n",
            )
        ],
        ("UNDETERMINED", "NOT_HUNG_SLOW_OR_CAPACITY*"),
    )
)
C.append(
    (
        "vllm-oom",
        [
            (
                "dmesg.txt",
                "[Wed Jun 17 21:34:31 2026] Out of memory: Killed process 812 (VLLM::Worker_TP) total-vm:1kB, anon-rss:1kB\n",
            ),
            ("s.txt", dump(V + "0", REDUCE + ("execute_model (vllm/v1/worker/gpu_worker.py:5)",))),
        ],
        ("DEAD_PEER",),
    )
)
st = "(APIServer pid=1) INFO 06-17 21:{m:02d}:31 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {g} tokens/s, Running: {r} reqs, Waiting: {w} reqs, GPU KV cache usage: {k}%, Prefix cache hit rate: 0.0%\n"
C.append(
    (
        "vllm-flow",
        [("l.log", "".join(st.format(m=i, g=412.5, r=8, w=900, k=99.1) for i in range(6)))],
        ("NOT_HUNG_SLOW_OR_CAPACITY",),
    )
)
C.append(
    (
        "vllm-stuck-stats",
        [
            (
                "l.log",
                st.format(m=1, g=412.5, r=8, w=0, k=30)
                + "".join(st.format(m=i, g="0.0", r=8, w=3, k=30) for i in range(2, 9)),
            )
        ],
        ("UNDETERMINED", "SYMMETRIC_WAIT", "DEVICE_HANG*"),
    )
)
C.append(
    (
        "vllm-waiting-kv",
        [("l.log", "".join(st.format(m=i, g="0.0", r=0, w=2, k="0.0") for i in range(2, 9)))],
        ("UNDETERMINED", "SCHEDULER_LIVELOCK", "KV_TRANSFER*", "IPC_OR_EXTERNAL_LOST"),
    )
)
C.append(
    (
        "vllm-deferred",
        [
            (
                "l.log",
                "".join(
                    st.format(m=i, g="0.0", r=0, w=0, k="0.0").replace(
                        "Waiting: 0 reqs", "Waiting: 0 reqs, Deferred: 4 reqs"
                    )
                    for i in range(2, 9)
                ),
            )
        ],
        ("UNDETERMINED", "KV_TRANSFER"),
    )
)
C.append(
    (
        "router-502",
        [("r.log", "2026-09-12T02:20:41.100201Z  WARN sglang_router::routers: request failed status=502\n")],
        ("UNDETERMINED", "ROUTER*"),
    )
)
C.append(
    (
        "xid",
        [
            ("dmesg", "[12345.678901] NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus.\n"),
            (
                "s.txt",
                "".join(
                    dump(
                        S + str(i),
                        (
                            "synchronize (torch/cuda/streams.py:200)",
                            "process_batch_result (sglang/srt/managers/scheduler.py:9)",
                        )
                        + LOOP,
                        pid=i + 2,
                    )
                    for i in range(2)
                ),
            ),
        ],
        ("DEVICE_HANG", "DEAD_PEER", "CRASH_LOOKS_LIKE_HANG"),
    )
)
C.append(
    (
        "dynamo-idle",
        [
            (
                "m.txt",
                'dynamo_component_inflight_requests{dynamo_endpoint="generate"} 4\n'
                + g("num_requests_running", 0)
                + g("num_requests_waiting", 0),
            )
        ],
        ("UNDETERMINED", "ROUTER*"),
    )
)
C.append(
    (
        "sgl-retracted",
        [
            ("s.txt", dump(S + "0", POLL + LOOP) + dump(S + "1", HEAD + LOOP, pid=9)),
            (
                "m.txt",
                'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\nsglang:num_retracted_reqs{tp_rank="0"} 2.0\n',
            ),
        ],
        ("UNDETERMINED", "KV_TRANSFER*"),
    )
)
C.append(
    (
        "sgl-gloo-reset",
        [
            (
                "l.log",
                "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:33411\n",
            )
        ],
        ("DEAD_PEER",),
    )
)
w = "[2026-06-17 21:{m:02d}:31] DetokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)\n"
b = "[2026-06-17 21:{m:02d}:41 TP0] Decode batch, #running-req: {r}, #token: 900, token usage: 0.31, gen throughput (token/s): {g}, #queue-req: 0\n"
C.append(
    (
        "fp-then-stop",
        [("l.log", "".join(w.format(m=i) + (b.format(m=i, r=9, g=100.5) if i < 3 else "") for i in range(1, 9)))],
        ("UNDETERMINED", "HEALTHY_WATCHDOG_FALSE_POSITIVE*"),
    )
)
C.append(
    (
        "fp-other-file",
        [
            ("d.log", "".join(w.format(m=i) for i in range(1, 9))),
            ("p.log", "".join(b.format(m=i, r=3, g=80.1) for i in range(1, 10))),
        ],
        ("UNDETERMINED", "HEALTHY_WATCHDOG_FALSE_POSITIVE*", "NOT_HUNG_SLOW_OR_CAPACITY"),
    )
)
C.append(
    (
        "hard-wd-flow",
        [
            (
                "l.log",
                b.format(m=1, r=9, g=100.5)
                + "[2026-06-17 21:02:31 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
                + b.format(m=3, r=9, g=90.2)
                + b.format(m=4, r=9, g=90.2),
            )
        ],
        ("HEALTHY_WATCHDOG_FALSE_POSITIVE*", "UNDETERMINED", "NOT_HUNG_SLOW_OR_CAPACITY"),
    )
)
C.append(
    (
        "grammar-done",
        [
            (
                "l.log",
                "Compiling FSM index for all state transitions: 100%|██████████| 50/50 [00:02<00:00, 20.1it/s]\n"
                + b.format(m=3, r=9, g=90.2)
                + b.format(m=4, r=9, g=90.2),
            )
        ],
        ("NOT_HUNG_SLOW_OR_CAPACITY", "FRONTEND_OR_CPU_BOUND*", "UNDETERMINED"),
    )
)
C.append(
    (
        "paused-then-error",
        [
            ("s.txt", dump(S + "0", POLL + LOOP)),
            (
                "l.log",
                "[2026-06-17 21:02:31] Generation paused by pause_generation\n[2026-06-17 21:02:31 TP0] Scheduler hit an exception: Traceback (most recent call last):\nValueError: x\n",
            ),
            ("m.txt", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
        ],
        ("CRASH_LOOKS_LIKE_HANG", "UNDETERMINED", "HEALTHY_IDLE*"),
    )
)
C.append(
    (
        "idle-decode-only-gauged",
        [
            ("p.txt", dump(S + "0", POLL + LOOP_PREFILL) + dump(S + "1", HEAD + LOOP_PREFILL, pid=2)),
            ("d.txt", dump(S + "0", POLL + LOOP_DECODE, pid=30) + dump(S + "1", HEAD + LOOP_DECODE, pid=31)),
            (
                "m.txt",
                'sglang:num_running_reqs{engine_type="decode",tp_rank="0"} 0.0\nsglang:num_queue_reqs{engine_type="decode",tp_rank="0"} 0.0\n',
            ),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED"),
    )
)
C.append(
    (
        "idle-dp-one-busy",
        [
            (
                "s.txt",
                dump("sglang::scheduler_DP0_TP0", POLL + LOOP) + dump("sglang::scheduler_DP1_TP0", POLL + LOOP, pid=4),
            ),
            (
                "m.txt",
                'sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 0.0\nsglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 0.0\nsglang:num_running_reqs{dp_rank="1",tp_rank="0"} 2.0\n',
            ),
        ],
        ("IPC_OR_EXTERNAL_LOST*", "UNDETERMINED"),
    )
)
C.append(
    (
        "idle-metrics-of-two-engines-same-labels",
        [
            ("s.txt", dump(S + "0", POLL + LOOP_DECODE) + dump(S + "1", HEAD + LOOP_DECODE, pid=9)),
            ("m_a.txt", 'sglang:num_running_reqs{tp_rank="0"} 5.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
            ("m_b.txt", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED", "IPC_OR_EXTERNAL_LOST*"),
    )
)
C.append(
    (
        "old-sgl-running",
        [("s.txt", dump(S + "0", POLL + LOOP)), ("l.log", b.format(m=1, r=9, g=0.0))],
        ("IPC_OR_EXTERNAL_LOST*", "UNDETERMINED"),
    )
)
C.append(
    (
        "busy-gpu-idle",
        [
            ("s.txt", dump(S + "0", POLL + LOOP)),
            ("m.txt", 'sglang:num_running_reqs{tp_rank="0"} 0.0\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
            ("g.csv", "index, utilization.gpu [%], power.draw [W]\n0, 100 %, 120.00 W\n"),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED", "DEVICE_HANG*"),
    )
)
C.append(
    (
        "nan-gauge",
        [
            ("s.txt", dump(S + "0", POLL + LOOP)),
            ("m.txt", 'sglang:num_running_reqs{tp_rank="0"} NaN\nsglang:num_queue_reqs{tp_rank="0"} 0.0\n'),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED"),
    )
)
C.append(
    (
        "vllm-idle-core-only",
        [
            (
                "s.txt",
                dump(
                    "VLLM::EngineCore",
                    (
                        "wait (threading.py:331)",
                        "get (queue.py:171)",
                        "_process_input_queue (vllm/v1/engine/core.py:900)",
                        "run_busy_loop (vllm/v1/engine/core.py:880)",
                    ),
                    pid=3,
                ),
            ),
            ("m.txt", g("num_requests_running", 0) + g("num_requests_waiting", 0)),
            ("h.log", 'INFO:     10.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'),
        ],
        ("HEALTHY_IDLE*", "UNDETERMINED", "CRASH_LOOKS_LIKE_HANG*"),
    )
)
C.append(
    (
        "trt-active-idle",
        [
            (
                "l.log",
                "[06/17/2026-21:34:31] [TRT-LLM] [I] iter = 1, has 3 active_requests, scheduled 0 context requests and 0 generation requests\n"
                * 3,
            )
        ],
        ("SCHEDULER_LIVELOCK*", "UNDETERMINED", "KV_TRANSFER*"),
    )
)
C.append(
    (
        "no-room",
        [
            (
                "l.log",
                b.format(m=1, r=9, g=50.5)
                + "[2026-06-17 21:01:50 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 700\n"
                + b.format(m=2, r=8, g=50.1)
                + b.format(m=3, r=8, g=50.1),
            )
        ],
        ("NOT_HUNG_SLOW_OR_CAPACITY", "UNDETERMINED"),
    )
)
C.append(
    (
        "wd-diff-groups",
        [
            (
                "l.log",
                wd.format(r=0, op="ALLREDUCE", n=5).replace("[Rank 0]", "[PG ID 1 PG GUID 2(tp) Rank 0]")
                + wd.format(r=1, op="ALLGATHER", n=9).replace("[Rank 1]", "[PG ID 3 PG GUID 5(ep) Rank 1]"),
            )
        ],
        ("UNDETERMINED", "DESYNC_DIFFERENT_COLLECTIVE*", "MISSING_PARTICIPANT*", "SYMMETRIC_WAIT*"),
    )
)
C.append(
    (
        "seq-differs",
        [
            (
                "l.log",
                wd.format(r=0, op="ALLREDUCE", n=5)
                + wd.format(r=1, op="ALLREDUCE", n=5).replace("SeqNum=77", "SeqNum=78"),
            )
        ],
        ("UNDETERMINED", "DESYNC_SAME_OP_SHAPE_OR_SEQ*", "MISSING_PARTICIPANT*"),
    )
)
C.append(
    (
        "send-recv",
        [("l.log", wd.format(r=0, op="SEND", n=5) + wd.format(r=1, op="RECV", n=5))],
        ("UNDETERMINED", "SYMMETRIC_WAIT*", "UNMATCHED_COLLECTIVE_OR_P2P*", "NETWORK_OR_TRANSPORT*", "PP_STALL*"),
    )
)
POLLED = REDUCE + (
    "poll_and_all_reduce (disaggregation/utils.py:50)",
    "pop_transferred (disaggregation/decode.py:1400)",
)
STILL = "".join(
    f"Name:\tsglang::schedul\nState:\tS (sleeping)\nPid:\t{pid}\nvoluntary_ctxt_switches:\t900\nnonvoluntary_ctxt_switches:\t7\n"
    for pid in (30, 31)
)
SIZES = '{{"version": "2.10", "pg_config": {{"0": {{"name": "0", "desc": "tp", "ranks": "[0, 1]"}}}}, "entries": [{{"record_id": 1, "pg_id": 0, "process_group": ["0", "tp"], "collective_seq_id": 41, "p2p_seq_id": 0, "op_id": 41, "profiling_name": "gloo:all_reduce", "time_created_ns": 1, "input_sizes": [[{n}]], "input_dtypes": ["Int"], "output_sizes": [[{n}]], "output_dtypes": ["Int"], "state": "scheduled", "is_p2p": false, "retired": false}}]}}\n'
AHEAD = dump(S + "0", HEAD + LOOP_DECODE, pid=30) + dump(S + "1", POLLED + LOOP_DECODE, pid=31)
# gloo lets the rank with fewer elements pass: it may have skipped the poll, or polled with another length.
C.append(
    (
        "ahead-of-a-poll",
        [("s1.txt", AHEAD), ("s2.txt", AHEAD), ("p1.txt", STILL), ("p2.txt", STILL)],
        ("DESYNC_DIFFERENT_COLLECTIVE*", "DESYNC_SAME_OP_SHAPE_OR_SEQ*"),
    )
)
C.append(
    (
        "ahead-of-a-poll-with-recorder",
        [
            ("s1.txt", AHEAD),
            ("s2.txt", AHEAD),
            ("p1.txt", STILL),
            ("p2.txt", STILL),
            ("nccl_trace_rank_0", SIZES.format(n=2)),
            ("nccl_trace_rank_1", SIZES.format(n=4)),
        ],
        ("DESYNC_SAME_OP_SHAPE_OR_SEQ",),
    )
)


def proc(*readings: tuple[int, int]) -> str:
    return "".join(
        f"Name:\tsglang::schedul\nState:\tS (sleeping)\nPid:\t{pid}\nvoluntary_ctxt_switches:\t{n}\nnonvoluntary_ctxt_switches:\t7\n"
        for pid, n in readings
    )


WRITING = REDUCE + (
    "writing_check (sglang/srt/mem_cache/hiradix_cache.py:802)",
    "check_hicache_events (sglang/srt/mem_cache/hiradix_cache.py:1141)",
)
STANDS = dump(S + "0", HEAD + LOOP_DECODE, pid=30) + dump(S + "1", WRITING + LOOP_DECODE, pid=31)
TURNS = dump(S + "0", POLL + LOOP_PREFILL, pid=40) + dump(S + "1", HEAD + LOOP_PREFILL, pid=41)
# A peer whose loop turns takes no certainty from an engine that stands, and gives none to one that does not.
C.append(
    (
        "stands-beside-a-live-peer",
        [
            ("decode/s1.txt", STANDS), ("decode/s2.txt", STANDS), ("prefill/s1.txt", TURNS), ("prefill/s2.txt", TURNS),
            ("p1.txt", proc((30, 900), (31, 900), (40, 900), (41, 900))),
            ("p2.txt", proc((30, 900), (31, 900), (40, 9000), (41, 9000))),
        ],
        ("DESYNC_DIFFERENT_COLLECTIVE",),
    )
)  # fmt: skip
C.append(
    (
        "turns-beside-a-peer-that-stands",
        [
            ("decode/s1.txt", STANDS), ("decode/s2.txt", STANDS), ("prefill/s1.txt", TURNS), ("prefill/s2.txt", TURNS),
            ("p1.txt", proc((30, 900), (31, 900), (40, 900), (41, 900))),
            ("p2.txt", proc((30, 9000), (31, 9000), (40, 900), (41, 900))),
        ],
        ("UNDETERMINED", "HEALTHY_IDLE*", "NOT_HUNG_SLOW_OR_CAPACITY*"),
    )
)  # fmt: skip
two = [
    ("prefill/m1.txt", g("generation_tokens_total", 40) + g("num_requests_running", 0)),
    ("prefill/m2.txt", g("generation_tokens_total", 40) + g("num_requests_running", 0)),
    ("decode/m1.txt", g("generation_tokens_total", 9000) + g("num_requests_running", 2)),
    ("decode/m2.txt", g("generation_tokens_total", 9000) + g("num_requests_running", 2)),
]
C.append(("two-vllm-with-the-same-labels", two, ("UNDETERMINED", "KV_TRANSFER*", "SYMMETRIC_WAIT*")))

LEAVING = ("_shutdown (threading.py:1590)", "BaseProcess._bootstrap (multiprocessing/process.py:332)")
RAISED = """[2026-11-20 22:33:30 TP0] Decode batch, #running-req: 36, #token: 18432, token usage: 0.01, gen throughput (token/s): 1627.20, #queue-req: 0
[2026-11-20 22:33:31 TP2] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 259, in run_scheduler_process
    scheduler.event_loop_normal_disagg_decode()
ValueError: token id 151936 is outside the vocabulary
"""
FORWARD = REDUCE + (
    "tensor_model_parallel_all_reduce (sglang/srt/layers/model.py:45)",
    "forward (sglang/srt/layers/model.py:38)",
)
LEFT = "".join(dump(S + str(i), FORWARD + LOOP_DECODE, pid=30 + i) for i in range(2)) + dump(S + "2", LEAVING, pid=32)
# A rank whose interpreter shuts down after an error is no rank that merely stays away from a collective.
C.append(("left-after-an-error", [("s.txt", LEFT), ("engine.log", RAISED)], ("CRASH_LOOKS_LIKE_HANG",)))

FAR = [("w.log", "".join(nccl(r, 512, "ALLGATHER") for r in range(7)) + nccl(7, 77, "BROADCAST"))]
C.append(("seven-agree-and-one-timed-out-elsewhere", FAR, ("UNDETERMINED", "MISSING_PARTICIPANT*", "DESYNC_DIFFERENT_COLLECTIVE*")))  # fmt: skip
FAR = [("w.log", "".join(nccl(r, 512, "ALLGATHER") for r in range(7)) + nccl(7, 511, "ALLGATHER"))]
C.append(("seven-agree-and-one-is-an-operation-behind", FAR, ("UNDETERMINED", "MISSING_PARTICIPANT*", "DESYNC_SAME_OP_SHAPE_OR_SEQ*")))  # fmt: skip
ALIKE = "".join(nccl(r, 512, "ALLGATHER") for r in range(4)) + "".join(nccl(r, 77, "ALLREDUCE") for r in range(4, 8))
C.append(("two-groups-that-agree-each", [("w.log", ALIKE)], ("SYMMETRIC_WAIT*", "UNDETERMINED")))

PREFILL = "[2026-10-03 05:{:02}:07{}] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0, token usage: 0.1{}, #running-req: {}, #queue-req: 2{}\n"


def chunks(n: int, rank: str = " TP0", running: int = 0, more: str = "") -> str:
    return "".join(PREFILL.format(i, rank, 8192, i % 10, running, more) for i in range(n))


UNWELL = "[2026-10-03 05:{:02}:50] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:00:30. last_heartbeat time: 05:00:07\n"
C.append(("a-prompt-that-is-taken-in-for-minutes", [("s.log", chunks(7))], ("NOT_HUNG_SLOW_OR_CAPACITY*",)))
C.append(
    (
        "a-prompt-that-is-taken-in-while-probes-fail",
        [("s.log", "".join(c + "\n" + UNWELL.format(i) for i, c in enumerate(chunks(7).split("\n")[:-1])))],
        ("NOT_HUNG_SLOW_OR_CAPACITY*", "HEALTHY_WATCHDOG_FALSE_POSITIVE*"),
    )
)
C.append(("prefill-goes-on-and-what-runs-makes-no-token", [("s.log", decode("04:59:00") + chunks(7, running=5))], ("UNDETERMINED",)))  # fmt: skip
C.append(("prefill-of-a-pair-goes-on", [("s.log", chunks(7, more=", #inflight-req: 0"))], ("UNDETERMINED",)))
C.append(("prefill-of-a-pair-goes-on-by-its-name", [("prefill/s.log", chunks(7))], ("UNDETERMINED",)))
C.append(("two-chunks-and-silence", [("s.log", chunks(2) + UNWELL.format(30))], ("UNDETERMINED",)))


@pytest.mark.parametrize(("name", "evidence", "allowed"), C, ids=[c[0] for c in C])
def test_look_alike(name: str, evidence: list[tuple[str, str]], allowed: tuple[str, ...]) -> None:
    main = diagnose_texts(evidence).main
    said = {a.rstrip("*"): a for a in allowed}
    assert main.cls in said, main.summary
    assert not (said[main.cls].endswith("*") and main.certainty == "shown")


def test_what_prefill_takes_in_says_nothing_of_decode() -> None:
    """A prefill engine goes on while decode makes no token: its counters are no sign that the pair works."""
    labels = '{engine_type="prefill",mode="prefill_compute",model_name="m",tp_rank="0"}'
    scrapes = [
        (f"prefill-{n}.prom", f"sglang:realtime_tokens_total{labels} {count}\nsglang:num_running_reqs{labels} 0.0\n")
        for n, count in ((1, 4096.0), (2, 9216.0))
    ]
    assert diagnose_texts(scrapes).main.cls == "UNDETERMINED"


def test_a_rank_that_timed_out_elsewhere_is_named() -> None:
    found = diagnose_texts([("w.log", "".join(nccl(r, 512, "ALLGATHER") for r in range(7)) + nccl(7, 77, "BROADCAST"))])
    assert found.main.missing == ["rank 7"]
    assert "rank 7 in broadcast #77" in found.main.summary
    assert not any("no desync" in f.summary for f in found.findings)
    sizes = "".join(nccl(r, 512, "ALLREDUCE", numel=64 if r else 32) for r in range(8))
    assert [f.rule for f in diagnose_texts([("w.log", sizes)]).findings] == ["different_size"]


GDB = """Thread 1 (Thread 0x7f62c114b740 (LWP 2100) "python3"):
#0  __futex_abstimed_wait_common64 () at ./nptl/futex-internal.c:57
#1  std::future<void>::get() ()
#2  tensorrt_llm::batch_manager::CacheTransceiver::checkGenTransferStatus(std::optional<int> const&) () from libtensorrt_llm.so
"""
SENDER = "[04/02/2026-08:20:20] [TRT-LLM] [E] Exception in CacheSender: [TensorRT-LLM][ERROR] Assertion failed: Couldn't find the requested block in the reuse tree (/x/kvCacheUtils.h:84)\n"
ITER = "[04/02/2026-{}] [TRT-LLM] [I] iter = 900, global_rank = 0, rank = 0, num_scheduled_requests: 3\n"


def test_a_wait_for_a_transfer_says_only_what_is_in_evidence() -> None:
    """What its sender did, and what would help, is said only where a line of it shows that."""
    alone = diagnose_texts([("gdb.txt", GDB)]).main
    assert (alone.cls, alone.certainty, alone.rule) == ("KV_TRANSFER", "likely", "waits_for_transfer")
    assert alone.mechanism.startswith("undetermined")
    assert not alone.workaround
    logged = diagnose_texts([("ctx.log", SENDER)]).main
    assert (logged.rule, logged.certainty) == ("sender_died", "likely")
    assert "wait" not in logged.summary
    both = diagnose_texts([("ctx.log", SENDER + ITER.format("08:20:21")), ("gdb.txt", GDB)]).main
    assert (both.rule, both.certainty) == ("sender_died", "shown")
    later = diagnose_texts([("ctx.log", SENDER), ("gen.log", ITER.format("11:40:00")), ("gdb.txt", GDB)])
    assert (later.main.rule, later.main.certainty) == ("waits_for_transfer", "likely")
    assert not any("12542" in k.id for f in later.findings for k in f.known_issues)
