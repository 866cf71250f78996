"""Each signal on recorded inputs, and on servers and files that misbehave."""

import asyncio
import gzip
import os
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from closeranks.evidence import capture
from closeranks.watch.aside import Aside
from closeranks.watch.signals import Reader, Readings, counters, gpu, loads, stacks, steps
from closeranks.watch.signals.fetch import BODY_BYTES, Answer, Client
from closeranks.watch.signals.log import Followed, LogSignal
from closeranks.watch.signals.probe import PREFIX, ProbeSignal
from closeranks.watch.snapshot import Blind, EngineSeen, Proc
from closeranks.watch.snapshot import Signal as SignalName
from tests.evidence.test_capture import Stuck
from tests.watch.looks import NAME, engine

SGLANG_PAGE = b"""# HELP sglang:num_running_reqs The number of running requests
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="1"} 4.0
sglang:num_decode_transfer_queue_reqs{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:generation_tokens_total{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"} 160.0
sglang:scheduler_stage_seconds_total{category="other",pp_rank="0",tp_rank="0"} 2.5
sglang:scheduler_stage_seconds_total{category="forward",pp_rank="0",tp_rank="0"} 1.5
sglang:scheduler_stage_seconds_total{category="other",pp_rank="0",tp_rank="1"} 4.25
sglang:scheduler_idle_seconds_total{pp_rank="0",tp_rank="0"} 0.5
sglang:e2e_request_latency_seconds_bucket{le="0.1",model_name="a \\"quoted\\" } name"} 3
sglang:num_running_reqs
sglang:num_queue_reqs{ torn
"""
VLLM_PAGE = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 17.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 2.0
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="completed_waiting"} 5.0
"""
OWN_PAGE = b"""closeranks_steps_total{engine="decode"} 120.0
closeranks_decode_tokens_total{engine="decode"} 33.0
closeranks_steps_total{engine="prefill"} 121.0
closeranks_running_requests{engine="decode"} 2.0
"""


def test_streamed_and_other_requests_are_counted_together_and_ranks_once() -> None:
    page = b"".join(
        b'sglang:generation_tokens_total{engine_type="decode",is_streaming="%s"} %d\n' % pair
        for pair in ((b"true", 82), (b"false", 15))
    )
    page += b"".join(b'sglang:num_running_reqs{moe_ep_rank="%d",tp_rank="%d"} 3\n' % (r, r) for r in (0, 1))
    found = counters.parse(page)
    assert (found["tokens"], found["running"]) == (97.0, 3.0)


def test_requests_that_were_given_up_are_not_finished() -> None:
    page = b'sglang:num_requests_total{is_streaming="%s"} %d\n'
    both = page % (b"true", 40) + page % (b"false", 9) + b"sglang:prompt_tokens_total 900\n"
    before = counters.parse(both + b"sglang:num_aborted_requests_total 5\nsglang:generation_tokens_total 80\n")
    assert before == {"finished": 44.0, "tokens": 80.0, "refused": -5.0}
    after = counters.parse(both + b"sglang:num_aborted_requests_total 6\nsglang:generation_tokens_total 80\n")
    assert counters.steady(after, before) == {**before, "refused": -6.0}, (
        "counted as aborted before it is counted as a request"
    )
    anew = {"finished": 1.0, "tokens": 3.0}
    assert counters.steady(anew, before) == anew
    ended = b'vllm:request_success_total{engine="0",finished_reason="%s",model_name="m"} %d\n'
    assert counters.parse(ended % (b"stop", 3) + ended % (b"abort", 7)) == {"finished": 3.0}


def test_hand_overs_that_failed_and_that_nobody_had_given_up() -> None:
    """The series appear with the first failure, are of every rank, and count aborted requests too."""
    page = b'sglang:num_requests_total{engine_type="decode"} 60\nsglang:num_aborted_requests_total 20\n'
    assert counters.parse(page) == {"finished": 40.0, "refused": -20.0}
    for rank in (0, 1):
        page += b'sglang:num_transfer_failed_reqs_total{engine_type="decode",tp_rank="%d"} 25\n' % rank
        page += b'sglang:num_bootstrap_failed_reqs_total{engine_type="decode",tp_rank="%d"} 3\n' % rank
    assert counters.parse(page) == {"finished": 32.0, "refused": 8.0}
    page = b'vllm:request_success_total{engine="0",finished_reason="%s"} %d\n'
    page = page % (b"stop", 9) + page % (b"error", 4) + page % (b"abort", 2)
    page += b'vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 6\n'
    assert counters.parse(page) == {"finished": 9.0, "refused": 10.0}
    own = b'closeranks_failed_transfers_total{engine="prefill"} 7\n'
    assert steps.parse(own) == {"prefill": {"refused": 7.0}}


def test_sglang_counters() -> None:
    found = counters.parse(SGLANG_PAGE)
    assert found == {
        "running": 4.0,
        "transfer": 2.0,
        "tokens": 160.0,
        "busy_0_0": 4.0,
        "busy_0_1": 4.25,
        "idle_0_0": 0.5,
    }
    assert counters.held(found)
    assert not counters.held({"tokens": 5.0, "paused": 3.0})


def test_what_is_computed_within_a_prompt_or_an_answer_is_counted() -> None:
    """Each mode is a series that appears with its first token; ranks that report all tell the same."""
    page = b'sglang:realtime_tokens_total{mode="%s",tp_rank="%d"} %d\n'
    modes = [(b"prefill_compute", 8192), (b"prefill_cache", 64), (b"decode", 40)]
    found = counters.parse(b"".join(page % (mode, rank, n) for mode, n in modes for rank in (0, 1)))
    assert found == {"worked": 8192.0 + 64 + 40}
    assert counters.parse(b'vllm:estimated_flops_per_gpu_total{engine="0"} 1.5e12\n') == {"worked": 1.5e12}


def test_vllm_counters() -> None:
    assert counters.parse(VLLM_PAGE) == {
        "running": 3.0,
        "waiting": 0.0,
        "tokens": 17.0,
        "finished": 3.0,
        "transfer": 2.0,
    }


@pytest.mark.parametrize(
    "page",
    [
        b"", b"\xff\xfe", b"sglang:", b"vllm:{", b"sglang:num_running_reqs{} nan-ish", b"sglang:num_running_reqs NaN",
        b"vllm:num_requests_running{} +Inf", b"vllm:generation_tokens_total -inf", b"vllm:num_requests_waiting 1e999",
        b"<html><body>502</body></html>",
    ],
)  # fmt: skip
def test_pages_of_rubbish_give_nothing(page: bytes) -> None:
    """Also numbers that are none: a NaN is never what it was, and would pass for an advance at every look."""
    assert counters.parse(page) == {}


def test_ranks_without_end_are_not_all_remembered() -> None:
    page = b"".join(b'sglang:scheduler_stage_seconds_total{tp_rank="%d"} 1\n' % n for n in range(10_000))
    page += b"sglang:num_running_reqs 2\n"
    found = counters.parse(page)
    assert len(found) <= counters.MANY_RANKS + 1
    assert found["running"] == 2.0


def test_own_steps() -> None:
    found = steps.parse(OWN_PAGE)
    assert found == {"decode": {"steps": 120.0, "tokens": 33.0, "running": 2.0}, "prefill": {"steps": 121.0}}
    rubbish = b"".join(b'closeranks_epoch{engine="decode"} %s\n' % word for word in (b"x", b"NaN", b"inf", b"1e999"))
    assert steps.parse(OWN_PAGE + rubbish + b'closeranks_\xd9{engine="\xff"} 1\n') == found


def read_loads(body: bytes) -> dict[str, float] | None:
    return loads.parse(Answer(200, body, 0.0).json())


def test_loads_use_one_clock() -> None:
    body = (
        b'{"timestamp": 1000.5, "loads": [{"timestamp": 998.0, "num_running_reqs": 2, "num_waiting_reqs": 1,'
        b' "disaggregation": {"decode_transfer_queue_reqs": 5}}, {"timestamp": 1000.0, "num_running_reqs": 1}]}'
    )
    assert read_loads(body) == {"heartbeat": 998.0, "age": 2.5, "running": 3.0, "waiting": 1.0, "transfer": 5.0}
    iso = body.replace(b'"timestamp": 1000.5', b'"timestamp": "1970-01-01T00:16:40.500000+00:00"')
    assert read_loads(iso) == read_loads(body)
    for rubbish in (
        b'{"timestamp": "x", "loads": [{"timestamp": 1}]}',
        b"",
        b"[]",
        b"{}",
        b'{"loads": []}',
        b'{"loads": [1], "timestamp": 1}',
        b'{"loads": "x"}',
        b"[" * 100_000,
        b'{"timestamp": 1, "loads": [{"timestamp": 1e999}]}',
        b'{"timestamp": 1, "loads": [{"timestamp": %s}]}' % (b"9" * 400),
        b"<html></html>",
    ):
        assert read_loads(rubbish) is None


def test_gpus_of_the_engines_processes() -> None:
    cards = (
        "index, uuid, utilization.gpu [%], utilization.memory [%], power.draw [W], power.limit [W]\n"
        "0, GPU-a, 100, 0, 150.0, 700.0\n1, GPU-b, 0, 0, 80.0, 700.0\n2, GPU-c, [N/A], 0, [N/A], [N/A]\n"
    )
    found = gpu.parse(cards, "pid, gpu_uuid\n101, GPU-a\n102, GPU-b\n103, GPU-c\nrubbish\n")
    assert set(found) == {101, 102}
    assert found[101]["power"] < gpu.LOW_POWER


def test_an_nvidia_smi_that_the_driver_holds_is_left_and_no_other_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Stuck] = []
    both = asyncio.Event()

    async def start(*_: object, **__: object) -> Stuck:
        process = Stuck(started)
        if len(started) == 2:
            both.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(capture, "ENDS_S", 0.01)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    signal, seen = gpu.GpuSignal(), engine()

    async def go() -> Readings:
        reading = asyncio.create_task(signal.read([seen], frozenset({NAME})))
        await both.wait()
        reading.cancel()
        await asyncio.wait({reading})
        return await asyncio.wait_for(signal.read([seen], frozenset({NAME})), 60)

    found = asyncio.run(go())
    blind = found[NAME]
    assert isinstance(blind, Blind)
    assert "SIGKILL does not end it" in blind.reason
    assert len(started) == 2
    assert all(process.killed for process in started)


def lines(followed: Followed, text: str) -> None:
    for line in text.encode().splitlines():
        followed.line(line)


def test_what_a_log_says() -> None:
    log = Followed(())
    lines(log, "[2026-11-29 18:02:27] server_args=ServerArgs(model_path='tiny')\n[x TP0] Load weight begin.")
    assert not log.ready
    lines(log, "[x] The server is fired up and ready to roll!")
    assert log.ready
    lines(log, "[x TP1] Unexpected transfer worker error for room 5703557506917441074")
    assert (log.crash, log.thread) == ("", "")
    lines(log, "Exception in thread Thread-4 (bootstrap_thread):")
    assert log.thread == "bootstrap_thread"
    lines(log, "[x TP2] Scheduler hit an exception: Traceback (most recent call last):")
    assert log.crash == "the scheduler raised an exception"
    lines(log, "[x]     scheduler = Scheduler(server_args=server_args, port_args=port_args)")
    assert log.crash
    lines(log, "[x] server_args={'model_path': 'tiny', 'tp_size': 2}")  # SGLang 0.5.23
    assert (log.ready, log.crash, log.thread) == (False, "", "")


def test_an_engine_that_shuts_itself_down_after_a_crash_was_not_asked_to() -> None:
    crash = b"(EngineCore pid=9) ERROR 11-30 09:33:44 [core.py:1512] EngineCore encountered a fatal error."
    end = b"INFO:     Shutting down"
    asked = (
        b"(EngineCore pid=9) INFO 11-30 09:33:44 [core.py:1455] [shutdown] EngineCore: trigger received signal=SIGTERM"
    )
    for lines, ending, crashed in (((crash, end), False, True), ((asked, end, crash), True, False)):
        log = Followed(())
        for line in lines:
            log.line(line)
        assert (log.ending, bool(log.crash)) == (ending, crashed)


def test_pausing_updating_and_ending_in_a_log() -> None:
    log = Followed(())
    lines(log, "[x] Generation paused by pause_generation (mode=retract).")
    assert log.paused
    lines(log, '[x] INFO:     1.2.3.4:1 - "POST /continue_generation HTTP/1.1" 200 OK')
    assert not log.paused
    lines(log, "[x] Update engine weights online from disk begin.")
    assert log.updating
    lines(log, '[x] INFO:     1.2.3.4:1 - "POST /update_weights_from_disk HTTP/1.1" 200 OK')  # once it is done
    assert not log.updating
    lines(log, '[x] INFO:     1.2.3.4:1 - "POST /release_memory_occupation HTTP/1.1" 200 OK')
    assert log.updating
    lines(log, "[x TP0] Decode batch, #running-req: 1, gen throughput (token/s): 3.0, #queue-req: 0")
    assert not log.updating
    lines(log, "[x] SIGTERM received. signum=None\n[x] Scheduler hit an exception: closed")
    assert log.ending
    assert log.crash == ""


@pytest.mark.parametrize(
    "line",
    [
        '[x] INFO:     10.0.0.9:51000 - "GET /EngineDeadError HTTP/1.1" 404 Not Found',
        '[x] INFO:     10.0.0.9:51000 - "GET /v1/models?a=SIGTERM received HTTP/1.1" 200 OK',
        '[x] INFO:     10.0.0.9:51000 - "GET /a?b=Fatal Python error" HTTP/1.1" 404 Not Found',
        '[x] INFO:     10.0.0.9:51000 - "POST /pause HTTP/1.1" 404 Not Found',
        '[x] INFO:     10.0.0.9:51000 - "POST /pause_generation HTTP/1.1" 401 Unauthorized',
        '[x] INFO:     10.0.0.9:51000 - "GET /a?/pause HTTP/1.1" 200 OK',
        '[x] INFO:     10.0.0.9:51000 - "GET /release_memory_occupation HTTP/1.1" 405 Method Not Allowed',
        "[x] Receive: obj=GenerateReqInput(rid='1', text='Scheduler hit an exception', image_data=None)",
        "[x] Receive: obj=GenerateReqInput(rid='1', text='Exception in thread Thread-3 (transfer_worker):')",
        "INFO 12-01 02:00:00 [logger.py:42] Received request cmpl-1: prompt: 'EngineDeadError', params: x",
        "[x] Generated response cmpl-1: output: 'Generation paused by pause_generation'",
        "DEBUG 12-01 02:00:00 [x.py:9] delta_text: EngineDeadError",
        "  Input should be a list [type=list_type, input_value=SIGTERM received, input_type=Any]",
    ],
)
def test_what_clients_send_says_nothing_of_the_engine(line: str) -> None:
    log = Followed(())
    lines(log, line)
    assert (log.crash, log.thread, log.paused, log.updating, log.ending, log.ready) == ("", "", *[False] * 4)


@pytest.mark.parametrize("name", ["usage_stats", "monitor", "tqdm_monitor", "asyncio_0"])
def test_the_end_of_other_threads_is_no_fault(name: str) -> None:
    log = Followed(())
    lines(log, f"Exception in thread Thread-9 ({name}):")
    assert log.thread == ""


def test_what_a_log_held_before_the_process_began_is_of_a_former_life(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    born = time.mktime((2026, 11, 30, 13, 5, 10, 0, 0, -1))
    crash = "[{} TP0] Scheduler hit an exception: Traceback\nException in thread Thread-4 (bootstrap_thread):\n"
    for at, crashed in (
        ("2026-11-30 13:04:50", False), ("2026-11-30 13:05:09", True), ("2026-11-30 13:05:20", True),
        ("2025-12-31 23:59:59", False), ("2027-13-99 13:04:50", True), ("no time", True),
    ):  # fmt: skip
        path.write_text(crash.format(at))
        log = Followed([str(path)], born)
        log.look()
        assert (bool(log.crash), bool(log.thread)) == (crashed, crashed), at
        with path.open("a") as file:
            file.write(crash.format("2026-11-30 13:04:50"))  # by a clock that is behind
        log.look()
        assert log.crash, "what comes after is of this life"


def test_a_log_is_followed_over_cuts_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("The server is fired up and ready to roll!\nhalf a li")
    log = Followed([str(path)])
    log.look()
    assert (log.ready, log.lines) == (True, 1)
    with path.open("a") as file:
        file.write("ne\nScheduler hit an exc")
    log.look()
    assert (log.lines, log.crash) == (2, "")
    with path.open("a") as file:
        file.write("eption: x\n")
    log.look()
    assert log.crash
    path.write_text("")
    log.look()
    path.rename(tmp_path / "engine.log.1")
    path.write_text("server_args=ServerArgs()\n")
    log.look()
    assert log.crash == ""
    with pytest.raises(OSError):
        Followed([str(tmp_path / "none")]).look()


def test_an_engine_goes_on_in_the_file_that_it_opened(tmp_path: Path) -> None:
    """logrotate renames and creates a new one; the engine, told nothing, writes to what it has."""
    path, moved = tmp_path / "engine.log", tmp_path / "engine.log.1"
    with path.open("ab", buffering=0) as engine_writes:
        engine_writes.write(b"The server is fired up and ready to roll!\n")
        seen = EngineSeen("decode", "sglang", "decode", None, engine().procs, logs=(str(path),))
        signal = LogSignal()
        assert signal.files(seen) == (str(path),)
        signal.read_now([seen])
        for create in (False, True):
            if create:
                path.touch()
            else:
                path.rename(moved)
            engine_writes.write(b"Generation paused by pause_generation\n")
            found = signal.read_now([seen])["decode"]
            assert not isinstance(found, Blind)
            assert (found["paused"], found["lines"]) == (True, 2.0 + create)
            assert signal.files(seen) == (str(moved),), "a bundle takes the log from there"
        engine_writes.write(b"SIGTERM received\n")
    path.write_text("[x] Generation continued\n")  # and here it has opened its log anew
    found = signal.read_now([seen])["decode"]
    assert not isinstance(found, Blind)
    assert (found["paused"], found["ending"], found["lines"]) == (False, True, 5.0)
    assert signal.files(seen) == (str(path),)


def test_a_log_that_was_cut_and_has_grown_again_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("[x] one line\n" * 3)
    log = Followed([str(path)])
    log.look()
    path.write_text("[x] Scheduler hit an exception: x\n" + "[x] later\n" * 30)  # in place, as copytruncate does
    log.look()
    assert (log.crash, log.lines) == ("the scheduler raised an exception", 34)
    log.look()
    assert log.lines == 34


def test_the_log_of_an_engine_that_is_gone_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    path.write_text("2026-11-30 [info     ] engine is ready\n")
    seen = EngineSeen("decode", "closeranks", "decode", None, engine().procs, logs=(str(path),))
    signal = LogSignal()
    signal.read_now([seen])
    with path.open("a") as file:
        file.write("2026-11-30 [info     ] rank stopped   rank=0\n")
    found = signal.read_now([])
    assert isinstance(found["decode"], dict)
    assert found["decode"]["ending"] is True


def test_logs_that_cannot_be_read_are_blind(tmp_path: Path) -> None:
    found = LogSignal({NAME: str(tmp_path / "none")}).read_now([engine()])
    assert isinstance(found[NAME], Blind)
    found = LogSignal().read_now([engine()])
    assert isinstance(found[NAME], Blind)
    assert f"--log {NAME}=FILE" in found[NAME].reason


DUMP = """Process 101: sglang::scheduler_TP0
Python v3.11.7 (/usr/bin/python3.11)

Thread 101 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:{line})
    poll_and_all_reduce (sglang/srt/disaggregation/utils.py:80)
    Scheduler.pop_transferred (sglang/srt/disaggregation/decode.py:600)
    event_loop_overlap_disagg_decode (sglang/srt/disaggregation/decode.py:40)
Thread 150 (idle): "Thread-1 (decode_listener_thread)"
    decode_listener_thread (sglang/srt/disaggregation/nixl/conn.py:41)
"""
PROC = "task 101: Name x, voluntary_ctxt_switches 5, nonvoluntary_ctxt_switches 1, wchan f\n" \
       "task 150: Name x, voluntary_ctxt_switches {n}, nonvoluntary_ctxt_switches 0, wchan f\n"  # fmt: skip


def _rounds(second: str, moved: bool = False, listener: int = 9) -> stacks.Rounds:
    seen = engine()
    rounds = stacks.Rounds(time.monotonic(), (seen,))
    for process in seen.deciders:
        key = f"{seen.name}/{process.label}"
        rounds.first[key], rounds.second[key] = DUMP.format(line=1), second
        rounds.proc_first[key], rounds.proc_second[key] = PROC.format(n=9), PROC.format(n=listener)
        values = {"at": 1.0, "state": "S", "switches": 5.0, "ticks": 1.0, "start": 1.0}
        rounds.before[key] = values
        rounds.after[key] = {**values, "at": 4.5, "switches": 6.0 if moved and process.label == "TP1" else 5.0}
    return rounds


def test_two_rounds_of_stacks() -> None:
    values = stacks.judge(_rounds(DUMP.format(line=1)))[NAME]
    assert not isinstance(values, Blind)
    assert (values["same"], values["still"], values["seconds"], values["transfer_still"]) == (True, True, 3.5, True)
    assert "all_reduce in poll_and_all_reduce" in str(values["places"])
    assert values["lacks"] == ""


def test_a_rank_that_moved_or_a_thread_that_ran_is_seen() -> None:
    values = stacks.judge(_rounds(DUMP.format(line=2), moved=True, listener=10))[NAME]
    assert not isinstance(values, Blind)
    assert (values["same"], values["still"], values["transfer_still"]) == (False, False, False)


def test_a_launcher_that_waits_for_its_api_servers_is_idle() -> None:
    """vLLM's with `--api-server-count`: others serve HTTP."""
    dump = """Process 100: vllm serve
Python v3.12.3 (/usr/bin/python3.12)

Thread 100 (idle): "MainThread"
    {inner}wait (multiprocessing/connection.py:1136)
    wait_for_completion_or_failure (vllm/v1/utils.py:230)
    run_multi_api_server (vllm/entrypoints/cli/serve.py:200)
    cmd (vllm/entrypoints/cli/serve.py:60)
"""
    for inner in ("select (selectors.py:415)\n    ", ""):
        rounds = _rounds(DUMP.format(line=1))
        rounds.engines = (engine("vllm"),)
        key = f"{NAME}/launcher"
        rounds.first[key] = rounds.second[key] = dump.format(inner=inner)
        values = stacks.judge(rounds)[key]
        assert not isinstance(values, Blind)
        assert values["idle"] is True


def test_a_missing_helper_thread_is_named() -> None:
    values = stacks.judge(_rounds(DUMP.format(line=1).partition("Thread 150")[0]))[NAME]
    assert not isinstance(values, Blind)
    assert "no decode_listener_thread in TP0, TP1" in str(values["lacks"])


def test_a_rank_with_fewer_senders_than_the_others_is_named() -> None:
    """A thread that ended by SystemExit leaves no word in the log."""
    seen = engine(role="prefill")
    sender = 'Thread {n} (idle): "Thread-{n} (transfer_worker)"\n    wait (threading.py:327)\n'
    boot = 'Thread 150 (idle): "Thread-7 (bootstrap_thread_guarded)"\n    bootstrap_thread (nixl/conn.py:33)\n'

    def lacks(first: int, second: int) -> object:
        rounds = _rounds(DUMP.format(line=1))
        rounds.engines = (seen,)
        for process in seen.deciders:
            key = f"{seen.name}/{process.label}"
            counts = (first, second) if process.label == "TP1" else (4, 4)
            for dumps, count in zip((rounds.first, rounds.second), counts, strict=True):
                threads = "".join(sender.format(n=200 + n) for n in range(count))
                dumps[key] = DUMP.format(line=1).partition("Thread 150")[0] + threads + boot
        values = stacks.judge(rounds)[seen.name]
        assert not isinstance(values, Blind)
        return values["lacks"]

    assert lacks(3, 3) == "3 of 4 transfer_worker in TP1"
    assert lacks(0, 0) == "0 of 4 transfer_worker in TP1"
    assert lacks(4, 4) == lacks(3, 4) == lacks(4, 3) == ""


def test_a_process_that_engines_share_is_dumped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two py-spy at one process the second is refused, and its engine would be blind."""
    asked: list[int] = []

    async def dump(pid: int, limit_s: float, native: bool = False) -> str:
        assert not native
        asked.append(pid)
        return f"dump of {pid}"

    monkeypatch.setattr(stacks.capture, "stacks", dump)
    monkeypatch.setattr(stacks.procfs, "reused", lambda pid, start_time: False)
    shared = Proc(7, 7, 1, "gateway", "", None, "closeranks::gateway")
    engines = [
        EngineSeen(name, "closeranks", "both", None, (Proc(pid, pid, 1, "leader", name, None, "x"), shared))
        for name, pid in (("prefill", 8), ("decode", 9))
    ]
    found = asyncio.run(stacks._dump(engines))
    assert sorted(asked) == [7, 8, 9]
    assert found["prefill/gateway"] == found["decode/gateway"] == "dump of 7"
    assert found["decode/leader"] == "dump of 9"


def test_dumps_that_failed_are_blind_with_the_reason() -> None:
    values = stacks.judge(_rounds("no stacks: py-spy  exited 1: Permission denied (os error 13)\n"))[NAME]
    assert isinstance(values, Blind)
    assert "Permission denied" in values.reason


# --- over HTTP ------------------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def served(routes: dict[str, Handler]) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.add_routes([web.route("*", path, handler) for path, handler in routes.items()])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def at(url: str | None, **how: object) -> EngineSeen:
    import msgspec

    return msgspec.structs.replace(engine(**how), url=url)  # type: ignore[arg-type]


def test_answers_errors_and_silence_over_http() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(body=SGLANG_PAGE)

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def go() -> None:
        runner, url = await served({"/metrics": page, "/quiet/metrics": silent})
        client = Client(0.5)
        signal = counters.CountersSignal(client)
        http = counters.HttpSignal(signal)
        try:
            found = await signal.read([at(url)], frozenset())
            assert not isinstance(found[NAME], Blind)
            found = await signal.read([at(url + "/quiet")], frozenset())
            assert isinstance(found[NAME], Blind)
            values = (await http.read([at(url)], frozenset()))[NAME]
            assert not isinstance(values, Blind)
            assert (values["accepts"], values["answers"]) == (True, False)
            found = await signal.read([at(url + "/none")], frozenset())
            assert isinstance(found[NAME], Blind)
            assert "--enable-metrics" in found[NAME].reason
        finally:
            await runner.cleanup()
        await signal.read([at(url)], frozenset())
        values = (await http.read([at(url)], frozenset()))[NAME]
        assert not isinstance(values, Blind)
        assert (values["accepts"], values["answers"]) == (False, False)
        assert isinstance((await signal.read([at(None)], frozenset()))[NAME], Blind)
        await client.close()

    asyncio.run(go())


def test_servers_of_rubbish_are_blind_each_for_itself() -> None:
    """A bomb, a page without end, redirects in a circle, brackets: said with the reason, in little memory."""
    bomb = gzip.compress(b"sglang:num_running_reqs 1\n" * 1_000_000, 1)
    sent = 0

    async def packed(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 10 * BODY_BYTES:
            await answer.write(b"sglang:num_running_reqs 1\n" * 4000)
            sent += 4000 * 26
        return answer

    async def circle(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.path)

    async def brackets(request: web.Request) -> web.Response:
        return web.Response(body=b"[" * 200_000, status=503 if request.path.endswith("health") else 200)

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=SGLANG_PAGE)

    async def go() -> None:
        routes = {"/packed": packed, "/endless": endless, "/circle": circle, "/sound": page}
        routes = {f"{side}/metrics": how for side, how in routes.items()}
        routes |= {"/sound/v1/loads": brackets, "/sound/health": brackets}
        runner, url = await served(routes)
        client = Client(20.0)
        signal = counters.CountersSignal(client)
        engines = [at(f"{url}/{side}", name=side) for side in ("packed", "endless", "circle", "sound")]
        tracemalloc.start()
        found = await signal.read(engines, frozenset())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 6 * BODY_BYTES
        assert sent < 10 * BODY_BYTES
        assert not isinstance(found["sound"], Blind)
        blind = {name: values.reason for name, values in found.items() if isinstance(values, Blind)}
        assert "none of the known names" in blind["packed"]
        assert "more than 8 MiB" in blind["endless"]
        assert "HTTP 302" in blind["circle"]
        http = await counters.HttpSignal(signal).read(engines, frozenset())
        assert all(not isinstance(values, Blind) and values["answers"] for values in http.values())
        for other in (loads.LoadsSignal(client), steps.StepsSignal(client, signal)):
            kind = "sglang" if isinstance(other, loads.LoadsSignal) else "closeranks"
            read = await other.read([at(f"{url}/sound", kind=kind)], frozenset())
            assert isinstance(read[NAME], Blind)
        await runner.cleanup()
        await client.close()

    asyncio.run(go())


def test_a_probe_goes_to_both_sides_with_one_room_and_is_aborted_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, object]]] = []
    hang = False

    async def generate(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json()))
        if hang:
            await asyncio.sleep(60)
        return web.json_response({"text": "9"})

    async def abort(request: web.Request) -> web.Response:
        asked.append((request.path, await request.json()))
        return web.Response()

    async def go() -> None:
        nonlocal hang
        monkeypatch.setattr("closeranks.watch.signals.probe.LIMIT_S", 0.5)
        runner, url = await served({f"/{side}/{what}": how for side in "pd" for what, how in
                                    (("generate", generate), ("abort_request", abort))})  # fmt: skip
        client = Client(1.0)
        pair = [at(f"{url}/p", role="prefill", name="prefill-1"), at(f"{url}/d")]
        signal = ProbeSignal(client)
        assert await signal.read(pair, frozenset()) == {}
        found = await signal.read(pair, frozenset({NAME}))
        assert {k: v["ok"] for k, v in found.items() if not isinstance(v, Blind)} == {NAME: True, "prefill-1": True}
        assert {path for path, _ in asked} == {"/p/generate", "/d/generate"}
        assert len({str(body["bootstrap_room"]) for _, body in asked}) == 1
        assert all(str(body["rid"]).startswith(PREFIX) for _, body in asked)
        asked.clear()
        hang = True
        found = await signal.read(pair, frozenset({NAME}))
        values = found[NAME]
        assert not isinstance(values, Blind)
        assert values["ok"] is False
        assert {path for path, _ in asked} == {f"/{s}/{w}" for s in "pd" for w in ("generate", "abort_request")}
        await runner.cleanup()
        await client.close()

    asyncio.run(go())


TOKEN = {"text": "9", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}
CHOICE = {"choices": [{"text": "9", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
NO_TOKEN: list[object] = [
    "<html>502</html>", "", [], {}, {"choices": []}, {"choices": [{"text": ""}]}, {"choices": None}, {"choices": [1]},
    {"choices": [{"text": "x", "finish_reason": "abort"}], "usage": {"completion_tokens": 1}}, {"usage": {"x": 1}},
    {"text": ""}, {"meta_info": {"completion_tokens": 0}}, {"error": {"message": "x"}},
    {"choices": [{"text": ""}], "usage": []},
    {"text": "x", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort", "message": "x"}}},
]  # fmt: skip


def test_only_a_token_is_a_probe_that_succeeds() -> None:
    """A page of HTML with 200 is none; an answer of any kind is told from silence."""
    says: object = None
    status = 200

    async def answer(request: web.Request) -> web.Response:
        if says is None:
            await asyncio.sleep(60)
        if isinstance(says, str):
            return web.Response(text=says, status=status, content_type="text/html")
        return web.json_response(says, status=status)

    async def sound(request: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": {"remote_block_ids": [1]}} | TOKEN)

    async def go() -> None:
        nonlocal says, status
        routes = {"/p/generate": sound, "/p/v1/completions": sound, "/d/generate": answer, "/d/v1/completions": answer}
        runner, url = await served({**routes, "/abort_request": sound})
        client = Client(1.0)

        async def probe(kind: str, role: str) -> dict[str, object]:
            pair = [at(f"{url}/p", kind=kind, role="prefill", name="prefill-1"), at(f"{url}/d", kind=kind, role=role)]
            found = (await ProbeSignal(client).read(pair[role == "both" :], frozenset({NAME})))[NAME]
            assert not isinstance(found, Blind)
            return {"ok": found["ok"], "answered": found["answered"]}

        ways = [("sglang", "decode"), ("sglang", "both"), ("vllm", "decode"), ("vllm", "both")]
        for kind, role in ways:
            says, status = (TOKEN if kind == "sglang" else CHOICE), 200
            assert await probe(kind, role) == {"ok": True, "answered": True}, (kind, role)
            for nothing in NO_TOKEN:
                says = nothing
                assert await probe(kind, role) == {"ok": False, "answered": True}, (kind, role, says)
            says, status = {"error": {"message": "Decode transfer failed for request rank=0"}}, 500
            assert await probe(kind, role) == {"ok": False, "answered": True}
        await runner.cleanup()
        assert await probe("sglang", "both") == {"ok": False, "answered": False}
        await client.close()

    asyncio.run(go())


def test_of_an_engine_on_two_paths_the_one_that_succeeds_is_told() -> None:
    async def sound(request: web.Request) -> web.Response:
        return web.json_response(TOKEN)

    async def broken(request: web.Request) -> web.Response:
        return web.json_response({}, status=500)

    async def go() -> None:
        runner, url = await served({"/good/generate": sound, "/bad/generate": broken})
        client = Client(1.0)
        engines = [at(f"{url}/{'bad' if n in (1, 3) else 'good'}", role="prefill", name=f"p{n}") for n in (1, 2, 3)]
        found = await ProbeSignal(client).read([*engines, at(f"{url}/good")], frozenset({NAME}))
        ok = {name: values["ok"] for name, values in found.items() if not isinstance(values, Blind)}
        assert ok == {"p1": False, "p2": True, "p3": False, NAME: True}
        await runner.cleanup()
        await client.close()

    asyncio.run(go())


def test_a_server_without_the_endpoint_makes_the_probe_blind() -> None:
    async def go() -> None:
        runner, url = await served({})
        client = Client(1.0)
        found = await ProbeSignal(client).read([at(url, role="both")], frozenset({NAME}))
        assert isinstance(found[NAME], Blind)
        await runner.cleanup()
        await client.close()

    asyncio.run(go())


# --- the reader -----------------------------------------------------------------------------------------------------


class Odd:
    """A signal that does what its test wants."""

    name: SignalName = "loads"
    every_s = 0.0
    limit_s = 0.3

    def __init__(self, how: Callable[[], Awaitable[Readings]]) -> None:
        self.how, self.reads = how, 0

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        self.reads += 1
        return await self.how()


async def _looks(reader: Reader, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline
        reader.look([engine()], frozenset())
        await asyncio.sleep(0.02)


def test_a_signal_that_hangs_is_blind_and_read_again() -> None:
    async def hang() -> Readings:
        await asyncio.Event().wait()
        return {}

    async def go() -> None:
        odd = Odd(hang)
        reader = Reader(odd)
        await _looks(reader, lambda: isinstance(reader.latest.get(NAME), Blind))
        reads = odd.reads
        await _looks(reader, lambda: odd.reads > reads)
        await reader.close()

    asyncio.run(go())


def test_a_signal_that_hangs_beyond_cancelling_is_not_started_twice() -> None:
    async def stubborn() -> Readings:
        return await asyncio.to_thread(lambda: time.sleep(1.0) or {})

    async def go() -> None:
        odd = Odd(stubborn)
        reader = Reader(odd)
        await _looks(reader, lambda: isinstance(reader.latest.get(NAME), Blind))
        await reader.close()

    asyncio.run(go())


def test_a_log_that_hangs_takes_one_thread_and_nothing_else(tmp_path: Path) -> None:
    """As on a file system that is gone: its opening never comes back."""
    fifo = tmp_path / "engine.log"
    os.mkfifo(fifo)

    class Given(LogSignal):
        every_s = 0.0
        limit_s = 0.05
        reads = 0

        async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
            self.reads += 1
            return await super().read(engines, urgent)

    others = set(threading.enumerate())  # those that tests before this one have left in this process

    async def go() -> int:
        signal = Given({NAME: str(fifo)})
        reader = Reader(signal)
        await _looks(reader, lambda: signal.reads > 40)
        blind = reader.latest[NAME]
        assert isinstance(blind, Blind)
        assert "no answer" in blind.reason
        assert await asyncio.to_thread(lambda: 1) == 1
        await reader.close()
        return sum(t.name == "aside log" for t in set(threading.enumerate()) - others)

    assert asyncio.run(go()) == 1, "and the loop ended in spite of it"
    os.close(os.open(fifo, os.O_RDWR))


def test_a_call_that_was_given_up_is_waited_for_by_the_next() -> None:
    async def go() -> list[str]:
        aside, began, release, done = Aside("test"), threading.Event(), threading.Event(), list[str]()

        def slow() -> None:
            began.set()
            release.wait()
            done.append("first")

        first = asyncio.create_task(aside.run(slow))
        await asyncio.to_thread(began.wait)
        first.cancel()
        second = asyncio.create_task(aside.run(lambda: done.append("second")))
        await asyncio.sleep(0)
        release.set()
        await second
        with pytest.raises(ZeroDivisionError):
            await aside.run(lambda: 1 / 0)
        return done

    assert asyncio.run(go()) == ["first", "second"]


def test_a_signal_that_fails_is_blind_with_the_reason() -> None:
    async def fail() -> Readings:
        raise OSError(5, "Input/output error")

    async def go() -> None:
        reader = Reader(Odd(fail))
        await _looks(reader, lambda: isinstance(reader.latest.get(NAME), Blind))
        blind = reader.latest[NAME]
        assert isinstance(blind, Blind)
        assert "Input/output error" in blind.reason
        await reader.close()

    asyncio.run(go())
