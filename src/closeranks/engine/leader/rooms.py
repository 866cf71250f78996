"""Rooms: one explicit transition table, and what a leader knows of each room.

Rules that the table obeys, and tests hold it to:

1. Ends are absorbing. ENDED has no way out; a message for an ended room is stale: counted, answered at most with what
   is known, never acted on. An end that comes first (abort before submit) leaves a tombstone that ends the room at
   its submit or grant.
2. Decode reserves before prefill computes: PREFILL in a pair is reached through GRANT only.
3. Nothing is held while waiting: WAITING, PROMISED, QUEUED and HANDED own neither pages nor slot.
4. Every open state is left within a bound: by the room's deadline, by the lease of the other side, by an abort.
5. Once decode has the pages (CHECKING, RUNNING), what becomes of the prefill engine is no business of the room.
6. Any (state, happening) that is not in the table changes nothing and is counted as stale. Nothing raises.

                     prefill                              decode                         both

    SUBMIT   -> WAITING --GRANT--+             SUBMIT -> WAITING               SUBMIT -> WAITING
    GRANT    -> PROMISED -SUBMIT-+                          | RESERVE                       | ADMIT
                                 v                          v                               v
                              QUEUED                    RESERVED (Grant said)            PREFILL
                                 | ADMIT                    | ARRIVED                       | JOIN
                                 v                          v                               v
                              PREFILL                   CHECKING                         RUNNING
                                 | COMPUTED                 | CHECKED                       | FINISH
                                 v                          v                               v
                              SENDING                   RUNNING                           ENDED
                                 | SETTLED                  | FINISH
                                 v                          v
                              HANDED ---ACK---> ENDED     ENDED
"""

from ...protocol import RoomId

# States. Plain strings: they travel in beats and stand in logs.
WAITING = "waiting"
PROMISED = "promised"
QUEUED = "queued"
PREFILL = "prefill"
SENDING = "sending"
HANDED = "handed"
RESERVED = "reserved"
CHECKING = "checking"
RUNNING = "running"
ENDED = "ended"
NEW = "new"
"""Of no room yet: the state in which SUBMIT and GRANT find an unknown room."""

OPEN = (WAITING, PROMISED, QUEUED, PREFILL, SENDING, HANDED, RESERVED, CHECKING, RUNNING)

# Happenings.
SUBMIT = "submit"
GRANT = "grant"
ADMIT = "admit"
RESERVE = "reserve"
COMPUTED = "computed"
JOIN = "join"
SETTLED = "settled"
ARRIVED = "arrived"
CHECKED = "checked"
FINISH = "finish"
ACK = "ack"
ABORT = "abort"
DEADLINE = "deadline"
PEER_END = "peer_end"
RETRACT = "retract"
BAD = "bad"
FAULT = "fault"

ENDINGS = (ABORT, DEADLINE, PEER_END, RETRACT, BAD, FAULT, FINISH, ACK)

TABLE: dict[tuple[str, str], str] = {
    (NEW, SUBMIT): WAITING,
    (NEW, GRANT): PROMISED,
    (WAITING, GRANT): QUEUED,
    (PROMISED, SUBMIT): QUEUED,
    (QUEUED, ADMIT): PREFILL,
    (WAITING, ADMIT): PREFILL,
    (PREFILL, COMPUTED): SENDING,
    (PREFILL, JOIN): RUNNING,
    (SENDING, SETTLED): HANDED,
    (WAITING, RESERVE): RESERVED,
    (RESERVED, ARRIVED): CHECKING,
    (CHECKING, CHECKED): RUNNING,
    (CHECKING, FINISH): ENDED,
    (CHECKING, BAD): ENDED,
    (RUNNING, FINISH): ENDED,
    (RUNNING, RETRACT): ENDED,
    (PREFILL, RETRACT): ENDED,
    (SENDING, BAD): ENDED,
    (PREFILL, BAD): ENDED,
    (HANDED, ACK): ENDED,
    **{(state, ABORT): ENDED for state in OPEN},
    **{(state, DEADLINE): ENDED for state in OPEN},
    **{(state, PEER_END): ENDED for state in OPEN if state not in (CHECKING, RUNNING)},
    **{(state, FAULT): ENDED for state in OPEN},
}


TOLD = "told"
"""Tombstone of a room that was submitted: its gateway has its end, a submit that comes again is a double."""


class Room:
    """One room at this leader. `length`: tokens at submit; `planned`: positions in issued steps; `reported`: positions
    that all ranks agree on; `sampled`/`emitted`: tokens drawn in issued/agreed steps (decode: the first one included).
    """

    __slots__ = (
        "alone",
        "begun",
        "busy",
        "cached",
        "capacity",
        "check_at",
        "check_n",
        "checked",
        "closing",
        "deadline",
        "emitted",
        "first",
        "form",
        "gateway",
        "hashes",
        "id",
        "instance",
        "length",
        "link",
        "max_new",
        "order",
        "pages",
        "peer",
        "planned",
        "quarantined",
        "reported",
        "rid",
        "said_at",
        "sampled",
        "sent",
        "shared",
        "skip",
        "slot",
        "state",
        "targets",
        "unsettled",
        "waiting_since",
        "writable",
    )

    def __init__(self, room: RoomId, at: float) -> None:
        self.id = room
        self.state = NEW
        self.gateway = ""
        """Empty: no gateway has submitted it yet."""
        self.rid = ""
        self.length = 0
        self.max_new = 0
        self.hashes: list[bytes] = []
        self.waiting_since = at
        self.deadline = at
        self.peer = ""
        self.alone = False
        self.order = 0
        self.form = 0
        """Number of the grammar that is being compiled for it; 0: it waits for none."""
        # what it holds
        self.slot = -1
        self.pages: list[int] = []
        self.shared = 0
        """Leading pages that came from the cache."""
        self.capacity = 0
        """Positions that its pages can hold."""
        # how far it is
        self.planned = 0
        self.reported = 0
        self.sampled = 0
        self.emitted = 0
        self.cached = 0
        """Tokens whose KV came from a prefix cache (decode: as prefill said)."""
        self.begun = False
        self.busy = 0
        """Open steps with a row of it: its pages and slot are held until none is left, whatever its state."""
        self.closing = False
        """Ended, but still holding something."""
        # the pair
        self.link = ""
        """Link over which the hand-over runs; prefill: known from the grant on."""
        self.instance = 0
        """The other engine's instance in this hand-over; 0: none yet."""
        self.writable = False
        """Decode: granted, and not yet proven that nobody writes into `targets` any more."""
        self.said_at = at
        """Decode: when the grant was last said."""
        self.skip = 0
        """Leading pages that decode has already."""
        self.quarantined = False
        """Decode: `targets` are in the pool's quarantine."""
        self.targets: list[int] = []
        """Decode's pages for pages `skip ..`."""
        self.sent = 0
        """Prefill: pages up to this one are in issued steps' sends."""
        self.unsettled = 0
        """Prefill: transfers that some rank has not settled."""
        self.first = False
        """Prefill: the first token is agreed."""
        self.checked = 0
        """Decode: bit per rank that found the arrived pages sound."""
        self.check_n = 0
        """Decode: the step that orders the check; 0: none yet."""
        self.check_at = at
        """Decode: when the check began."""


class Rooms:
    """All rooms of an epoch: the open ones, the ended ones that still hold something, and tombstones of the rest."""

    def __init__(self, tombstones: int) -> None:
        self.open: dict[RoomId, Room] = {}
        self.closing: dict[RoomId, Room] = {}
        self.tombs: dict[RoomId, str] = {}
        """Ended or never seen rooms that must not begin (again) -> why, or TOLD; oldest first, bounded."""
        self.latest: dict[int, RoomId] = {}
        """Open room of each request id."""
        self.bound = tombstones
        self.met: dict[tuple[str, str], int] = {}
        """How often each (state, happening) came up, stale ones included."""
        self.stale: dict[tuple[str, str], int] = {}
        """Happenings that the table does not know, counted by (state, happening)."""

    def move(self, room: Room, happening: str) -> bool:
        """Take the transition if the table has it. False: nothing changed, counted as stale."""
        pair = (room.state, happening)
        self.met[pair] = self.met.get(pair, 0) + 1
        target = TABLE.get(pair)
        if target is None:
            self.count_stale(room.state, happening)
            return False
        if room.state == NEW:
            self.open[room.id] = room
            latest = self.latest.get(room.id.id)
            if latest is None or latest.generation < room.id.generation:
                self.latest[room.id.id] = room.id
        room.state = target
        if target == ENDED:
            del self.open[room.id]
            if self.latest.get(room.id.id) == room.id:
                del self.latest[room.id.id]
            self.bury(room.id, TOLD if room.gateway else happening)
        return True

    def bury(self, room: RoomId, why: str) -> None:
        """Leave a tombstone; beyond the bound the oldest goes. TOLD replaces any other word, nothing replaces TOLD."""
        if room in self.tombs and why != TOLD:
            return
        self.tombs[room] = why
        if len(self.tombs) > self.bound:
            del self.tombs[next(iter(self.tombs))]

    def state_of(self, room: RoomId) -> str:
        known = self.open.get(room)
        if known is not None:
            return known.state
        return ENDED if room in self.tombs else NEW

    def count_stale(self, state: str, happening: str) -> None:
        key = (state, happening)
        self.stale[key] = self.stale.get(key, 0) + 1
