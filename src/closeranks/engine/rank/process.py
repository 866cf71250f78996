"""What a rank is as a process: its title, its end with its parent, its stacks on a signal, its log."""

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

import setproctitle
import structlog
import zmq
import zmq.auth

from closeranks.lifeline import end_with_parent
from closeranks.output import make_unfailing

from .settings import Settings

_stacks = None


def set_up(settings: Settings) -> None:
    """Once, first thing.

    Raises:
        OSError: the run folder cannot be written.
        SystemExit: the parent is gone already.
    """
    end_with_parent()
    make_unfailing()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; who ends ranks is the leader
    setproctitle.setproctitle(f"closeranks::rank {settings.engine} TP{settings.rank}")
    quiet_openmp()
    bound_primitives()
    sys.setswitchinterval(0.001)  # the step loop wants the interpreter back soon after a collective
    stacks_on_signal(Path(settings.run_dir) / settings.engine / str(settings.epoch) / f"rank{settings.rank}.stacks")
    log_to_stderr(settings)


def quiet_openmp() -> None:
    """Read when torch loads its OpenMP runtime. By default its threads spin for long between operations; on cores
    shared with other ranks, leaders and a gateway they then lose the core in the middle of an operation (10 times
    slower). Where they hardly spin, each of the hundreds of operations of a pass waits for them to wake (decode of one
    row 25 % slower). Set the variable yourself for cores that nothing else uses.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def bound_primitives() -> None:
    """Read when torch loads. oneDNN and torch's layer over it keep what they made for each shape, 1,024 of them by
    default and 0.6 MB each; every number of rows in a step is a shape of every layer, so a rank grew by hundreds of
    megabytes. To make one anew costs about a millisecond.
    """
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "128")


def stacks_on_signal(path: Path) -> None:
    """SIGUSR1 appends the stacks of all threads to `path`, also while the interpreter is stuck."""
    global _stacks
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _stacks = path.open("a")
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    faulthandler.enable()


def log_to_stderr(settings: Settings) -> None:
    """Lines for people on a terminal, JSON elsewhere."""
    render = structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", settings: Settings, name: str) -> "zmq.Socket[bytes]":
    """A socket to the leader under the identity `name:<rank>`, connected; over tcp only with the deployment's key.

    Raises:
        ValueError: tcp without a key file, or a file without a key pair.
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"{name}:{settings.rank}".encode())
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if settings.ranks_endpoint.startswith("tcp:"):
        if not settings.curve_key_file:
            raise ValueError(f"{settings.ranks_endpoint}: tcp needs curve_key_file (`closeranks keygen`)")
        public, secret = zmq.auth.load_certificate(settings.curve_key_file)
        if secret is None:
            raise ValueError(f"{settings.curve_key_file} holds no secret key")
        socket.curve_publickey = public
        socket.curve_secretkey = secret
        socket.curve_serverkey = public
    socket.connect(settings.ranks_endpoint)
    return socket
