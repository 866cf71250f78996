"""What the gateway logs: nobody who reads its log holds it, and no line is without bounds."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from closeranks.gateway import logs

from .client import Raw, call, chat
from .conftest import gateway

NOPE = b"GET /v1/models/%d HTTP/1.1\r\nhost: x\r\n\r\n"


def test_a_log_that_nobody_reads_holds_no_client_and_no_shutdown(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with gateway(tmp_path, stderr=write_end) as running:
        os.close(write_end)
        raw = Raw(running.port)
        for i in range(600):  # some 200 bytes of log each: a pipe takes 64 KiB
            raw.send(NOPE % i)
            assert raw.read_until(b"}}").startswith(b"HTTP/1.1 404")
        raw.close()
        assert call(running.url + "/health")[0] == 200
        assert b"closeranks_lost_log_lines_total 0.0" in call(running.url + "/metrics")[2]
        assert call(running.url + "/v1/chat/completions", chat(max_tokens=3))[0] == 200
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
    said = b"".join(iter(lambda: os.read(read_end, 65536), b"")).decode().splitlines()
    os.close(read_end)
    assert [json.loads(line)["event"] for line in said[:-1]].count("refused") > 100


def trace(work: Callable[[], object]) -> BaseException:
    with pytest.raises((RecursionError, ValueError)) as caught:
        work()
    return caught.value


def test_a_stack_is_one_bounded_line() -> None:
    def deep() -> int:
        return sorted([1], key=lambda _: deep())[0]  # frames that alternate: no traceback folds them

    line = logs.where(trace(deep))
    assert len(line) < 2000
    assert line.count(" < ") == logs.FRAMES - 1
    assert "\n" not in line


def test_an_exception_is_two_fields_of_its_line() -> None:
    error = trace(lambda: int("y" * 5000))
    for given in (error, (type(error), error, error.__traceback__)):
        event = logs._flatten(None, "error", {"event": "failed", "exc_info": given})
        assert event["exception"].startswith("ValueError: invalid literal")
        assert len(event["exception"]) == logs.SAID
        assert event["stack"].startswith(f"{__file__}:")
    try:
        raise error
    except ValueError:
        assert "exception" in logs._flatten(None, "error", {"event": "failed", "exc_info": True})
    assert logs._flatten(None, "error", {"event": "x", "exc_info": None}) == {"event": "x"}


def test_the_line_in_place_of_lost_ones_has_the_form_of_the_others() -> None:
    line = json.loads(logs._said_lost(7))
    assert (line["lost"], line["part"], line["level"]) == (7, "gateway", "warning")
