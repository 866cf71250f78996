"""`python -m closeranks.engine.leader SETTINGS.json`: one leader, one epoch. Exit codes: 0 wanted stop, 70 fault."""

import faulthandler
import logging
import signal
import sys
from pathlib import Path

import msgspec
import structlog
from setproctitle import setproctitle

from ...lifeline import end_with_parent
from ...output import make_unfailing
from .settings import Settings
from .shell import Shell


def main(path: str) -> int:
    """Decode the settings, become the leader, serve."""
    end_with_parent()
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
