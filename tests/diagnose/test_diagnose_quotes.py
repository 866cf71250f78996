# ruff: noqa: E501 - evidence stays in one piece, as engines print it
"""Requests that a log prints give no facts: not their line, nor the lines that a prompt with line breaks goes on over."""

import pytest

from closeranks.diagnose import scan
from closeranks.diagnose.collect import collect
from closeranks.diagnose.judge import diagnose_texts
from closeranks.evidence.bundle import from_texts
from tests.diagnose.variants import decode

OOM = "Out of memory: Killed process 77 (sglang::schedul) total-vm:1kB"
XID = "NVRM: Xid (PCI:0000:65:00): 79, pid=4101, GPU has fallen off the bus."
DIED = "Worker proc VllmWorker-1 died unexpectedly"
LIVE = "".join(decode(f"10:00:0{i}") for i in range(4))
RECEIVE = (
    "[2026-10-03 10:00:09] Receive: obj=GenerateReqInput(rid='a', text='{}', sampling_params={{'max_new_tokens': 9}})\n"
)
RECEIVED = "(APIServer pid=1) INFO 10-03 10:00:09 [logger.py:40] Received request chatcmpl-1: prompt: '{}', params: SamplingParams(n=1), lora_request: None.\n"
GENERATED = "(APIServer pid=1) INFO 10-03 10:00:09 [logger.py:40] Generated response chatcmpl-1: output: '{}', output_token_ids: None, finish_reason: stop\n"
FINISH = "[2026-10-03 10:00:09] Finish: obj=GenerateReqInput(rid='a'), out={{'text': '{}'}}\n"
BODY = '{{"ts":"2026-10-03T10:00:09Z","level":"info","body":{{"messages":[{{"role":"user","content":"{}"}}]}}}}\n'
PRINTS = {"receive": RECEIVE, "received": RECEIVED, "generated": GENERATED, "finish": FINISH, "body": BODY}


def kinds(text: str, name: str = "e.log") -> list[str]:
    return [getattr(f, "kind", type(f).__name__) for f in collect(from_texts([(name, text)])).facts]


@pytest.mark.parametrize("said", [OOM, XID, DIED, "Scheduler watchdog timeout (self.watchdog_timeout=300)"])
@pytest.mark.parametrize("form", PRINTS)
def test_what_a_user_pastes_is_no_evidence(form: str, said: str) -> None:
    assert set(kinds(LIVE + PRINTS[form].format(said))) == {"decode_batch"}
    assert diagnose_texts([("e.log", LIVE + PRINTS[form].format(said))]).main.cls == "NOT_HUNG_SLOW_OR_CAPACITY"


@pytest.mark.parametrize("lead", ["debug this:", "debug this (please):", "it's:"])
@pytest.mark.parametrize("form", ["receive", "received", "generated", "finish"])
def test_a_prompt_with_line_breaks(form: str, lead: str) -> None:
    said = f'{lead}\n{OOM}\nTraceback (most recent call last):\n  File "a.py", line 4, in f\nBidError: 41\n[Fri Oct 03 10:00:00 2026] {XID}\n(APIServer pid=1) {DIED}\nthanks'
    assert set(kinds(LIVE + PRINTS[form].format(said) + decode("10:00:10"))) == {"decode_batch"}


@pytest.mark.parametrize("form", PRINTS)
def test_what_follows_a_print_is_evidence(form: str) -> None:
    """A print that ends in its line, or a record after one that does not."""
    assert kinds(PRINTS[form].format("hello") + OOM + "\n") == ["oom_kill"]
    assert kinds(PRINTS[form].format("one\ntwo") + decode("10:00:10") + OOM + "\n")[-1] == "oom_kill"


def test_another_process_is_not_part_of_a_print() -> None:
    text = RECEIVED.format("one\ntwo") + "(Worker_TP1 pid=77) Fatal Python error: Segmentation fault\n"
    assert "fatal" in kinds(text)


def test_the_scheduler_s_own_print_goes_on_after_its_requests() -> None:
    text = "[2026-10-03 10:00:09 TP0] Scheduler debug info:\nscheduler.cur_batch.reqs=[Req(rid=1, origin_input_text='a\nOut of memory: Killed process 7 (x)', )]\n[full] total=9, available=1, evictable=0\n"
    found = kinds(text)
    assert "pool" in found
    assert "oom_kill" not in found


@pytest.mark.parametrize("size", [64, 100, 333])
def test_a_print_over_blocks_of_the_file(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(scan, "BLOCK", size)
    said = "debug this:\n" + f"{OOM}\n" * 9
    assert set(kinds(LIVE + RECEIVE.format(said) + decode("10:00:10"))) == {"decode_batch"}


def test_a_flood_of_prints_hides_no_prompt() -> None:
    prompts = "".join(RECEIVE.format(f"debug this {i}:\n{OOM}") for i in range(scan.KEEP + 50))
    assert "oom_kill" not in kinds(prompts)


def test_a_name_in_prose_is_no_death() -> None:
    assert "engine_dead" not in kinds("2026-10-03 10:00:09 INFO chat: user asked: why EngineDeadError? and how\n")
