"""Redaction: planted secrets go, and redacting twice changes nothing."""

import re

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
    ("redis://:{}@h:6379/0", "pa55"),
    ("http://user:{}@h:80/x", "pa/5@5"),
    ("https://{}@sentry.io/1", "0123456789abcdef"),
    ("GET /m?X-Amz-Signature={}&e=1", "0a1b2c"),
    ("https://x.blob.core.windows.net/c?sv=1&sig={}", "0a1b2c%3D"),
    ("/v1/models?key={}", "0a1b2c"),
    ("next=%3Faccess_token%3D{}", "0a1b2c"),
    ("HF_AUTH={}", "0a1b2c"),
    ("MY_PAT={}", "0a1b2c"),
    ("PGPASS={}", "0a1b2c"),
    ("HF_TOKEN={}", "12345678"),
    ("passphrase={}", "0a1b2c"),
    ('passphrase: "{}"', "two words"),
    ("password is {}", "0a1b2c"),
    ("DB_PASSWORD={}", "a)b]c;d,e&f"),
    ("ssl_keyfile_password='{}'", "it\\'s"),
    ('"password": "{}', "cut off in its middle"),
    ("requirepass {}", "0a1b2c"),
    ("https://hooks.slack.com/services/{}", "T0/B0/0a1b2c"),
    ("https://discord.com/api/webhooks/{}", "1/0a1b2c"),
    ("https://api.telegram.org/{}/sendMessage", "bot1:0a1b2c"),
    ("WEBHOOK_URL={}", "https://example.org/0a1b2c"),
    ("Authorization: Token {}", "0a1b2c 3d4e5f"),
    ("Authorization: Bearer {}", "0a1"),
    ('{{"authorization": "Bearer {}", "x": 1}}', "0a1b2c"),
    ('{{\\"authorization\\": \\"Bearer {}\\"}}', "0a1b2c"),
    ("[(b'authorization', b'Bearer {}')]", "0a1b2c"),
    ('{{"bearer": "{}"}}', "0a1b2c"),
    ('{{"token": "{}"}}', "0a1b2c"),
    ("Cookie: a=1; b={}", "0a1b2c"),
    ("curl -H 'Cookie: a=1; b={}' http://h", "0a1b2c"),
    ("X-Api-Key: {}", "0a1b2c"),
    ("--api-key A,{}", "0a1b2c"),
    ("--api-key A {}", "0a1b2c"),
    ("--api-key 'a b' {}", '"0a 1b"'),
    ("api_key=['A', '{}']", "0a1b2c"),
    ("SGLANG_API_KEYS=A {}", "0a1b2c"),
    ("AWS_SECRET_ACCESS_KEY='{}'", "0a 1b"),
    ("AccountKey={}", "0a1b2c=="),
    ('{{"name": "HF_TOKEN", "value": "{}"}}', "0a1b2c"),
    ("- name: API_KEY\n  value: {}", "0a1b2c"),
    ("mysql -h h -u root -p{}", "0a1b2c"),
    ("curl -u me:{} http://h", "0a1b2c"),
    ("{}", "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpX"),
    ("{}", "github_pat_0123456789abcdefghij"),
    ("{}", "ghp_0123456789abcdefghij"),
    ("{}", "xoxb-1234-5678-abcd"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----", "QUJDREVGR0hJSktMTU5P"),
    ("{}\n-----END RSA PRIVATE KEY-----", "QUJDREVGR0hJSktMTU5P\nQUJDREVGR0hJSktMTU5PUQ=="),
    ("-----BEGIN PRIVATE KEY-----\n{}", "QUJDREVGR0hJSktMTU5P"),
]


@pytest.mark.parametrize(("form", "secret"), SECRETS, ids=[s[0] for s in SECRETS])
def test_secrets_go(form: str, secret: str) -> None:
    clean = redact(f"before {form.format(secret)} ")
    assert not [part for part in re.split(r"[\s/]", secret) if len(part) > 2 and part in clean]
    assert MASK in clean
    assert redact(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "TP0: all_reduce (distributed_c10d.py:3075) ← writing_check",
        "#token: 201344, token usage: 0.31",
        "gen throughput (token/s): 311.2",
        "--tokenizer-worker-num 4",
        "max_tokens cap on every request",
        "Prefill batch, #new-seq: 3, #new-token: 8192, #cached-token: 40960, token usage: 0.44",
        "#retracted_reqs: 4, #new_token_ratio: 0.71 -> 0.90",
        "    sample_token (sampler.py:33)",
        "    parse_cookie (cookies.py:12)",
        "vllm:time_per_output_token_seconds_sum 12.3",
        "eos_token='</s>', pad_token: <pad>, stop_token_ids=[1, 2], api_key=None",
        "--api-key, --admin-api-key",
        "GET /v1/chat/completions?max_tokens=5 HTTP/1.1",
        "bob@example.com wrote https://host:8000/path@v2",
    ],
)
def test_plain_words_stay(text: str) -> None:
    assert redact(text) == text


PIECES = ["\n", " ", ": ", "Bearer ", MASK, "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"]
PIECES += ["api_key", "token", "Cookie", "Authorization", "sig", "password", "s", "x", "7", "--", "://", "@"]
PIECES += list("""=,"'\\[](&?""")


@pytest.mark.parametrize(
    "line",
    [
        "DEBUG 12-01 10:00:00 [kimi_k2_tool_parser.py:200] delta_text: {}",
        "DEBUG 12-01 10:00:00 [mistral_tool_parser.py:90] model_output: {}",
        "(APIServer pid=7) ERROR 12-01 10:00:00 [x.py:9] failed, current_text={}, delta_text={}",
        "  Input should be a valid list [type=list_type, input_value={}, input_type=Any]",
        "self.previous_text = '{}'",
        '{{"level": "debug", "delta_text": "{}"}}',
    ],
)
def test_what_a_parser_logs_of_a_request_goes_without_a_quote_too(line: str) -> None:
    said = redact(line.format(*["what my doctor said"] * 2) + "\nnext line")
    assert "doctor" not in said
    assert said.endswith(f"{MASK}\nnext line")
    assert redact(said) == said


def test_the_further_lines_of_a_text_that_was_logged_go_with_the_first() -> None:
    """vLLM begins each of them as it began the first."""
    prefix = "(APIServer pid=7) DEBUG 12-01 10:00:00 [x.py:9] "
    after = "(APIServer pid=7) DEBUG 12-01 10:00:00 [x.py:10] Tool parser ends"
    text = f"{prefix}model_output: my\n{prefix}doctor\n{prefix}\n{prefix}said\n{after}\n"
    assert redact(text) == f"{prefix}model_output: {MASK}\n{after}\n"


@pytest.mark.parametrize(
    "line",
    [
        "    model_output = self.model_executor.execute_model(scheduler_output)",
        "    return self.extract(current_text=current_text, delta_text=delta_text)",
        "    model_output: model_output",
    ],
)
def test_source_lines_of_a_traceback_stay(line: str) -> None:
    assert redact(f"{line}\n    next line") == f"{line}\n    next line"


@given(st.text(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_idempotent_and_total(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_what_follows_a_secret_stays() -> None:
    assert redact("--api-key A B --tp 4") == f"--api-key {MASK} --tp 4"
    assert redact('{"api_keys": ["A", "B"], "model": "m"}') == f'{{"api_keys": {MASK}, "model": "m"}}'
    assert redact('"GET /x?api_key=abc&n=1 HTTP/1.1" 200 "a"') == f'"GET /x?api_key={MASK}&n=1 HTTP/1.1" 200 "a"'
    assert redact("{'hf_token': 'abc', 'tp': 4}") == f"{{'hf_token': {MASK}, 'tp': 4}}"


FLOODS = ["api_key=x ", "name: x_", "password ", "A" * 64 + "\n", "Cookie: ", "mysql ", "\\", 'api_key="', "api_key=["]
FLOODS += ["-----END PRIVATE KEY-----\n", "-----BEGIN PRIVATE KEY-----"]
FLOODS += ["a", "QUJD+/", "a://b:", "token_", "?a", "x-", "/hook", "b:a@", "eyJ", "sk-", "curl -u", "a="]


@pytest.mark.parametrize("unit", FLOODS)
def test_twice_the_text_takes_twice_the_steps(unit: str) -> None:
    """A quadratic search over so much would not end within the time that a test run is given."""
    redact(unit * (100_000 // len(unit)) + "-----END PRIVATE KEY-----")


def test_addresses_keep_their_identity() -> None:
    assert redact_addresses("10.0.0.1 lost 10.0.0.2, 10.0.0.1") == "ip-1 lost ip-2, ip-1"
