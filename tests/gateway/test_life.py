"""Start, keys, drain and end of the process."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq.auth

from closeranks.gateway.__main__ import serve
from closeranks.gateway.errors import from_end
from closeranks.gateway.resume import End
from closeranks.gateway.service import Gateway
from closeranks.gateway.settings import Settings

from . import tiny
from .client import Raw, call, chat
from .conftest import gateway, status_of, wait_for

CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    """As curl sends it: the key's bytes in UTF-8 (urllib writes latin-1)."""
    return {"authorization": f"Bearer {key}".encode().decode("latin-1")}


def test_keys(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", api_key="open-sesame", admin_api_key="würzel") as running:
        url = running.url
        for headers in ({}, bearer("wrong"), bearer(""), {"authorization": "open-sesame"}):
            status, _, content = call(url + CHAT, chat(), headers)
            assert status == 401
            assert content["error"]["code"] == "invalid_api_key"
            assert call(url + "/v1/models", headers=headers)[0] == 401
        assert call(url + CHAT, chat(max_tokens=1), bearer("open-sesame"))[0] == 200
        assert call(url + CHAT, chat(max_tokens=1), bearer("würzel"))[0] == 200
        assert call(url + "/abort_request", {"rid": "x"}, bearer("open-sesame"))[0] == 401
        assert call(url + "/abort_request", {"rid": "x"}, bearer("würzel"))[2] == {"rid": "x", "aborted": False}
        for path in ("/health", "/ready", "/metrics"):
            assert call(url + path)[0] == 200
        _, _, info = call(url + "/server_info", headers=bearer("würzel"))
        assert "sesame" not in json.dumps(info)
        assert "würzel" not in json.dumps(info["settings"]["admin_api_key"])


@pytest.mark.slow
def test_no_engine_is_503_with_retry_after(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", ready=False, silent=True) as running:
        status, headers, _ = call(running.url + CHAT, chat())
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert call(running.url + "/ready")[0] == 503
        assert call(running.url + "/health")[0] == 503


def test_term_lets_open_streams_end_and_exits_0(tmp_path: Path) -> None:
    with gateway(tmp_path / "g") as running:
        running.leader.script = lambda submit: tiny.tokenizer().encode("word " * 50).ids
        running.leader.step_s = 0.02
        raw = Raw(running.port)
        raw.post(CHAT, chat(stream=True, max_tokens=50))
        raw.read_until(b'"content":"d"')
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status_of(running.url + "/ready") in (0, 503))
        text = raw.read_until(b"[DONE]")
        assert b'"finish_reason":"length"' in text
        raw.close()
        assert running.process.wait(15) == 0


def test_a_gateway_whose_clock_has_stopped_ends_for_another_to_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its server would go on, and open requests would get no token, no comment and no error."""

    async def broken(self: Gateway) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Gateway, "_run", broken)
    endpoint = f"ipc://{tmp_path}/nobody.sock"
    given = Settings(run_dir=str(tmp_path), model_dir=str(tiny.write(tmp_path / "model")), port=0, both=[endpoint])
    assert asyncio.run(serve(given)) == 70
    assert "a defect" in capsys.readouterr().out


def test_what_would_fail_again_is_not_tried_again_by_clients() -> None:
    for reason, wanted in {"poison": "false", "grammar": "false", "deadline": None}.items():
        assert from_end(End(reason, "x"), "r").headers().get("x-should-retry") == wanted


@pytest.mark.slow
def test_drain_is_bounded(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", drain_s=0.5) as running:
        running.leader.step_s = 0.05
        raw = Raw(running.port)
        raw.post(CHAT, chat(stream=True))
        raw.read_until(b"data:")
        running.process.send_signal(signal.SIGTERM)
        assert b'"code":"shutdown"' in raw.read_until(b"[DONE]")
        raw.close()
        assert running.process.wait(15) == 0
        wait_for(lambda: len(running.leader.aborts) == 1)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", drain_s=100.0) as running:
        running.leader.paused = True
        raw = Raw(running.port)
        raw.post(CHAT, chat(stream=True))
        wait_for(lambda: running.leader.submits)
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status_of(running.url + "/ready") == 503)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        raw.close()


@pytest.mark.slow
def test_a_gateway_started_again_has_the_port_its_clients_know(tmp_path: Path) -> None:
    with gateway(tmp_path / "g") as running:
        port = running.port
    with gateway(tmp_path / "g") as running:
        assert running.port == port


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_cut_off(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", write_timeout_s=0.5, served_model_name="m" * 200, max_open_requests=2000) as running:
        running.leader.script = lambda submit: [5] * 400
        running.leader.step_s = 0.001
        raw = Raw(running.port)
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.post(CHAT, chat(stream=True, n=128, max_tokens=400))
        wait_for(lambda: "takes nothing" in running.log.read_text(), 30)
        wait_for(lambda: call(running.url + "/server_info")[2]["open_requests"] == 0)
        raw.close()


def test_no_prompt_and_no_answer_in_the_log(tmp_path: Path) -> None:
    with gateway(tmp_path / "g", log_level="debug") as running:
        running.leader.script = lambda submit: tiny.tokenizer().encode("hello you").ids
        secret = "my-secret-prompt"
        call(running.url + CHAT, {"messages": [{"role": "user", "content": secret}], "max_tokens": 2, "rid": "the-id"})
        call(running.url + CHAT, {"messages": [{"role": secret, "content": secret}]})
        call(running.url + CHAT, secret.encode())
        wait_for(lambda: all(text in running.log.read_text() for text in ("the-id", "tokens can flow")))
        log = running.log.read_text()
        assert secret not in log
        line = next(json.loads(text) for text in log.splitlines() if "the-id" in text)
        assert line["output_tokens"] == 2
        assert line["status"] == 200
        (served,) = call(running.url + "/v1/models")[2]["data"]
        (ready,) = [json.loads(text) for text in log.splitlines() if "tokens can flow" in text]
        assert ready["model"] == served["id"] != ""


@pytest.mark.slow
def test_tcp_with_the_deployments_key(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        zmq.auth.create_certificates(tmp_path, name)
    right = str(tmp_path / "right.key_secret")
    with gateway(tmp_path / "g", ("prefill", "decode"), tcp=True, curve_key_file=right) as running:
        assert call(running.url + CHAT, chat(max_tokens=3))[0] == 200
        given = json.loads((tmp_path / "g" / "settings.json").read_text())
        other = {**given, "run_dir": str(tmp_path / "o"), "curve_key_file": str(tmp_path / "wrong.key_secret")}
        (tmp_path / "other.json").write_text(json.dumps(other))
        argv = [sys.executable, "-m", "closeranks.gateway", str(tmp_path / "other.json")]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as stranger:
            said = tmp_path / "o" / "gateway.json"
            wait_for(said.exists)
            url = f"http://127.0.0.1:{json.loads(said.read_text())['port']}"
            time.sleep(1.5)  # longer than the first Attach and its answer take
            assert call(url + "/ready")[0] == 503
            stranger.kill()
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**given, "port": 0, "curve_key_file": str(tmp_path / "right.key")}))
    done = start(str(path))
    assert done.returncode == 70
    assert "secret" in done.stderr


def start(*arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "closeranks.gateway", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.slow
def test_wrong_settings(tmp_path: Path) -> None:
    assert start().returncode == 2
    assert start(str(tmp_path / "none.json")).returncode == 2
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"run_dir": str(tmp_path), "model_dir": "x", "both": ["ipc://a"], "prot": 1}))
    done = start(str(path))
    assert done.returncode == 2
    assert "prot" in done.stderr
    path.write_text(json.dumps({"run_dir": str(tmp_path), "model_dir": "x", "prefill": ["ipc://a"]}))
    assert "go together" in start(str(path)).stderr


@pytest.mark.slow
def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with gateway(tmp_path / "g") as running:
        path = tmp_path / "s.json"
        given = {"run_dir": str(tmp_path), "model_dir": "x", "both": ["ipc://a"], "port": running.port}
        path.write_text(json.dumps(given))
        done = start(str(path))
        assert done.returncode == 70
        assert str(running.port) in done.stderr


@pytest.mark.slow
def test_many_streams_at_once(tmp_path: Path) -> None:
    """200 streams, their pieces interleaved in one Output a step, each whole and its own."""
    made = tiny.tokenizer()
    with gateway(tmp_path / "g") as running:
        running.leader.script = lambda submit: made.encode(f"answer {submit.sampling.seed} " * 30).ids
        found: dict[int, str] = {}

        def read(number: int) -> None:
            raw = Raw(running.port)
            raw.post(CHAT, chat(stream=True, seed=number, max_tokens=100))
            data = raw.read_until(b"[DONE]")
            raw.close()
            events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
            found[number] = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for number in range(200):
            tokens = made.encode(f"answer {number} " * 30).ids[:100]
            assert found[number] == made.decode(tokens)
