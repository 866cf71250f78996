"""What the preflight says of rights."""

import os
import subprocess
import sys

from closeranks.watch.check import may_trace
from closeranks.watch.snapshot import Proc


def proc(pid: int) -> Proc:
    return Proc(pid, 1, 1, "rank", "e", 0, "t")


def test_who_has_ended_refuses_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    assert may_trace(proc(ended.pid))
    assert may_trace(proc(os.getpid()))
