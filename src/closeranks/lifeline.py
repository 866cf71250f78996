"""What a child and the process that started it owe each other. A leaf.

A child ends with its parent, also with one that ended before it could ask for that, and shows it that its loop turns.
"""

import contextlib
import ctypes
import os
import signal

PARENT = "CLOSERANKS_PARENT"
"""Environment variable in which a supervisor hands its pid to what it starts."""
HEART = "CLOSERANKS_HEART"
"""Environment variable in which a supervisor hands over the descriptor of the pipe into which a child is to beat."""
BEAT_S = 0.5
"""Between two beats."""
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


class Heart:
    """Shows who started this process that its loop turns; without a parent that listens it does nothing."""

    def __init__(self) -> None:
        said = os.environ.pop(HEART, "")  # it is this process's, not its children's
        self._pipe = int(said) if said else None
        if self._pipe is not None:
            os.set_inheritable(self._pipe, False)

    def beat(self) -> None:
        """Every `BEAT_S`, from the loop itself."""
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a parent that does not look now, or is gone
                os.write(self._pipe, b".")
