"""A prefill engine on one host, decode engine and gateway on another: two network namespaces, NIXL over TCP, CURVE."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.reference import Reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="making network namespaces needs root and ip"
    ),
]
HOSTS = {"a": "192.0.2.1", "b": "192.0.2.2"}


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Two hosts joined by one link; names of the namespaces by host. Removed with all that runs in them."""
    names = {host: f"cr{os.getpid()}{host}" for host in HOSTS}

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    made = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
        link = {host: f"v{os.getpid()}{host}" for host in HOSTS}
        ip(
            "link",
            "add",
            link["a"],
            "netns",
            names["a"],
            "type",
            "veth",
            "peer",
            "name",
            link["b"],
            "netns",
            names["b"],
        )
        for host, name in names.items():
            ip("-n", name, "addr", "add", f"{HOSTS[host]}/30", "dev", link[host])
            ip("-n", name, "link", "set", link[host], "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def test_pair_over_two_hosts(namespaces: dict[str, str], tiny_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run([sys.executable, "-m", "closeranks.cli.main", "keygen", str(key)], check=True)
    control = {"prefill": f"tcp://{HOSTS['a']}:9000", "decode": f"tcp://{HOSTS['b']}:9000"}
    started = []

    def start(host: str, name: str, *flags: str) -> None:
        argv = ["ip", "netns", "exec", namespaces[host], sys.executable, "-m", "closeranks.cli.main", *flags]
        argv += ["--curve-key-file", str(key), "--run-dir", str(tmp_path / name), "--model-path", str(tiny_model)]
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(argv, stdout=log, stderr=log, env=dict(os.environ, OMP_NUM_THREADS="1")))

    engine = ["--num-pages", "200", "--disaggregation-transfer-backend", "nixl", "--threads", "1"]
    try:
        start("a", "prefill", "serve", "--disaggregation-mode", "prefill", "--control", control["prefill"], *engine)
        start("b", "decode", "serve", "--disaggregation-mode", "decode", "--control", control["decode"], *engine)
        start(
            "b", "gateway", "gateway", "--prefill", control["prefill"], "--decode", control["decode"], "--port", "8000"
        )

        def curl(*words: str) -> tuple[int, str]:
            argv = [
                "ip",
                "netns",
                "exec",
                namespaces["b"],
                "curl",
                "-s",
                "--max-time",
                "30",
                "-w",
                "\n%{http_code}",
                *words,
            ]
            out = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
            text, _, status = out.rpartition("\n")
            return int(status or 0), text

        until = time.monotonic() + 120
        while curl("http://127.0.0.1:8000/ready")[0] != 200:
            logs = "\n".join((tmp_path / f"{n}.log").read_text()[-2000:] for n in ("prefill", "decode", "gateway"))
            assert all(p.poll() is None for p in started), logs
            assert time.monotonic() < until, logs
            time.sleep(0.3)
        expected = Reference(tiny_model).continue_([5 + i % 300 for i in range(150)], 20)
        body = {"model": "default", "prompt": expected.prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        status, text = curl(
            "http://127.0.0.1:8000/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)
        )
        assert status == 200, text
        assert json.loads(text)["choices"][0]["token_ids"] == expected.tokens
    finally:
        for process in started:
            process.terminate()
        codes = [process.wait(60) for process in started]
    assert codes == [0, 0, 0]
