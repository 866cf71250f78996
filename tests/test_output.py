"""A log that cannot be written is no reason to end."""

import subprocess
import sys

PROGRAM = """
from closeranks.output import make_unfailing
make_unfailing()
import sys, structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
for _ in range(2000):
    structlog.get_logger().error("into a full disk", text="x" * 100)
    print("and here", flush=True)
import faulthandler
faulthandler.enable()
raise SystemExit(0 if sys.stderr.lost > 0 else 3)
"""


def test_a_full_disk_under_the_log_ends_nobody() -> None:
    with open("/dev/full", "w") as full:  # every write fails with ENOSPC
        assert subprocess.run([sys.executable, "-c", PROGRAM], stdout=full, stderr=full, check=False).returncode == 0


def test_without_it_the_same_ends() -> None:
    plain = PROGRAM.replace("make_unfailing()\nimport sys", "import sys")
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", plain], stdout=full, stderr=full, check=False).returncode != 0
