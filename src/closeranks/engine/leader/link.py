"""What a leader knows of one peer engine: the link to it, and an instance of it that is gone. Data; see peers.py."""

from __future__ import annotations

from ...protocol import Peer, RoomId
from .rooms import Room

DIALLED = "dialled"
NAMED = "named"
UP = "up"
REFUSED = "refused"


class Link:
    """One link. `name`: the endpoint dialled (decode) or the socket identity (prefill)."""

    __slots__ = (
        "back_at",
        "engine",
        "epoch",
        "failing_since",
        "failures",
        "fence",
        "fence_at",
        "fence_n",
        "heard_at",
        "instance",
        "met",
        "name",
        "num_pages",
        "origin",
        "peer",
        "rooms",
        "said_at",
        "state",
        "suspects",
        "undropped",
        "why",
        "worked",
    )

    def __init__(self, name: str, at: float) -> None:
        self.name = name
        self.state = DIALLED
        self.engine = ""
        self.origin = 0
        """In which its epochs are counted."""
        self.epoch = 0
        self.instance = 0
        self.heard_at = at
        self.back_at = at
        """When something was heard again after a silence."""
        self.said_at = at
        self.peer: Peer | None = None
        """As it is introduced to the ranks."""
        self.num_pages = 0
        """Pages of the peer's pool."""
        self.met = False
        """A step that introduces the instance to the ranks is agreed."""
        self.rooms: dict[RoomId, Room] = {}
        """Rooms handed over, or to be handed over, through this link, also ended ones that still hold something."""
        self.why = ""
        """Why the pair was refused."""
        # see fences.py
        self.fence = ""
        self.fence_at = at
        self.fence_n = 0
        """The step that closes the own connections; 0: not issued yet."""
        self.suspects: dict[RoomId, None] = {}
        """Rooms into whose pages a failed write may still land."""
        self.undropped = 0
        """Bit per own rank that has to close its connection yet."""
        # see reach.py
        self.failures = 0
        """Hand-overs that failed since the last one that worked."""
        self.failing_since = at
        self.worked = False
        """Whether one has worked with this instance."""


class Gone:
    """An instance that was replaced: quarantine lasts until its epoch is reaped and all own ranks dropped it."""

    __slots__ = ("at", "engine", "epoch", "origin", "reaped", "rooms", "undropped")

    def __init__(self, link: Link, at: float) -> None:
        self.engine, self.origin, self.epoch = link.engine, link.origin, link.epoch
        self.at = at
        self.undropped = 0
        self.reaped = False
        self.rooms: dict[RoomId, Room] = {}
