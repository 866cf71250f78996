"""A rank that is nobody yet: it loads what every rank needs and waits on its standard input for settings."""

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys

import setproctitle

from closeranks.lifeline import end_with_parent

from . import process

LOADED = ("structlog", "zmq", *(f"{__package__}.{name}" for name in ("runner", "weights", "transfer", "collectives")))
WHERE_INSTALLED = ("xgrammar",)


def wait() -> str | None:
    """The path of the settings to serve with, its output from there on in the named log; None: not wanted any more.

    Raises:
        ValueError, KeyError: the line is not what a supervisor writes.
    """
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # into its log; as a rank it has a file for that
    process.quiet_openmp()
    process.bound_primitives()
    setproctitle.setproctitle("closeranks::spare")
    for name in LOADED:
        importlib.import_module(name)
    for name in WHERE_INSTALLED:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    setproctitle.setproctitle("closeranks::spare loaded")
    line = sys.stdin.readline()
    if not line:
        return None
    said = json.loads(line)
    log = os.open(said["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return str(said["settings"])
