# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""Health is the most dangerous verdict: whatever speaks of work or of a failure must take its certainty away."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.verdict import SOUND
from tests.diagnose.corpus import own, public

CAPTURES = Path(__file__).parent.parent / "corpus" / "captures"


def capture(name: str) -> list[tuple[str, str]]:
    """A capture of a real program, made with py-spy and scrapes."""
    found = json.loads((CAPTURES / f"{name}.json").read_text(encoding="utf-8"))
    return [(f["name"], f["text"]) for f in found]


HEALTHY = [
    *((n, e, c) for n, e, c, *_ in (*public(), *own()) if c in SOUND),
    ("idle capture", capture("idle"), "HEALTHY_IDLE"),
]
SHOWN_IDLE = [(n, e) for n, e, c in HEALTHY if c == "HEALTHY_IDLE" and diagnose_texts(e).main.certainty == "shown"]
SHOWN = [(n, e) for n, e, _ in HEALTHY if diagnose_texts(e).main.certainty == "shown"]

LABELS = '{engine_type="decode",model_name="m",pp_rank="0",tp_rank="0"}'
WORK_GAUGES = [
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_grammar_queue_reqs",
    "sglang:num_retracted_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
    "sglang:num_decode_host_receive_queue_reqs",
    "sglang:num_decode_deferred_kv_release_reqs",
    "sglang:num_unique_running_routing_keys",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_swapped",
    "vllm:num_requests_waiting_by_reason",
    "vllm:num_requests_kv_fetch_by_stage",
    "dynamo_component_inflight_requests",
    "dynamo_frontend_queued_requests",
    "sglang_num_decode_transfer_queue_reqs",
]
LOAD_KEYS = [
    "prefill_bootstrap_queue_reqs",
    "prefill_inflight_queue_reqs",
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
    "decode_retracted_queue_reqs",
]
FAILURES = (
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error",
    "[2026-06-17 21:34:31 TP2] Scheduler hit an exception: Traceback (most recent call last):",
    "[2026-06-17 21:34:31 TP2] Decode transfer failed for request rank=0 decode_req.req.rid='x' bootstrap_room=77 with exception KVTransferError(bootstrap_room=77): timeout",
    "ERROR 06-17 21:34:31 [core.py:950] EngineCore encountered a fatal error.",
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    '[2026-06-17 21:34:31] INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 503 Service Unavailable',
    '[2026-06-17 21:34:31] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 499 Unknown',
    "[12345.678901] Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB, anon-rss:1kB, file-rss:0kB",
    "[12345.678901] NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus.",
    "[rank3]:[E617 21:34:31.1 ProcessGroupNCCL.cpp:682] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.",
    "USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND\nroot 4242 0.0 0.0 0 0 ? Z 10:00 0:00 sglang::scheduler_TP1",
)  # fmt: skip


def healthy_and_sure(evidence: list[tuple[str, str]]) -> bool:
    main = diagnose_texts(evidence).main
    return main.cls in SOUND and main.certainty == "shown"


def test_there_is_something_to_test() -> None:
    assert len(SHOWN_IDLE) >= 3
    assert len(SHOWN) > len(SHOWN_IDLE)


def test_a_transfer_queue_that_only_grows_is_no_idle_engine() -> None:
    verdict = diagnose_texts(capture("stuck_transfer"))
    assert verdict.main.cls == "KV_TRANSFER"
    assert not [f for f in verdict.findings if f.cls in SOUND]


def test_one_scrape_with_a_queue_decides_nothing() -> None:
    once = [(n, t) for n, t in capture("stuck_transfer") if n not in ("metrics_1.txt", "loads.json")]
    assert diagnose_texts(once).main.cls == "UNDETERMINED"
    loads_only = [(n, t) for n, t in capture("stuck_transfer") if not n.startswith("metrics")]
    assert diagnose_texts(loads_only).main.cls == "UNDETERMINED"


@pytest.mark.parametrize("gauge", WORK_GAUGES)
@pytest.mark.parametrize(("name", "evidence"), SHOWN_IDLE[:2], ids=[n for n, _ in SHOWN_IDLE[:2]])
def test_any_gauge_of_open_work_rules_idle_out(name: str, evidence: list, gauge: str) -> None:
    found = diagnose_texts([*evidence, ("more_metrics.txt", f"{gauge}{LABELS} 3.0\n")])
    assert found.main.cls not in SOUND


@pytest.mark.parametrize("key", [*LOAD_KEYS, "num_running_reqs", "num_waiting_reqs"])
@pytest.mark.parametrize(("name", "evidence"), SHOWN_IDLE[-2:], ids=[n for n, _ in SHOWN_IDLE[-2:]])
def test_any_load_of_open_work_rules_idle_out(name: str, evidence: list, key: str) -> None:
    load = {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 0, "disaggregation": {}}
    (load if key in load else load["disaggregation"])[key] = 2
    found = diagnose_texts([*evidence, ("more.json", json.dumps({"loads": [load]}))])
    assert found.main.cls not in SOUND


@pytest.mark.parametrize("line", FAILURES, ids=lambda line: line[:40])
@pytest.mark.parametrize(("name", "evidence"), SHOWN, ids=[n for n, _ in SHOWN])
def test_any_sign_of_failure_takes_the_certainty_away(name: str, evidence: list, line: str) -> None:
    assert not healthy_and_sure([*evidence, ("more.log", line + "\n")])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(SHOWN_IDLE),
    st.lists(st.sampled_from(WORK_GAUGES), min_size=1, max_size=4),
    st.lists(st.sampled_from(FAILURES), max_size=3),
    st.integers(1, 10**6),
    st.booleans(),
)
def test_health_never_survives_what_is_added(
    case: tuple, gauges: list[str], lines: list[str], count: int, first: bool
) -> None:
    more = [("a_metrics.txt", "".join(f"{g}{LABELS} {count}\n" for g in gauges)), ("b.log", "\n".join(lines) + "\n")]
    assert not healthy_and_sure([*more, *case[1]] if first else [*case[1], *more])


def test_a_rank_that_was_killed_did_not_crash() -> None:
    """Its peers raise and leave because their connections closed; that is no crash of theirs."""
    main = diagnose_texts(capture("dead_peer")).main
    assert main.cls == "DEAD_PEER"
