"""Whether an earlier gateway of this service has seen its engines up: a note in the run folder.

A gateway that was killed and started again cannot tell an engine that recovers from one that never was there, and only
for the first should clients wait. A gateway that ends as wanted takes its note with it. One of another supervisor (each
start of a service has its own) does not count, nor does one that is older than the machine's start.
"""

import os
from pathlib import Path

import structlog

from closeranks.lifeline import PARENT

log = structlog.get_logger()


class Seen:
    """The note. A disk that does not take it costs a warning: clients of the next gateway are then sent away."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gateway.seen"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._service = f"{boot} {_started(os.getppid()) if PARENT in os.environ else 'alone'}\n"

    def before(self) -> bool:
        """Whether an earlier gateway left its note."""
        try:
            return self._path.read_text() == self._service
        except FileNotFoundError:
            return False
        except (OSError, UnicodeDecodeError) as error:
            log.warning("unreadable", path=str(self._path), error=str(error))
            return False

    def note(self) -> None:
        """Engines are up."""
        try:
            self._path.write_text(self._service)
        except OSError as error:
            log.warning("cannot be written", path=str(self._path), error=str(error))

    def forget(self) -> None:
        """This gateway ends as wanted."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot be removed", path=str(self._path), error=str(error))


def _started(pid: int) -> str:
    """A process as none after it is named: its pid and when it started."""
    return f"{pid} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
