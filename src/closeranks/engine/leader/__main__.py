"""`python -m closeranks.engine.leader SETTINGS.json`: one leader, one epoch. Exit codes: 0 wanted stop, 70 fault."""

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import structlog
from setproctitle import setproctitle

from ...output import make_unfailing
from .settings import Settings
from .shell import Shell

PR_SET_PDEATHSIG = 1


def main(path: str) -> int:
    """Decode the settings, become the leader, serve."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # the parent died before the call: nobody would end us
    settings = msgspec.json.decode(Path(path).read_bytes(), type=Settings)
    make_unfailing()
    setproctitle(f"closeranks::leader {settings.engine}")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    shell = Shell(settings)
    stacks = (shell.folder / "leader.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    return shell.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
