"""What /proc says of a process, whatever its name."""

import shutil
import subprocess
from pathlib import Path

from closeranks.evidence import capture


def test_a_name_that_is_cut_inside_a_character_is_read(tmp_path: Path) -> None:
    """The kernel keeps 15 bytes of it."""
    program = tmp_path / "sh模型服务器进程"
    shutil.copy("/bin/sh", program)
    with subprocess.Popen([program, "-c", "while :; do :; done"]) as child:
        try:
            assert not capture.is_stopped(child.pid)
            assert "State" in capture.proc(child.pid)
        finally:
            child.kill()
