"""The rank's notice thread: one socket for everything that is said outside of step reports.

It beats while a step runs, passes on what the transfer thread finished, and says a fault before the process goes. It
holds the interpreter for microseconds twice a second, so it goes on while the forward pass or a collective is stuck.
"""

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

import structlog
import zmq

from closeranks.protocol import FromRank, Progress, RankFault, encode

BEAT_S = 0.5
FLUSH_S = 2.0
"""How long a dying rank waits for its fault to leave the socket."""
EXIT_FAULT = 70
_DETAIL = 4000


class Notices:
    """Sends notices to the leader on `socket`, a DEALER of a context of its own; both are from here on this thread's.

    `post` may be called from any thread and never waits.
    `open_step` is written by the step loop: the step that runs, 0 for none; `ticks` reads its progress.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        epoch: int,
        rank: int,
        ticks: Callable[[], int],
    ) -> None:
        self.open_step = 0
        self._epoch = epoch
        self._rank = rank
        self._ticks = ticks
        self._queue: queue.SimpleQueue[FromRank | None] = queue.SimpleQueue()
        self._socket = socket
        self._faulted = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def post(self, notice: FromRank) -> None:
        """Send a notice, in order."""
        self._queue.put(notice)

    def fault(self, error: BaseException, in_step: bool = False) -> None:
        """Say that this rank raised, then end the process with code 70; the first call decides. From any thread.

        `in_step`: by the thread that runs the steps.
        Returns only where another thread is already saying one.
        """
        if not self._faulted.acquire(blocking=False):
            return
        trace = "".join(traceback.format_exception(error))
        structlog.get_logger().error("rank fault", rank=self._rank, epoch=self._epoch, fault=repr(error), trace=trace)
        said = f"{error}\n{trace[-_DETAIL:]}"
        self.post(RankFault(self._epoch, self._rank, type(error).__name__, said, in_step))
        self.stop()
        os._exit(EXIT_FAULT)

    def wait_for_end(self) -> None:
        """For a thread that raised while another was saying a fault already: that one ends the process."""
        self._thread.join(2 * FLUSH_S)
        os._exit(EXIT_FAULT)

    def stop(self) -> None:
        """Send what is queued and close the socket; waits for the last bytes, bounded."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(2 * FLUSH_S)

    def _run(self) -> None:
        try:
            due = time.monotonic() + BEAT_S
            while True:
                try:
                    notice = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    due = time.monotonic() + BEAT_S
                    step = self.open_step
                    if step:
                        self._socket.send(encode(Progress(self._epoch, self._rank, step, self._ticks())))
                    continue
                if notice is None:
                    break
                self._socket.send(encode(notice))
        except BaseException as error:  # noqa: BLE001 - only the log and the exit code are left
            structlog.get_logger().error("notice thread failed", rank=self._rank, error=repr(error))
            os._exit(EXIT_FAULT)
        finally:
            # Closing alone returns at once and leaves the rest to a thread that a following exit would cut off.
            self._socket.close(linger=int(FLUSH_S * 1000))
            self._socket.context.term()
