"""What the preflight says of rights."""

import os
import subprocess
import sys

import pytest

from closeranks.watch.check import may_trace, shown
from closeranks.watch.snapshot import Proc


def proc(pid: int) -> Proc:
    return Proc(pid, 1, 1, "rank", "e", 0, "t")


def test_who_has_ended_refuses_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    assert may_trace(proc(ended.pid))
    assert may_trace(proc(os.getpid()))


@pytest.mark.parametrize(("phase", "told"), [("excluded", True), ("suspect", True), ("healthy", False)])
def test_why_an_engine_is_not_healthy_is_shown(phase: str, told: bool) -> None:
    engine = {
        "name": "decode-8000",
        "kind": "closeranks",
        "role": "decode",
        "phase": phase,
        "url": "",
        "why": ["loads"],
    }
    engine |= {"ranks": {"TP0": 7}, "logs": [], "signals": {}, "act": "no"}
    assert (f"{phase:9} loads" in shown({"engines": [engine], "findings": []})) is told
