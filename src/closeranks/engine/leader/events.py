"""What goes into the leader's core and what comes out: frozen structs, the very ones that the step log holds.

The core never sees a token. Events carry lengths, page hashes and flags; effects name rooms and steps, and the shell
fills in tokens, log-probabilities and checksums from its book. `at` is the shell's monotonic clock in seconds: the only
clock the core knows.
"""

import msgspec

from ...protocol import (
    Beat,
    Check,
    Checked,
    Compiled,
    Copy,
    Dropped,
    End,
    Ended,
    Grant,
    Hello,
    Joined,
    Peer,
    Progress,
    Quiet,
    RankFault,
    RoomId,
    Row,
    Send,
)


class Config(msgspec.Struct, frozen=True):
    """Everything that the core's decisions depend on besides events; first record of a log."""

    engine: str
    role: str
    """`prefill`, `decode` or `both`."""
    epoch: int
    instance: int
    origin: int = 0
    ended_epoch: int = 0
    tp_size: int = 1
    page_size: int = 16
    max_running: int = 64
    chunk: int = 512
    overlap: bool = True
    radix: bool = True
    max_waiting: int = 1024
    step_deadline_s: float = 5.0
    transfer_deadline_s: float = 20.0
    transfer_stall_s: float = 4.0
    lease_s: float = 5.0
    beat_s: float = 0.5
    idle_step_s: float = 1.0
    promise_s: float = 10.0
    tombstones: int = 16384
    bad_share_limit: int = 3


# --------------------------------------------------------------------------------------------------------------------
# events
# --------------------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Time passed. Deadlines, leases, beats and the idle step hang on it; about ten a second."""

    at: float


class Attached(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A gateway renewed its lease."""

    at: float
    gateway: str


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`Submit` without its tokens."""

    at: float
    gateway: str
    room: RoomId
    rid: str
    length: int
    """Tokens known: prompt and, for a resumed request, those emitted so far."""
    max_new: int
    hashes: list[bytes]
    """Chain hash of every whole page of the tokens."""
    deadline_s: float
    peer: str
    alone: bool
    flaw: str = ""
    """What the shell found wrong in the request; empty: nothing."""
    form: int = 0
    """Number of the grammar that is being compiled for it: it is not scheduled before; 0: it waits for none."""


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A gateway (or the operator) ends a room."""

    at: float
    gateway: str
    room: RoomId
    reason: str


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Admit nothing new from here on."""

    at: float


class Reported(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """`Report` without its tokens."""

    at: float
    epoch: int
    rank: int
    n: int
    digest: int
    stops: list[int] = []
    """Of rank 0: numbers (among the sampling rows of the step) of the rows whose token is a stop of its room."""
    filled: list[tuple[int, bytes]] = []
    """Of rank 0: (number of the sampling row, chain hash of the page that its token completed)."""
    flaw: str = ""
    """What the shell found wrong in the report, e.g. a wrong number of tokens; empty: nothing."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """`Sent` without its checksums."""

    at: float
    epoch: int
    rank: int
    transfer: int
    error: str
    unsure: bool = False


class RankSaid(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Any other message of a rank, as it came."""

    at: float
    message: Joined | Checked | Dropped | Progress | RankFault | Compiled


class ArrivedNote(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """`Arrived` without token and checksums (takes its tag among `PeerSaid` messages)."""

    room: RoomId
    instance: int
    stop: bool
    """The first token is one of the room's stops."""
    cached_tokens: int
    filled: bytes = b""
    """Chain hash of the page that the first token completed, if it did."""
    flaw: str = ""


class PeerSaid(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A message over a link to another leader. `link`: endpoint dialled (decode) or socket identity (prefill)."""

    at: float
    link: str
    message: Hello | Grant | ArrivedNote | End | Quiet | Beat


Event = Tick | Attached | Submitted | Aborted | Drained | Reported | Settled | RankSaid | PeerSaid


# --------------------------------------------------------------------------------------------------------------------
# effects
# --------------------------------------------------------------------------------------------------------------------


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Issue step `n` to every rank. `rows` lack their `begin`, `checks` their sums: the shell fills them."""

    n: int
    rows: list[Row]
    copies: list[Copy]
    sends: list[Send]
    checks: list[Check]
    meet: list[Peer]
    drop: list[int]
    begins: list[tuple[int, RoomId]]
    """(index into `rows`, room) of rows that begin a slot; their page table so far is `tables[i]`."""
    tables: list[list[int]]
    samplers: list[RoomId]
    """Room of each sampling row, in row order."""


class Release(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All ranks agree on step `n`: its tokens may leave, but for the sampling rows in `dropped` (of ended rooms)."""

    n: int
    dropped: list[int]


class ReleaseFirst(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Decode: the token that came with `Arrived` may leave."""

    room: RoomId


class SayEnded(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Tell a gateway of a room's end; the shell forgets the room's tokens."""

    gateway: str
    ended: Ended


class SayPeer(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Send a message over a link."""

    link: str
    message: Hello | Grant | End | Quiet | Beat


class SayArrived(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Prefill: say `Arrived`; token, log-probabilities and sums from the book."""

    link: str
    room: RoomId
    pages: list[int]
    """The peer's pages, in the order of its grant."""
    cached_tokens: int


class Dial(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Open a link to a peer's endpoint."""

    endpoint: str


class Hangup(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Close a dialled link."""

    endpoint: str


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The room is of no more interest: the shell forgets its tokens and sums, with nobody to tell."""

    room: RoomId


class Greet(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """All ranks have joined with one fingerprint: send `Welcome` to each."""


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The epoch is over. Flush, leave evidence, exit."""

    name: str
    detail: str
    rank: int
    """The rank that is suspected; -1: none."""
    n: int
    """The step that failed, or the oldest of those that may have; 0: none."""
    charged: list[RoomId]


Effect = Plan | Release | ReleaseFirst | SayEnded | SayPeer | SayArrived | Dial | Hangup | Forget | Greet | Fault
