"""A gateway in place of one that saw engines up lets clients wait for them; one of a new service does not."""

import os
from pathlib import Path

import pytest

from closeranks.gateway.seen import Seen
from closeranks.lifeline import PARENT

from .client import Raw, call, chat
from .conftest import gateway, wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture(params=["supervised", "alone"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "supervised":
        monkeypatch.setenv(PARENT, str(os.getppid()))
    else:
        monkeypatch.delenv(PARENT, raising=False)
    return tmp_path


def test_what_was_seen_counts_until_it_is_forgotten(folder: Path) -> None:
    assert not Seen(folder).before()
    Seen(folder).note()
    assert Seen(folder).before()
    Seen(folder).forget()
    Seen(folder).forget()
    assert not Seen(folder).before()


def test_another_service_has_seen_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Seen(folder).note()
    if PARENT in os.environ:
        monkeypatch.setattr(os, "getppid", os.getpid)  # another process starts it
    else:
        monkeypatch.setenv(PARENT, str(os.getppid()))
    assert not Seen(folder).before()


def test_a_folder_that_takes_nothing_is_no_reason_to_end(folder: Path) -> None:
    seen = Seen(folder / "missing")
    seen.note()
    seen.forget()
    assert not seen.before()
    (folder / "gateway.seen").write_bytes(b"\xff")
    assert not Seen(folder).before()


@pytest.mark.slow
def test_clients_wait_at_a_gateway_in_place_of_one_that_was_killed(tmp_path: Path) -> None:
    with gateway(tmp_path, ("prefill", "decode")):
        wait_for((tmp_path / "gateway.seen").exists)
    with gateway(tmp_path, ("prefill", "decode"), silent=True, ready=False) as running:
        raw = Raw(running.port)
        raw.post(CHAT, chat(max_tokens=3))
        wait_for(lambda: call(running.url + "/server_info")[2]["unplaced_requests"] == 1)
        for leader in running.leaders:
            leader.silent = False
        assert raw.read_until(b"}}").startswith(b"HTTP/1.1 200")
        raw.close()
        running.process.terminate()
        assert running.process.wait(20) == 0
    with gateway(tmp_path, ("prefill", "decode"), silent=True, ready=False) as running:
        # the one before was told to end, and took with it what it knew
        status, headers, content = call(running.url + CHAT, chat())
        assert (status, content["error"]["code"]) == (503, "not_ready")
        assert int(headers["retry-after"]) >= 1
