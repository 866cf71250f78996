"""A rank as a process: what it is started with, and how it speaks to its leader."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from closeranks.engine.rank import process
from closeranks.engine.rank.notices import Notices
from closeranks.engine.rank.settings import Settings, read
from closeranks.protocol import Dropped, Progress, decode_from_rank


def settings(**fields: Any) -> Settings:
    return Settings(run_dir="/nowhere", engine="decode", **fields)


def start(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "closeranks.engine.rank", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"page_sise": 16}, "page_sise"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": "16"}, "page_size"),
        ({"rank": 2, "tp_size": 2}, "ranks are 0 .. 1"),
        ({"transfer_backend": "carrier pigeon"}, "transfer_backend"),
    ],
)
def test_wrong_settings_name_the_field(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"run_dir": "/nowhere", "engine": "decode"}))
    assert read(path).page_size == 16
    path.write_text(json.dumps({"run_dir": "/nowhere", "engine": "decode"} | change))
    with pytest.raises(Exception, match=told):
        read(path)


def test_a_process_with_wrong_settings_says_so_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"run_dir": "/nowhere"}')
    done = start(path)
    assert done.returncode == 2
    assert "engine" in done.stderr
    assert "Traceback" not in done.stderr
    done = start(tmp_path / "none.json")
    assert done.returncode == 2
    assert "none.json" in done.stderr


def test_tcp_needs_a_key() -> None:
    context = zmq.Context()
    with pytest.raises(ValueError, match="needs curve_key_file"):
        process.dealer(context, settings(ranks_endpoint="tcp://127.0.0.1:1"), "step")
    context.destroy(linger=0)


def test_over_tcp_only_the_deployment_key_is_heard(tmp_path: Path) -> None:
    context = zmq.Context()
    files = []
    for name in ("ours", "theirs"):
        files.append(zmq.auth.create_certificates(tmp_path, name)[1])
    public, secret = zmq.auth.load_certificate(files[0])
    router = context.socket(zmq.ROUTER)
    router.curve_publickey, router.curve_secretkey, router.curve_server = public, secret or b"", True
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        for file, heard in ((files[0], True), (files[1], False)):
            ours = settings(ranks_endpoint=f"tcp://127.0.0.1:{port}", curve_key_file=file, rank=1, tp_size=2)
            socket = process.dealer(context, ours, "note")
            socket.send(b"hello")
            assert bool(router.poll(5000 if heard else 500)) == heard
            if heard:
                assert router.recv_multipart() == [b"note:1", b"hello"]
            socket.close(linger=0)
    finally:
        context.destroy(linger=0)


def test_notices_keep_their_order_and_beat_only_while_a_step_runs() -> None:
    context = zmq.Context()
    here = context.socket(zmq.PAIR)
    there = context.socket(zmq.PAIR)
    here.bind("inproc://notices")
    there.connect("inproc://notices")
    try:
        notices = Notices(there, epoch=3, rank=1, ticks=lambda: 42)
        notices.start()
        for n in range(5):
            notices.post(Dropped(3, 1, n))
        assert [decode_from_rank.decode(here.recv()).instance for _ in range(5)] == list(range(5))
        assert not here.poll(700)
        notices.open_step = 9
        assert here.poll(5000)
        assert decode_from_rank.decode(here.recv()) == Progress(3, 1, 9, 42)
        notices.stop()
    finally:
        context.destroy(linger=0)
