"""Secrets planted in every kind of input never appear in any output."""

import contextlib
import io
import json
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from closeranks.diagnose.collect import collect
from closeranks.diagnose.judge import diagnose_texts
from closeranks.diagnose.report import json_report, markdown, page, terminal
from closeranks.diagnose.verdict import Verdict
from closeranks.evidence.bundle import from_texts
from tests.diagnose.corpus import own, public

CASES = [*public(), *own()]
CANARY = "zqxjkvbpCANARY"
PLANTS = (
    "        Locals:\n            api_key: \"{}\"",
    "        Arguments:\n            self: <Req {}>\n            prompt: \"{}\"",
    "scheduler.cur_batch.reqs=[Req(rid={}, origin_input_text='{}', input_ids=[1, 2])]",
    "Authorization: Bearer {}",
    "python3 -m sglang.launch_server --api-key {} --model-path /m/{} --tp 2",
    "HF_TOKEN={} OPENAI_API_KEY={}",
    "SGLANG_API_KEY={}",
    "VLLM_API_KEY={}",
    "root 41 0.0 Sl python -m vllm.entrypoints.openai.api_server --api-key={}",
    "  41 Sl   sglang::scheduler_TP0 --admin-api-key {}",
    "Process 9: python serve.py --api-key {}",
    "Process 9: sglang::scheduler_TP0 {}",
    'Thread 9 (idle): "Thread-1 ({})"',
    "ValueError: the key {} is not valid",
    "RuntimeError: {} sent {}",
    '[2026-06-17 21:34:44] INFO:     10.0.0.9:1 - "GET /v1/models?key={} HTTP/1.1" 200 OK',
    'data: {{"choices":[{{"delta":{{"content":"{}"}}}}]}}',
    'vllm:num_requests_running{{model_name="{}",engine="{}"}} 3.0',
    "E0908 10:00:01.180 default.go:242] prefill request failed status=500 request_id={}",
    "[2026-06-17 21:34:46 TP0] Received output for rid='{}' but the state was deleted in TokenizerManager.",
    "[2026-06-03 15:10:22 TP0] Abort request in waiting queue. rid='{}'. reason: waiting timeout",
    "WARN dynamo::x: No handler found endpoint={}",
    "server_args=ServerArgs(model_path='{}', api_key='{}', tp_size=2)",
    "server_args={{'model_path': '{}', 'api_key': '{}', 'tp_size': 2}}",
    "Normal   Killing     pod/{}   Stopping container {}",
    "[88.2] Out of memory: Killed process 4 ({}) total-vm:1kB",
    "    {} (app.py:3)  # {}",
    "0, 100 %, {}",
    '{{"version": "2.10", "entries": [{{"profiling_name": "nccl:{}", "process_group": ["{}", "{}"], '
    '"state": "{}", "collective_seq_id": 1}}]}}',
    "Unexpected error postgres://u:{}@db/x",
    "MC_METADATA_SERVER=redis://:{}@db:6379 MOONCAKE_MASTER=redis://:{}@db",
    "python3 -m sglang.launch_server --model-path https://h/m?X-Amz-Signature={} --tokenizer-path redis://:{}@h",
    "Authorization: Token {} {}",
    "Cookie: a=1; b={}",
    "vllm serve m --api-key A,{} --api-key B {} --max-num-seqs 4",
    "SGLANG_API_KEYS=a {} HF_AUTH={} NCCL_AUTH={}",
    "posting to https://hooks.slack.com/services/T0/B0/{}",
    '{{"headers": {{"authorization": "Bearer {}"}}, "loads": [{{"dp_rank": 0, "api_key": "{}"}}]}}',
    "SGLANG_X=https://b.example/?sig={} MC_X=redis://:{}@h",
    "-----BEGIN RSA PRIVATE KEY----- {}",
)  # fmt: skip


def outputs(verdict: Verdict) -> str:
    out = io.StringIO()
    terminal.show(verdict, Console(file=out, width=200))
    return "\n".join(
        (
            out.getvalue(),
            json_report.render(verdict),
            markdown.render(verdict),
            markdown.issue(verdict),
            page.render(verdict),
        )
    )


SHAPES = (
    "sk-" + CANARY,
    "hf_" + CANARY + "1234",
    "ghp_" + CANARY + "12345678",
    "Bearer " + CANARY + "123",
    "my prompt " + CANARY,
)
# Where an identifier of a program stands (a function, a group, a task), a word that is one is shown: it is no place for
# a secret. Secrets of a known shape go even there.
IDENTIFIERS = (13, 23, 24, 25, 27)


@pytest.mark.parametrize("plant", range(len(PLANTS)), ids=[p.strip()[:30] for p in PLANTS])
def test_planted(plant: int) -> None:
    for shape in (*SHAPES, *(() if plant in IDENTIFIERS else (CANARY,))):
        line = PLANTS[plant].format(*[shape] * 4)
        text = "\n".join((line, "[2026-06-17 21:34:46 TP0] " + line, "", line, ""))
        with contextlib.suppress(UnicodeError):
            assert CANARY not in outputs(diagnose_texts([("x.log", text)])), (PLANTS[plant], shape)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from(CASES), seed=st.integers(0, 10**9))
def test_planted_among_real_evidence(case, seed: int) -> None:
    rng = random.Random(seed)
    evidence = []
    for name, text in case[1]:
        lines = text.split("\n")
        for _ in range(8):
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(PLANTS).format(*[rng.choice(SHAPES)] * 4))
        evidence.append((name, "\n".join(lines)))
    assert CANARY not in outputs(diagnose_texts(evidence))


def test_names_of_files_are_redacted() -> None:
    shown = outputs(diagnose_texts([("dump-sk-abcdefghijklmnop.txt", case_text())]))
    assert "sk-abcdefghijklmnop" not in shown


def case_text() -> str:
    return public()[0][1][2][1]


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=1>.log", "x`|<script>1</script>.log", "a](http://evil).log", "```\n# x"]
)
def test_names_of_files_are_text_in_every_output(name: str) -> None:
    verdict = diagnose_texts([(name, case_text()), (name + ".gz", b"\x1f\x8b no archive")])
    for text in (markdown.render(verdict), markdown.issue(verdict), page.render(verdict)):
        assert "<img" not in text
        assert "<script" not in text
        assert "](http" not in re.sub(r"`[^`\n]*`", "", text) or text.startswith("<!doctype")
        assert text.count("\n# x") == 0
        assert text.count("\n```") % 2 == 0


def test_several_words_are_no_identifier_of_a_recorder() -> None:
    entry = {"collective_seq_id": 1, "profiling_name": "nccl:all_reduce", "state": "my prompt " + CANARY}
    dump = {"version": "2.9", "pg_config": {}, "entries": [entry | {"process_group": ["my prompt " + CANARY, "tp"]}]}
    facts = collect(from_texts([("nccl_trace_rank_0.json", json.dumps(dump))])).facts
    assert facts
    assert not any(CANARY in f.says() for f in facts)
