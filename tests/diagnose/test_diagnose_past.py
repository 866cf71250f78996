# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""What happened hours ago, with hours of the same engine's tokens after it, explains nothing that stands now."""

import pytest

from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.rules._past import PAST
from closeranks.diagnose.verdict import Verdict
from tests.diagnose.variants import LOOP, SYNC, decode, nccl, ranks, tp

Texts = list[tuple[str, str]]
PD = "pre-allocated usage: 0.01, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 0, "
HANG = ranks(tp(4, SYNC + LOOP), state="active")
STOPPED = "".join(
    f"[2026-10-03 10:51:30 TP{r}] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n"
    for r in range(4)
)


def hours(first: int = 4, last: int = 11, more: str = "") -> str:
    return "".join(decode(f"{h:02}:{m:02}:00", more=more) for h in range(first, last) for m in (0, 15, 30, 45))


ROOMS = "".join(
    f"[2026-10-03 03:1{i}:01 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='q{i}' decode_req.req.bootstrap_room=95{i} with exception KVTransferError(bootstrap_room=95{i}): Request 95{i} timed out after 300.0s in KVPoll.WaitingForInput\n"
    for i in range(3)
)
ORPHANS = "".join(
    f"[2026-10-03 03:12:0{i}] Received output for rid='77aa' but the state was deleted in TokenizerManager.\n"
    for i in range(6)
)
CLOSED = "[2026-10-03 {} TP1] RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.1.0.4]:2114\n"
THREAD = """[2026-10-03 03:12:00 TP1] Exception in thread Thread-7 (bootstrap_thread):
Traceback (most recent call last):
  File "/o/sglang/srt/disaggregation/nixl/conn.py", line 611, in bootstrap_thread
AssertionError: First message should be b'NixlMsgGuard'. Foreign traffic?
"""
CELLS = "".join(f"DeepEP timeout check failed: rank = {r}, thread = 2, value = 1024)\n" for r in (0, 5))
SIZES = "[2026-10-03 03:12:00 TP1] RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4\n"
APART = "".join(nccl(r, 88, "BROADCAST" if r else "ALLREDUCE", at="03:31:16.135435629") for r in range(4))
LINK = "2026-10-03T{}.1Z n0:211:590 [2] /opt/nccl/src/transport/net_ib.cc:1311 NCCL WARN NET/IB : Got completion from peer 10.4.0.9<41022> with status=12 opcode=0 len=0 vendor err 129 (Send) localGid fe80::1 remoteGidsfe80::2 hca mlx5_2\n"
ROUTER = "2026-10-03T03:12:00.100200Z ERROR sglang_router::routers::http::pd_router: Prefill request failed prefill_url=http://10.0.0.1:30000 status=500 Internal Server Error\n"
OLD: dict[str, tuple[str, Texts]] = {
    "rooms": (ROOMS, []),
    "orphans": (ORPHANS, []),
    "closed": (CLOSED.format("03:12:00"), []),
    "thread": (THREAD, []),
    "cells without a clock": (CELLS, []),
    "sizes": (SIZES, []),
    "collectives": (APART, []),
    "link": ("", [("nccl.log", LINK.format("03:12:01"))]),
    "router": ("", [("router.log", ROUTER)]),
}


def passed(v: Verdict) -> list[str]:
    return [f.rule for f in v.findings if f.stage == PAST]


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("pair", ["", PD], ids=["one", "pair"])
def test_a_stop_of_now_is_not_explained_by_what_hours_of_tokens_followed(name: str, pair: str) -> None:
    before, others = OLD[name]
    v = diagnose_texts([("engine.log", before + hours(more=pair) + STOPPED), ("s.txt", HANG), *others])
    assert v.main.cls == "SYMMETRIC_WAIT"
    old = [f for f in v.findings if f.stage == PAST]
    assert old
    assert all(f.certainty != "shown" and "It has passed: tokens followed" in f.summary for f in old)
    assert not any(f.known_issues for f in old)
    assert any("It has passed" in d for d in v.main.decoys)


@pytest.mark.parametrize("name", OLD)
def test_tokens_that_flow_to_the_end_are_what_there_is_to_say(name: str) -> None:
    before, others = OLD[name]
    v = diagnose_texts([("engine.log", before + hours()), *others])
    assert v.main.cls == "NOT_HUNG_SLOW_OR_CAPACITY"
    assert passed(v)


@pytest.mark.parametrize("name", OLD)
def test_the_same_event_without_tokens_after_it_counts(name: str) -> None:
    before, others = OLD[name]
    v = diagnose_texts([("engine.log", hours(0, 3) + before), *others])
    assert v.main.cls not in ("NOT_HUNG_SLOW_OR_CAPACITY", "UNDETERMINED")
    assert not passed(v)


@pytest.mark.parametrize("after", [decode("03:12:03"), decode("03:12:03") + decode("03:12:09")], ids=["one", "two"])
def test_a_step_that_was_under_way_is_no_life(after: str) -> None:
    v = diagnose_texts([("engine.log", hours(0, 3) + CLOSED.format("03:12:00") + after)])
    assert v.main.rule == "lost_connection"
    assert not passed(v)


def test_what_came_again_has_not_passed() -> None:
    v = diagnose_texts([("engine.log", CLOSED.format("03:12:00") + hours() + CLOSED.format("10:46:00"))])
    assert v.main.rule == "lost_connection"
    assert v.main.evidence[0].line == 30
    v = diagnose_texts([("engine.log", hours()), ("nccl.log", LINK.format("03:12:01") + LINK.format("10:46:00"))])
    assert v.main.rule == "failed_link"
    assert [e.line for e in v.main.evidence] == [2]


def test_tokens_of_another_engine_are_no_sign() -> None:
    """Whose death it was is not told: as long as one of the engines may have stopped with it, it counts."""
    lost = CLOSED.format("03:12:00")
    v = diagnose_texts([("a/engine.log", hours(0, 3) + lost), ("b/engine.log", hours())])
    assert v.main.rule == "lost_connection"
    v = diagnose_texts(
        [("a/engine.log", hours(0, 3)), ("b/engine.log", hours(0)), ("nccl.log", LINK.format("03:12:01"))]
    )
    assert v.main.rule == "failed_link"
    rotated = [("engine.log.1", hours(0, 3)), ("engine.log", hours(3)), ("nccl.log", LINK.format("02:50:01"))]
    assert passed(diagnose_texts(rotated)) == ["failed_link"]
    assert passed(diagnose_texts([("engine.log.1", hours(0, 3) + lost), ("engine.log", hours())])) == [
        "lost_connection"
    ]


def test_another_data_parallel_rank_goes_on_without_the_one_that_failed() -> None:
    lost = CLOSED.format("03:12:00").replace("TP1", "DP1 TP0")
    others = hours().replace(" TP0]", " DP0 TP0]")
    both = others + hours().replace(" TP0]", " DP1 TP0]")
    assert (
        diagnose_texts([("e.log", decode("03:00:00", rank=" DP1 TP0") + lost + others)]).main.rule == "lost_connection"
    )
    assert passed(diagnose_texts([("e.log", lost + both)])) == ["lost_connection"]


def test_a_few_requests_that_failed_minutes_ago_are_told_first_while_tokens_flow() -> None:
    """Faults of single requests leave the engine alive: only a stop of the engine comes before them."""
    flows = "".join(decode(f"03:{m:02}:30", more=PD) for m in range(14, 28))
    v = diagnose_texts([("engine.log", ROOMS + flows)])
    assert v.main.cls == "KV_TRANSFER"
    stopped = STOPPED.replace("10:51", "03:33")
    assert diagnose_texts([("engine.log", ROOMS + flows + stopped), ("s.txt", HANG)]).main.cls == "SYMMETRIC_WAIT"


def test_without_anything_of_now_the_old_event_is_a_decoy() -> None:
    dumps = ranks({"sglang::scheduler_TP0": SYNC + LOOP, "sglang::scheduler_TP1": ("work (x.py:3)", *LOOP)})
    v = diagnose_texts([("engine.log", CLOSED.format("03:12:00") + hours() + STOPPED), ("s.txt", dumps)])
    assert v.main.cls != "DEAD_PEER"
    assert any("A peer process died" in d for d in v.main.decoys)
    assert passed(v) == ["lost_connection"]


def test_a_rank_that_raised_and_an_engine_that_made_tokens_for_hours() -> None:
    """vLLM's lines of tokens are the API server's; 503 that come later have another reason."""
    raised = "(Worker_TP1 pid=31) ERROR 10-03 03:12:00 [w.py:12] Traceback (most recent call last):\n(Worker_TP1 pid=31) ERROR 10-03 03:12:00 [w.py:12] ValueError: image too large, skipped\n"
    stats = "(APIServer pid=1) INFO 10-03 {} [loggers.py:310] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 200.0 tokens/s, Running: 9 reqs, Waiting: 0 reqs, GPU KV cache usage: 11.2%, Prefix cache hit rate: 3.0%\n"
    flow = "".join(stats.format(f"0{h}:00:00") for h in range(4, 9))
    refused = "".join(
        f'(APIServer pid=1) INFO:     10.0.0.9:441{i} - "GET /health HTTP/1.1" 503 Service Unavailable\n'
        for i in range(3)
    )
    assert diagnose_texts([("v.log", raised + flow + refused)]).main.cls != "CRASH_LOOKS_LIKE_HANG"
    v = diagnose_texts([("v.log", flow + raised.replace("03:12", "09:12") + refused)])
    assert v.main.rule == "raised_but_up"
    both = (
        raised + flow + raised.replace("03:12", "09:12").replace("ValueError: image too large, skipped", "KeyError: 3")
    )
    assert "KeyError" in diagnose_texts([("v.log", both + refused)]).main.summary


def test_the_engine_that_came_up_again_and_works_has_its_dead_thread_behind_it() -> None:
    prefill = "[2026-10-03 {} TP0] Prefill batch, #new-seq: 2, #new-token: 3000, #cached-token: 0, token usage: 0.2, #running-req: 0, #queue-req: 0, #unbootstrapped-req: 0, #inflight-req: 0\n"
    works = "".join(prefill.format(f"0{h}:00:00") for h in range(5, 9))
    up = "[2026-10-03 03:40:00] The server is fired up and ready to roll!\n"
    again = diagnose_texts([("prefill.log", THREAD + up + works)])
    assert passed(again) == ["helper_thread_dead"]
    # Without a new start the thread is dead still, whatever prefill takes in; but then something reaches it.
    still = diagnose_texts([("prefill.log", THREAD + works)])
    assert (still.main.rule, still.main.certainty) == ("helper_thread_dead", "likely")
    now = diagnose_texts([("prefill.log", works + THREAD.replace("03:12", "09:12"))])
    assert now.main.certainty == "shown"


def test_a_transfer_concerns_both_engines_of_a_pair() -> None:
    """What one of them logged has passed when both went on; one line hours later is no step that was under way."""
    error = "[2026-10-03 03:10:02 TP0] NIXL transfer encountered ERR room=951. Marking Failed.\n"
    failed = ROOMS.split("\n")[1].replace("03:11", "03:15") + "\n"
    taken = "[2026-10-03 {} TP0] Prefill batch, #new-seq: 2, #new-token: 3000, #cached-token: 0, token usage: 0.2, #running-req: 0, #queue-req: 0, #unbootstrapped-req: 0, #inflight-req: 0\n"
    prefill = ("prefill.log", error + taken.format("03:10:04") + taken.format("10:40:00"))
    both = [prefill, ("decode.log", failed + hours(more=PD) + STOPPED), ("decode_s.txt", HANG)]
    assert diagnose_texts(both).main.cls == "SYMMETRIC_WAIT"
    one = [prefill, ("decode.log", hours(0, 3, more=PD) + failed)]
    v = diagnose_texts(one)
    assert v.main.cls == "KV_TRANSFER"
    assert not passed(v)


def test_a_queue_of_a_loop_that_stopped_is_not_that_of_one_that_turns() -> None:
    queued = hours(more=PD.replace("#prealloc-req: 0", "#prealloc-req: 2"))
    assert diagnose_texts([("engine.log", queued)]).main.rule == "queue_stays"
    assert diagnose_texts([("engine.log", queued + STOPPED), ("s.txt", HANG)]).main.cls == "SYMMETRIC_WAIT"


def test_the_line_of_a_step_that_ends_hides_no_kill() -> None:
    kill = "[Sat Oct  3 10:45:04 2026] Out of memory: Killed process 4003 (sglang::schedul) total-vm:6kB\n"
    three = ranks(tp(3, SYNC + LOOP), state="active")
    for tail, cls in ((decode("10:45:08"), "DEAD_PEER"), (hours(11, 13), "SYMMETRIC_WAIT")):
        log = hours() + tail + STOPPED.replace("10:51", "13:51")
        assert diagnose_texts([("dmesg.txt", kill), ("engine.log", log), ("s.txt", three)]).main.cls == cls


def test_a_crash_of_one_data_parallel_rank_counts_though_others_go_on() -> None:
    crash = '[2026-10-03 03:12:00 DP1 TP0] Scheduler hit an exception: Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: no\n'
    others = hours().replace(" TP0]", " DP0 TP0]")
    log = decode("03:00:00", rank=" DP1 TP0") + crash + others
    assert diagnose_texts([("e.log", log)]).main.rule == "crashed_rank"
    v = diagnose_texts([("e.log", log.replace("DP1", "DP0"))])
    assert v.main.cls == "NOT_HUNG_SLOW_OR_CAPACITY"
    assert passed(v) == ["crashed_rank"]
