"""Sleep until a 32-bit word in shared memory changes: Linux futexes through ctypes (no GIL held while asleep)."""

import ctypes
import errno
import os
import platform

NUMBERS = {"x86_64": 202}
"""The system call by machine. Only machines whose stores are seen in program order by other cores are listed: the
shared-memory collectives publish a message by a plain store after its bytes."""

SUPPORTED = platform.system() == "Linux" and platform.machine() in NUMBERS
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_number = ctypes.c_long(NUMBERS.get(platform.machine(), -1))


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at `address` holds `value`, at most `seconds`; may return early: look again.

    Raises:
        OSError: anything but a wake-up, a changed word, a signal or the end of the time.
    """
    limit = _Timespec(int(seconds), int((seconds % 1) * 1e9))
    done = _syscall(
        _number,
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint(value & 0xFFFFFFFF),
        ctypes.byref(limit),
        ctypes.c_void_p(None),
        ctypes.c_int(0),
    )
    if done == -1:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, f"futex wait: {os.strerror(code)}")


class Waker:
    """Wakes all who sleep on one word; arguments are made once, a wake-up costs one system call."""

    def __init__(self, address: int) -> None:
        self._arguments = (_number, ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(_ALL), None, None, 0)

    def __call__(self) -> None:
        _syscall(*self._arguments)
