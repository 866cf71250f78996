"""Whatever is posted, the answer is an answer or a client's error, and the gateway goes on."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.gateway import openai

from .client import call
from .conftest import Running

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 0.5, -1, 1e300, "", "auto", "none", "x", "user", "system", "text", "function"]),
    st.text(max_size=8),
)
KEYS = ["role", "content", "type", "text", "function", "name", "x"]
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=8,
)
FIELDS = sorted(openai.ChatRequest.__struct_fields__)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODIES, st.booleans())
def test_chat(service: Running, body: dict[str, Any], sound: bool) -> None:
    if sound:  # around a sound core, so that the later checks are met too
        body = {**body, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        body.pop("max_completion_tokens", None)
        if not isinstance(body.get("n"), int) or body["n"] > 4:
            body.pop("n", None)
    service.leader.script = lambda submit: [104] * 600
    service.leader.step_s = 0.0005
    status, _, content = call(service.url + "/v1/chat/completions", json.dumps(body).encode())
    assert status in (200, 400, 404), content


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes(service: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort_request"):
        status, _, content = call(service.url + path, body)
        assert status == 400, content
