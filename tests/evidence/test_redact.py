"""Redaction: planted secrets go, and redacting twice changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.evidence.redact import MASK, redact, redact_addresses

SECRETS = [
    ("--api-key {}", "plainword77"),
    ("HF_TOKEN={}", "hf_AbCdEfGhIjKlMnOp"),
    ("export OPENAI_API_KEY='{}'", "not-a-known-shape"),
    ("Authorization: Bearer {}", "abc.def-ghi"),
    ('"password": "{}"', "hunter2hunter2"),
    ("postgres://user:{}@db:5432/x", "pa55"),
    ("key is {} ok", "sk-proj-AAAABBBBCCCCDDDD1234"),
    ("{}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig-nature"),
    ("aws {}", "AKIAABCDEFGHIJKLMNOP"),
    ("secret_key={}", "q1w2e3r4"),
    ("origin_input_text='{}'", "what my doctor said"),
    ("'messages': [{{'content': '{}'}}]", "what my doctor said"),
]


@pytest.mark.parametrize(("form", "secret"), SECRETS, ids=[s[0] for s in SECRETS])
def test_secrets_go(form: str, secret: str) -> None:
    clean = redact(f"before {form.format(secret)} ")
    assert secret not in clean
    assert MASK in clean


@pytest.mark.parametrize(
    "text",
    [
        "TP0: all_reduce (distributed_c10d.py:3075) ← writing_check",
        "#token: 201344, token usage: 0.31",
        "gen throughput (token/s): 311.2",
        "--tokenizer-worker-num 4",
        "max_tokens cap on every request",
    ],
)
def test_plain_words_stay(text: str) -> None:
    assert redact(text) == text


@given(st.text(max_size=200))
def test_idempotent_and_total(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_addresses_keep_their_identity() -> None:
    assert redact_addresses("10.0.0.1 lost 10.0.0.2, 10.0.0.1") == "ip-1 lost ip-2, ip-1"
