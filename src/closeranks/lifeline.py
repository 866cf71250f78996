"""A child ends with the process that started it, also with one that ended before it could ask for that. A leaf."""

import ctypes
import os
import signal

PARENT = "CLOSERANKS_PARENT"
"""Environment variable in which a supervisor hands its pid to what it starts."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends. Raises SystemExit when it has ended already.

    The parent is the one that said so in the environment: a parent that ended while this process was still loading has
    left it to another, which the kernel would wait for in vain.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the parent process ended while this one started")
