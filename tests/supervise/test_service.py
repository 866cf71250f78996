"""The service around engines and gateway: what cannot be started now is started later."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from closeranks.supervise.engine import Program
from closeranks.supervise.service import Service

PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("gateway is up", flush=True)
signal.pause()
"""


def test_a_gateway_that_cannot_be_started_is_started_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "waits.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, log = tmp_path / "run", tmp_path / "run" / "gateway.log"
    log.mkdir(parents=True)  # a log that cannot be opened

    async def main() -> int:
        service = Service([], Program("gateway", "waits", {}), sys.executable, run, 5.0)
        serving = asyncio.create_task(service.run())
        said = ""
        while "gateway cannot be started now" not in said:
            await asyncio.sleep(0.05)
            assert not serving.done()
            said += "".join(capfd.readouterr())
        log.rmdir()
        while not log.is_file() or "gateway is up" not in log.read_text():
            await asyncio.sleep(0.05)
            assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        return await serving

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 0
