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
    here = context.socket(zmq.ROUTER)
    port = here.bind_to_random_port("tcp://127.0.0.1")

    def hear() -> Any:
        assert here.poll(20_000)
        return decode_from_rank.decode(here.recv_multipart()[-1])

    there = zmq.Context().socket(zmq.DEALER)
    there.connect(f"tcp://127.0.0.1:{port}")
    try:
        notices = Notices(there, epoch=3, rank=1, ticks=lambda: 42)
        notices.start()
        for n in range(5):
            notices.post(Dropped(3, 1, n))
        assert [hear().instance for _ in range(5)] == list(range(5))
        assert not here.poll(700)
        notices.open_step = 9
        assert hear() == Progress(3, 1, 9, 42)
        notices.stop()
    finally:
        context.destroy(linger=0)


FAULT = """
import os, sys, time, zmq
from closeranks.engine.rank.notices import Notices
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
notices = Notices(socket, 1, 0, lambda: 0)
notices.start()
notices.fault(ValueError("x" * 100_000))
"""


def test_a_fault_is_said_before_the_process_goes(tmp_path: Path) -> None:
    """Also to a leader that is slow to connect: here it binds only when the rank is dying."""
    endpoint = f"ipc://{tmp_path}/leader.sock"
    dying = subprocess.Popen([sys.executable, "-c", FAULT, endpoint], stderr=subprocess.DEVNULL)
    context = zmq.Context()
    try:
        here = context.socket(zmq.ROUTER)
        here.bind(endpoint)
        assert here.poll(60_000)
        assert decode_from_rank.decode(here.recv_multipart()[-1]).name == "ValueError"
        assert dying.wait(60) == 70
    finally:
        dying.kill()
        dying.wait()
        context.destroy(linger=0)


def test_a_fault_to_nobody_ends_the_process_all_the_same(tmp_path: Path) -> None:
    dying = subprocess.run(
        [sys.executable, "-c", FAULT, f"ipc://{tmp_path}/nobody.sock"],
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert dying.returncode == 70


SHAPES = """
from closeranks.engine.rank import process
process.bound_primitives()
import torch
from closeranks.engine.rank.kernels.packed import PackedLinear

def own() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

torch.set_num_threads(1)
layers = [PackedLinear(torch.randn(width, 64), None) for width in (64, 96, 128, 160)]
with torch.inference_mode():
    for rows in range(1, 301):
        for layer in layers:
            layer(torch.randn(rows, 64))
        if rows == 60:
            before = own()
print(own() - before)
"""


@pytest.mark.slow
def test_a_rank_does_not_grow_with_every_number_of_rows_that_it_has_seen() -> None:
    """What oneDNN made for each shape stayed: 0.6 MB a layer and number of rows, 580 MB in this test."""
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 100 * 1024
