"""Standard output streams that never fail: a log line that the disk does not take must not end who wrote it. A leaf."""

import sys
from typing import IO, Any


class Unfailing:
    """Passes everything on to `inner`; what it refuses (OSError: full disk, closed pipe) is counted in `lost`."""

    def __init__(self, inner: IO[str]) -> None:
        self.inner = inner
        self.lost = 0
        """Characters."""

    def write(self, text: str) -> int:
        try:
            return self.inner.write(text)
        except OSError:
            self.lost += len(text)
            return len(text)

    def flush(self) -> None:
        try:
            self.inner.flush()
        except OSError:
            self.lost += 1  # how much of its buffer stays behind is not known

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def make_unfailing() -> None:
    """Wrap this process's standard output and error; call before anything keeps a reference to them."""
    sys.stdout = Unfailing(sys.stdout)
    sys.stderr = Unfailing(sys.stderr)
