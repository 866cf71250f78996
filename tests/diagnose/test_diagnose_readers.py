# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""Readers: what each takes out of its format, and that none of them can be made to raise."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.diagnose.collect import collect
from closeranks.diagnose.facts import (
    Collective,
    Event,
    Fact,
    Gpu,
    Kernel,
    Metric,
    Process,
    Ras,
    Setting,
    Stack,
    StackFailed,
)
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.readers import document_readers, line_readers
from closeranks.diagnose.scene import Scene
from closeranks.evidence.bundle import from_texts
from tests.diagnose.variants import LOOP_PREFILL, dump


def read(text: str | bytes, name: str = "x.log") -> list[Fact]:
    return collect(from_texts([(name, text)])).facts


def one(text: str | bytes, kind: type, name: str = "x.log"):
    found = [f for f in read(text, name) if isinstance(f, kind)]
    assert len(found) == 1, found
    return found[0]


def test_pyspy_text_with_locals_ansi_and_qualified_names() -> None:
    text = (
        "\x1b[1mProcess 31: sglang::scheduler_DP1_TP3_EP3\x1b[0m\nPython v3.12.3 (/usr/bin/python3.12)\n\n"
        'Thread 31 (active+gil): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:3075)\n'
        "        Arguments:\n            tensor: <Tensor at 0x7f>\n        Locals:\n"
        '            prompt: "tell me (secret.py:1)"\n    Sched.step (scheduler.py:12)\n    gloo::f(int, char (*)()) (libgloo.so)\n'
        "    0x7f25fa01d71 (libc.so.6)\n"
    )
    stack = one(text, Stack)
    assert stack.who.label == "DP1 TP3"
    assert stack.who.ep == 3
    assert [f.name for f in stack.main.frames] == ["all_reduce", "step", "gloo::f", "0x7f25fa01d71"]
    assert (stack.src.file, stack.src.line, stack.pid) == ("x.log", 1, 31)
    assert stack.main.gil
    assert "secret" not in stack.says()


def test_two_processes_in_one_log_and_a_dump_cut_inside_a_frame() -> None:
    text = (
        "[2026-06-05 04:12:31 TP0] Pyspy dump for PID 7:\nProcess 7: sglang::scheduler_TP0\n"
        'Thread 7 (idle): "MainThread"\n    broadcast (torch/distributed/distributed_c10d.py:1)\n\n'
        "[2026-06-05 04:12:32 TP1] Decode batch, #running-req: 3, #token: 5, gen throughput (token/s): 1.0, #queue-req: 0\n"
        '[2026-06-05 04:12:32 TP1] Pyspy dump for PID 8:\nThread 8 (idle): "MainThread"\n    broadcast (torch/distri'
    )
    stacks = [f for f in read(text) if isinstance(f, Stack)]
    assert [(s.who.label, s.pid) for s in stacks] == [("TP0", 7), ("TP1", 8)]
    assert stacks[0].time is not None


def test_pyspy_json_back_to_back_finds_main_by_name() -> None:
    def process(pid: int) -> str:
        frames = [
            {
                "name": "wait",
                "filename": "/x/threading.py",
                "module": None,
                "short_filename": "threading.py",
                "line": 3,
                "locals": [{"name": "key", "repr": "'sk-abcdefghijklmnop'"}],
                "is_entry": True,
            }
        ]
        threads = [
            {"pid": pid, "thread_id": 1, "thread_name": "tqdm_monitor", "os_thread_id": 9, "active": False, "owns_gil": False, "frames": frames, "process_info": None},
            {"pid": pid, "thread_id": 2, "thread_name": "MainThread", "os_thread_id": pid, "active": True, "owns_gil": True, "frames": frames, "process_info": {"pid": pid, "command_line": "sglang::scheduler_TP1", "parent": None}},
        ]  # fmt: skip
        return json.dumps(threads, indent=2)

    stacks = [f for f in read(process(5) + "\n" + process(6)) if isinstance(f, Stack)]
    assert [s.pid for s in stacks] == [5, 6]
    assert all(s.main.name == "MainThread" and s.who.label == "TP1" for s in stacks)


def test_faulthandler_and_traceback() -> None:
    text = 'Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n  File "/a/threading.py", line 3 in wait\n\nCurrent thread 0x00008f (most recent call first):\n  File "/a/distributed_c10d.py", line 9 in all_reduce\n  File "<string>", line 1 in <module>\n'
    stack = one(text, Stack)
    assert stack.tool == "faulthandler"
    assert stack.main.frames[0].name == "all_reduce"


def test_a_rank_without_a_role_belongs_to_the_engine_whose_dumps_it_lies_among() -> None:
    """A rank that shuts down shows no event loop; its label must be free in that engine."""
    shutdown = ("_shutdown (threading.py:1590)",)
    text = dump("sglang::scheduler_TP0", LOOP_PREFILL, 1) + dump("sglang::scheduler_TP1", shutdown, 2)
    (engine,) = Scene(read(text), ["x.txt"]).engines
    assert (engine.name, list(engine.ranks)) == ("prefill", ["TP0", "TP1"])
    text += dump("sglang::scheduler_TP0", shutdown, 3)
    assert [(e.name, list(e.ranks)) for e in Scene(read(text), ["x.txt"]).engines] == [
        ("prefill", ["TP0", "TP1"]),
        ("", ["TP0"]),
    ]


def test_watchdog_status_and_group() -> None:
    text = (
        "[rank3]:[E822 16:31:16.135435629 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5729, OpType=_REDUCE_SCATTER_BASE, NumelIn=36, NumelOut=3, Timeout(ms)=600000) ran for 600008 milliseconds before timing out.\n"
        "[rank3]:[E822 16:31:16.2 ProcessGroupNCCL.cpp:2271] [PG ID 4 PG GUID 67(tp) Rank 3]  failure detected by watchdog at work sequence id: 5729 PG status: last enqueued work: 6464, last completed work: 5728\n"
    )
    c = one(text, Collective)
    assert (c.op, c.seq, c.numel_in, c.numel_out, c.who.rank) == ("reducescatter", 5729, 36, 3, 3)


@pytest.mark.parametrize("as_pickle", [True, False])
def test_flight_recorder(as_pickle: bool) -> None:
    dump = {
        "version": "2.10", "comm_lib_version": "2.28.9", "pg_config": {"1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"}},
        "pg_status": {"1": {"last_enqueued_collective": "9", "last_started_collective": "9", "last_completed_collective": "8"}},
        "entries": [{"frames": [{"name": "all_reduce", "filename": "x.py", "line": 1}], "process_group": ("1", "tp"), "collective_seq_id": 9, "p2p_seq_id": 0, "profiling_name": "gloo:all_reduce", "input_sizes": [[4, 8]], "output_sizes": [[4, 8]], "state": "started", "is_p2p": False, "timeout_ms": 5}],
    }  # fmt: skip
    data = pickle.dumps(dump) if as_pickle else json.dumps(dump)
    c = one(data, Collective, "nccl_trace_rank_5")
    assert (c.op, c.seq, c.numel_in, c.group, c.who.rank, c.state) == ("allreduce", 9, 32, "tp 1", 5, "started")


def test_a_cut_recorder_file_gives_what_is_whole() -> None:
    entry = {
        "process_group": ["1", "tp"],
        "collective_seq_id": 9,
        "profiling_name": "nccl:broadcast",
        "state": "started",
        "is_p2p": False,
    }
    text = json.dumps({"version": "2.10", "entries": [entry, entry]}, indent=1)
    assert one(text[: len(text) * 3 // 4], Collective).op == "broadcast"


def test_ras_blocks_and_json() -> None:
    text = "#0-0 (3c1f) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n  127 ranks have launched up to operation 51877\n  1 rank has launched up to operation 51876\n  Rank 73 -- GPU 1 managed by process 1 on node 10.0.4.19\n"
    r = one(text, Ras)
    assert (r.status, r.op, r.counts, r.minority) == ("MISMATCH", "AllReduce", ((127, 51877), (1, 51876)), (73,))
    doc = {
        "nccl_version": "2.29.1",
        "communicators": [
            {
                "hash": "ab",
                "size": 2,
                "ranks_count": 2,
                "missing_ranks_count": 0,
                "ranks": [
                    {"rank": 0, "collective_counts": {"AllReduce": 5}},
                    {"rank": 1, "collective_counts": {"AllReduce": 4}},
                ],
            }
        ],
    }
    assert one(json.dumps(doc), Ras).status == "MISMATCH"


def test_two_scrapes_and_kept_labels() -> None:
    text = 'vllm:generation_tokens_total{engine="0",model_name="my/secret-model"} 5.0\n' * 2
    found = [f for f in read(text) if isinstance(f, Metric)]
    assert [m.scrape for m in found] == [0, 1]
    assert found[0].labels == {"engine": "0"}


@pytest.mark.parametrize("asked", ['"2026-11-29T22:30:38.5+00:00"', "1795991438.5", '"2026-11-29T22:30:38.5"'])
def test_loads_age_is_that_of_the_snapshot_in_either_form_of_the_outer_time(asked: str) -> None:
    load = one(
        f'{{"timestamp": {asked}, "loads": [{{"timestamp": 1795991398.5, "dp_rank": 0, "num_running_reqs": 2}}]}}',
        Event,
    )
    assert (load.get("age"), load.get("num_running_reqs")) == (40.0, 2)
    odd = one('{"timestamp": "soon", "loads": [{"timestamp": 5, "dp_rank": 0}]}', Event)
    assert odd.get("age") is None


def test_nvidia_smi_forms() -> None:
    rows = [
        f
        for f in read("index, utilization.gpu [%], power.draw [W]\n0, 97 %, 71.5 W\n1, 0 %, [N/A]\n")
        if isinstance(f, Gpu)
    ]
    assert [(g.index, g.util, g.power) for g in rows] == [("0", 97.0, 71.5), ("1", 0.0, None)]
    plain = one("| N/A   42C    P0   118W / 700W |  40100MiB / 81559MiB |    100%      Default |\n", Gpu)
    assert (plain.util, plain.power, plain.power_limit) == (100.0, 118.0, 700.0)


def test_ps_proc_dmesg_and_events() -> None:
    ps = [
        f
        for f in read(
            "  PID STAT COMMAND\n 4411 Sl   sglang::scheduler_TP0\n   12 Z    [VLLM::EngineCor] <defunct>\n   13 S    bash --api-key=sk-secretsecretsecret\n"
        )
        if isinstance(f, Process)
    ]
    assert [(p.pid, p.state) for p in ps] == [(4411, "Sl"), (12, "Z")]
    status = "Name:\tsglang::sched\nState:\tS (sleeping)\nPid:\t7\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t4\n"
    proc = [f for f in read(status.format(10) + status.format(10)) if isinstance(f, Process)]
    assert [(p.switches_total, p.forced_total) for p in proc] == [(10, 4), (10, 4)]
    kill = one("[88.2] Memory cgroup out of memory: Killed process 4418 (sglang::schedul) total-vm:6kB\n", Event)
    assert (kill.kind, kill.get("pid")) == ("oom_kill", 4418)


@pytest.mark.parametrize(
    ("state", "ticks", "stands"),
    [("S (sleeping)", 5, True), ("S (sleeping)", 95, False), ("R (running)", 5, False)],
    ids=["sleeps", "computes", "waits for a CPU"],
)
def test_a_main_thread_without_switches_stands_only_if_it_does_not_compute(
    state: str, ticks: int, stands: bool
) -> None:
    def reading(ran: int) -> str:
        status = f"Name:\tsglang::schedul\nState:\t{state}\nPid:\t30\nvoluntary_ctxt_switches:\t9\nnonvoluntary_ctxt_switches:\t7\n"
        stat = (
            f"30 (sglang::schedul) S 1 2 3 0 -1 4194304 98 0 0 0 {ran} 0 0 0 20 0 1 0 1649057 {' '.join(['0'] * 30)}\n"
        )
        return (
            f"==> /proc/30/status <==\n{status}\n==> /proc/30/task/30/stat <==\n{stat}\n==> /proc/30/stat <==\n{stat}"
        )

    facts = read(reading(5) + reading(ticks))
    assert len([f for f in facts if isinstance(f, Process) and f.ticks_total is not None]) == 2
    assert bool(Scene(facts, []).stalls) is stands


def test_cuda_gdb_gdb_and_failed_dumps() -> None:
    text = "(cuda-gdb) info cuda kernels\n  Kernel Parent Dev Grid Status   SMs Mask   GridDim  BlockDim Invocation\n*      0      -   1 77120 Active 0xffffffff (512,6,1) (128,1,1) fuse_kernel<2, float>()\n=> 0x7f: SYNCS.PHASECHK.TRANS64.TRYWAIT P0\n"
    kernels = [f for f in read(text) if isinstance(f, Kernel)]
    assert kernels[-1] == Kernel(src=kernels[-1].src, device="1", name="fuse_kernel", spinning=True)
    bt = 'Thread 2 (Thread 0x7f (LWP 11) "python3"):\n#0  0x00007f in __poll () from libc.so.6\nThread 1 (Thread 0x7f (LWP 10) "python3"):\n#0  std::future<void>::get() ()\n'
    assert one(bt, Stack).main.frames[0].name == "std::future<void>::get"
    assert (
        one("[2026-08-04 13:16:11 TP0] Pyspy failed (py-spy dump --native --pid 640). Error: x\n", StackFailed).pid
        == 640
    )


def test_flags_env_versions_and_no_keys() -> None:
    text = "HF_TOKEN=hf_aaaaaaaaaaaaaaaaaaaa SGLANG_REQ_WAITING_TIMEOUT=10 python -m sglang.launch_server --tp 8 --api-key sk-aaaaaaaaaaaaaaaa --model-path /data/customer-x --enable-hierarchical-cache\nsglang is using nccl==2.28.9\n"
    found = {(s.kind, s.name, s.value) for s in read(text) if isinstance(s, Setting)}
    assert ("flag", "tp", "8") in found
    assert ("env", "SGLANG_REQ_WAITING_TIMEOUT", "10") in found
    assert ("version", "nccl", "2.28.9") in found
    assert not [f for f in found if "sk-" in str(f) or "hf_" in str(f) or "customer" in str(f)]


def test_interleaved_ranks_keep_their_tracebacks_apart() -> None:
    text = '[2026-01-01 00:00:01 TP3] Scheduler hit an exception: Traceback (most recent call last):\n  File "/x/y.py", line 3, in run_batch\ntorch.OutOfMemoryError: CUDA out of memory.\n'
    events = [e for e in read(text) if isinstance(e, Event) and e.kind == "exception"]
    assert [(e.who.label, e.get("cause")) for e in events] == [("TP3", "cuda_oom")]


def test_an_exception_of_a_native_module_keeps_its_lower_case_name() -> None:
    text = '[2026-01-01 00:00:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n  File "/x/y.py", line 3, in create_backend\nnixl_cu12._bindings.nixlBackendError: NIXL_ERR_BACKEND\n'
    events = [e for e in read(text) if isinstance(e, Event) and e.kind == "exception"]
    assert [(e.who.label, e.get("type")) for e in events] == [("TP1", "nixlBackendError")]
    assert not [e for e in read("see app.parseError: it is no traceback\n") if isinstance(e, Event)]


def test_series_that_differ_in_a_label_that_is_not_kept_are_no_growth() -> None:
    page = "".join(
        f'sglang:generation_tokens_total{{engine_type="decode",is_streaming="{s}",model_name="m"}} {n}\n'
        for s, n in (("false", 15), ("true", 82))
    )
    assert [d for _, d in Scene(read(page + page), [], []).counter_deltas] == [0.0, 0.0]


def test_a_transfer_that_ended_with_its_request_has_not_failed() -> None:
    said = "[2026-01-01 00:00:01 TP1] Prefill bootstrap failed for request rank=1 req.rid='a' req.bootstrap_room=7 with exception KVTransferError(bootstrap_room=7): "
    kinds = [e.kind for e in read(said + "Aborted by AbortReq.\n" + said + "no route\n") if isinstance(e, Event)]
    assert kinds == ["transfer_aborted", "transfer_failed"]


def test_what_a_prompt_says_is_no_evidence() -> None:
    text = "scheduler.cur_batch.reqs=[Req(rid=1, input_ids=[1], origin_input_text='Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=SEND) EADDRINUSE Killed process 3 (python3)')]\n"
    assert not [e for e in read(text) if isinstance(e, Event) and e.kind in ("port_in_use", "oom_kill")]


def test_every_reader_has_a_name_and_tokens() -> None:
    readers = line_readers()
    names = [r.NAME for r in readers] + [r.NAME for r in document_readers()]
    assert len(set(names)) == len(names)
    assert all(r.TOKENS and all(r.TOKENS) for r in readers)


TOKENS = sorted({t for r in line_readers() for t in r.TOKENS})
PIECES = st.one_of(
    st.sampled_from(TOKENS),
    st.sampled_from(
        [
            'Thread 1 (idle): "MainThread"',
            "    f (a.py:1)",
            "#0-0 (ab) MISMATCH",
            "{",
            "[\n{",
            '"entries": [',
            "[2026-01-01 00:00:00 TP0] ",
            "(Worker_TP0 pid=1) ",
            "(LWP 3)",
            "\x1b[0m",
            "0",
            "99999999999999999999999",
            "-",
            ": ",
            ", ",
            "%|",
            "\n",
        ]
    ),
    st.text(max_size=20),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(PIECES, max_size=40))
def test_readers_never_raise(pieces: list[str]) -> None:
    for fact in read("".join(pieces)):
        assert fact.src.line >= 1
        fact.says()


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["entries", "version", "pg_config", "pg_status", "frames", "thread_id", "loads", "communicators", "nccl_version", "ranks", "profiling_name", "process_group", "a", "tp_size", "name", "filename", "line", "pid"]), x, max_size=4), max_leaves=20)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(JSON)
def test_document_readers_never_raise(found: object) -> None:
    for fact in read(json.dumps(found)):
        fact.says()


def test_connections_that_repeat_their_data_are_told_without_their_addresses() -> None:
    row = 'ESTAB 0      6603       10.1.0.2:34187    10.1.0.1:53479 users:(("VLLM::Worker_TP",pid=25,fd=166)) timer:(on,2.880ms,{})\n'
    facts = read(row.format(10) + row.format(2) + row.format(7).replace("6603", "0   "), "ss.txt")
    assert [f.data for f in facts if isinstance(f, Event)] == [{"pid": 25, "held": 6603, "times": 10}]
    assert "10.1.0" not in " ".join(f.says() for f in facts)


def test_a_pause_counts_until_it_is_taken_back() -> None:
    order = 'INFO:     10.1.0.2:5 - "POST /{} HTTP/1.1" 200 OK\n'
    for orders, held in ((("pause?mode=keep",), 1), (("sleep", "wake_up"), 0), (("pause", "resume", "pause"), 1)):
        facts = read("".join(order.format(o) for o in orders))
        assert len(Scene(facts, [], []).paused) == held, orders


def test_a_connection_attempt_over_a_link_that_carries_nothing_is_the_network() -> None:
    frames = ("create_connection (urllib3/util/connection.py:73)", "connect (urllib3/connection.py:398)", *LOOP_PREFILL)
    stacks = "".join(dump(f"sglang::scheduler_TP{r}", frames, pid=60 + r) for r in range(2))
    row = 'ESTAB      0      {}      ip-1:4459{n}     ip-2:59629 users:(("sglang::schedul",pid=6{n},fd=147)) timer:(on,2.440sec,{})\n'
    for held, times, said in ((210, 10, "NETWORK_OR_TRANSPORT"), (0, 0, "FRONTEND_OR_CPU_BOUND")):
        ss = "".join(row.format(held, times, n=n) for n in range(2))
        assert diagnose_texts([("s.txt", stacks.encode()), ("ss.txt", ss.encode())]).main.cls == said


def test_of_ranks_that_are_all_gone_the_one_that_raised_nothing_died_first() -> None:
    line = "{:>5} 30196 {}    0 sglang::scheduler_TP{}{}\n"
    dead = "".join(line.format(30328 + r, "Z", r, " <defunct>") for r in range(2))
    alive = "".join(line.format(30312 + r, "S", r, "") for r in range(2))  # of the other engine
    log = (
        "[2026-11-30 13:33:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:53154: Connection reset by peer.\n"
    )
    for others in (alive, ""):
        ps = f"  PID  PPID STAT WCHAN COMMAND\n{dead}{others}"
        found = diagnose_texts([("ps.txt", ps.encode()), ("decode/engine.log", log.encode())]).main
        assert (found.cls, found.missing, found.summary.partition(";")[0]) == ("DEAD_PEER", ["TP1"], "TP1 died")


def test_a_part_that_was_killed_is_named() -> None:
    log = (
        "[2026-11-30 13:12:47] Subprocess {} (pid=23393) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    )
    for part, said in (("detokenizer", "The detokenizer of decode"), ("scheduler_1", "Rank 1 of decode")):
        found = diagnose_texts([("decode/engine.log", log.format(part).encode())]).main
        assert (found.cls, found.summary.partition(" died")[0]) == ("DEAD_PEER", said)


def test_the_line_of_arguments_of_new_sglang_begins_a_life_and_tells_flags() -> None:
    died = "[2026-11-30 13:04:50] Subprocess scheduler_1 (pid=7) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    begins = "[2026-11-30 13:0{}:51] server_args={{'model_path': '/m', 'host': '10.0.0.1', 'port': {}, 'tp_size': 2, 'page_size': 64, 'api_key': None}}\n"
    up = "[2026-11-30 13:09:00] The server is fired up and ready to roll!\n"
    for log, told in (
        (begins.format(0, 1) + died, True),
        (begins.format(0, 1) + died + begins.format(6, 1) + up, False),
        (begins.format(0, 1) + died + begins.format(6, 2) + up, True),  # two engines, one log
    ):
        assert Scene(read(log), [], []).has("child_crashed") is told, log
    settings = {f.name: f.value for f in read(begins.format(0, 1)) if isinstance(f, Setting)}
    assert settings == {"tp-size": "2", "page-size": "64"}


def test_what_a_log_tells_of_a_former_life_is_the_past_once_the_engine_is_up_again() -> None:
    died = "(EngineCore pid=9) ERROR 10-03 05:01:14 [multiproc_executor.py:231] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n"
    begins = "(APIServer pid=3) INFO 10-03 05:0{}:00 [api_utils.py:286] non-default args: {{'model_tag': 'm', 'kv_transfer_config': KVTransferConfig(kv_role='{}')}}\n"
    up = "INFO:     Application startup complete.\n"
    for log, told in (
        (died, True),
        (died + begins.format(2, "kv_consumer"), True),  # it may not come up
        (died + begins.format(2, "kv_consumer") + up, False),
        (begins.format(0, "kv_producer") + died + begins.format(2, "kv_consumer") + up, True),  # two engines, one log
        (died + begins.format(0, "kv_consumer") + up, True),  # by its clock that was before
    ):
        assert Scene(read(log), [], []).has("worker_died") is told, log
