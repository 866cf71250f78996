"""What a transfer backend does. All calls come from one thread, the rank's transfer thread.

The promises that everything rests on: a write that is reported as done will never touch the peer's memory again, and
neither will any write to a peer once it is dropped. Passed time, a release, a stopped process prove nothing; a write
that cannot be proven ended stays open, for ever if need be. One that is reported as failed has ended as far as the
backend knows; nobody relies on it before the peer is dropped.
"""

from typing import Protocol, TypeVar

from closeranks.protocol import Peer, Send

WriteT = TypeVar("WriteT")


class Backend(Protocol[WriteT]):
    """Moves pages of this rank's pool into the pools of peer ranks."""

    name: str
    """As in `Memory.backend`."""
    receives: bool
    """Incoming bytes land in `progress` only, which must therefore be called now and then."""
    address: bytes
    """As in `Memory.address`: what a peer needs to write here."""

    def meet(self, peer: Peer) -> None:
        """Make a peer known, as a target and as a writer. Meeting it again with the same memories does nothing.

        Raises:
            PeerUnusable: it cannot be written to; the reason. Later starts raise it again.
        """
        ...

    def start(self, send: Send) -> WriteT:
        """Begin to write pages to a peer that was met.

        Raises:
            PeerUnusable: nothing was and nothing will be written.
        """
        ...

    def poll(self, write: WriteT) -> str | None:
        """Go on with a write. None: open. Empty: every byte is written. Else the error. Not None is final."""
        ...

    def moved(self, write: WriteT) -> int:
        """A number that changes whenever bytes of an open write are known to be written, or of one it waits for."""
        ...

    def drop(self, instance: int) -> bool:
        """Remove a peer; True when done: nothing of it can land here through this backend's own doing any more.

        False while writes to it are open, where removing it would destroy the knowledge of their end: ask again.
        """
        ...

    def progress(self) -> bool:
        """Let incoming bytes land; True if there was work, so that it should be called again soon."""
        ...

    def close(self) -> None:
        """Tear down. Open writes are abandoned: only for the end of the process."""
        ...
