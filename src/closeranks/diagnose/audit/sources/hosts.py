"""This machine: can stacks be taken when they are needed?"""

import os
import shutil
import sys
from pathlib import Path

from closeranks.diagnose.audit.model import Host

CAP_SYS_PTRACE = 19


def this_host(proc: Path = Path("/proc"), search: str | None = None) -> Host:
    """py-spy by PATH (the engines call it so) or beside this Python, Yama's scope, and this process's capability."""
    path = os.environ.get("PATH", "") if search is None else search
    beside = Path(sys.executable).parent
    pyspy = shutil.which("py-spy", path=path) or (shutil.which("py-spy", path=str(beside)) if search is None else None)
    try:
        scope: int | None = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = None  # no Yama in this kernel: the classic rules hold
    status = (proc / "self/status").read_text() if (proc / "self/status").exists() else ""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return Host(pyspy or "", scope, bool(int(effective, 16) >> CAP_SYS_PTRACE & 1), os.geteuid() == 0)
