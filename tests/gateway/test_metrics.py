"""A page that Prometheus takes: no series twice."""

from collections import Counter

import pytest

from closeranks.gateway.metrics import Metrics
from closeranks.gateway.resume import Requests
from closeranks.gateway.router import Router

from .test_resume import status


def labels(decode: list[str]) -> set[str]:
    router = Router(["p"], decode, [], 5.0)
    metrics = Metrics(router, Requests(router), lambda: 0.5)
    router.on_status("p", status("prefill", counters={"steps": 1}), 0.0)
    for endpoint in decode[:2]:  # the third has not said anything yet
        router.on_status(endpoint, status("decode", counters={"steps": 1}), 0.0)
    lines = [line.rsplit(" ", 1)[0] for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    assert [line for line, n in Counter(lines).items() if n > 1] == []
    return {line for line in lines if line.startswith("closeranks_engine_up")}


@pytest.mark.parametrize(
    ("decode", "wanted"), [(["d"], {"decode"}), (["d", "e", "f"], {"decode@d", "decode@e", "decode@f"})]
)
def test_engines_of_a_role_are_told_apart(decode: list[str], wanted: set[str]) -> None:
    assert labels(decode) == {f'closeranks_engine_up{{engine="{name}"}}' for name in {"prefill", *wanted}}
