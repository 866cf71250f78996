"""The structs that cross a process border, and nothing else (a leaf: imports no other part of closeranks).

Four conversations, all over ZeroMQ, every frame one msgpack-encoded struct of the named union:

====================  =======================================  ===================================
conversation          downwards                                upwards
====================  =======================================  ===================================
leader  <-> rank      `ToRank`  (Welcome, Step, Compile, Stop) `FromRank` (Joined, Report, notices)
gateway <-> leader    `ToEngine` (Attach, Submit, Abort, ...)  `FromEngine` (Status, Output)
decode  <-> prefill   `PeerMessage`, in both directions: Hello, Grant, Arrived, End, Quiet, Beat
====================  =======================================  ===================================

Words: a *room* is one hand-over, named by `RoomId` (id, generation) and never reused; an *engine* is a leader and its
ranks; an engine lives in *epochs*, each with a random `instance`, so that a restarted engine under the same address is
never taken for its predecessor; a *page* is `page_size` tokens of all planes, cut into one *share* per KV-head group.

Times are seconds, sizes bytes, unless a name says otherwise. Nothing here holds a clock reading of another process:
deadlines travel as seconds left.
"""

from typing import Any, TypeVar

import msgspec

VERSION = 4
"""Raised whenever a struct changes; engines that pair refuse another version, with both values named."""


class RoomId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One hand-over: a random 63-bit `id` made by the gateway, and the attempt's `generation` (1, 2, ...)."""

    id: int
    generation: int

    def __str__(self) -> str:
        return f"{self.id:016x}.{self.generation}"


class Fingerprint(msgspec.Struct, frozen=True):
    """What two engines must have in common to exchange pages. Any difference refuses the pair, both values named."""

    protocol: int
    weights: str
    """Hash of the converted weights' manifest."""
    dtype: str
    page: str
    """Page layout: page size, shares, bytes of a share, planes, e.g. `16 tokens x 3 shares x 245760 B: k,v`."""
    tokenizer: str
    checksum: str
    """Name of the share checksum, e.g. `xxh3_64`."""


# --------------------------------------------------------------------------------------------------------------------
# leader <-> rank
# --------------------------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next tokens of a request are drawn: a function of `seed`, position and the token list, nothing else."""

    temperature: float = 0.0
    """0: greedy (the lowest id among equal maxima)."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1
    """-1: none; 0..20: the chosen token's and that many of the best."""
    grammar: str = ""
    """Empty: none; else a grammar with its kind as prefix (`json_schema:`, `ebnf:`, `structural_tag:`)."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that a grammar admits only at its end; the leader decides stops, not the rank."""


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """A row's first step in this engine: the rank makes the slot anew."""

    sampling: Sampling
    tokens: list[int]
    """All tokens known so far (prompt and, for a resumed or handed-over request, emitted ones); sampler state and
    positions come from here. The rows' `start` says from where on the KV must be computed."""
    prompt_length: int
    """Tokens before this are prompt (matters to penalties)."""
    pages: list[int]
    """Page table at the start."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Work of one request in one step: computes positions `start .. start + count - 1` of the sequence in `slot`.

    The fed tokens are the sequence's own: `Begin.tokens`, then the tokens it sampled, in order; a decode row's single
    token is the one the row of the same slot sampled in an earlier step, taken on the device under overlap.
    """

    slot: int
    start: int
    count: int
    pages: list[int] = []
    """Pages appended to the slot's page table before computing."""
    sample: bool = False
    """Draw the next token after the last position and append it to the slot's tokens."""
    begin: Begin | None = None


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Copy whole pages (all planes, all shares) within the pool, in order, before the rows run."""

    source: int
    target: int


class Send(msgspec.Struct, frozen=True, array_like=True):
    """Write whole pages into a peer's pages, after the rows of this step ran; every rank sends its own shares."""

    transfer: int
    """Number of this transfer, unique within the epoch."""
    room: RoomId
    peer: int
    """The peer's `instance`; must have been introduced by `Step.meet`."""
    pages: list[tuple[int, int]]
    """(own page, peer's page)."""


class Check(msgspec.Struct, frozen=True, array_like=True):
    """Verify arrived pages against the sender's checksums; answered by one `Checked` per rank."""

    room: RoomId
    pages: list[int]
    sums: list[list[int]]
    """Per page: the checksum of each share, by share number (all of them, also other ranks')."""


class Memory(msgspec.Struct, frozen=True):
    """Where one rank's pool lies, for writers of a peer engine. `address` means what `backend` makes of it."""

    backend: str
    rank: int
    shares: list[int]
    """Share numbers that this rank holds, in the order of its memory."""
    num_pages: int
    share_bytes: int
    address: bytes


class Peer(msgspec.Struct, frozen=True):
    """A peer engine's epoch whose memory the ranks may write to (prefill) or are written from (decode)."""

    engine: str
    instance: int
    memories: list[Memory]


class Step(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Step `n` of an epoch. Ranks execute 1, 2, 3, ... without gap; anything else is a fault.

    Order within a step: meet, copies, rows (in the given order, one batched forward pass), then sends, checks and drop
    are handed to the transfer thread.
    """

    epoch: int
    n: int
    rows: list[Row] = []
    copies: list[Copy] = []
    sends: list[Send] = []
    checks: list[Check] = []
    meet: list[Peer] = []
    drop: list[int] = []
    """Peer instances to remove: no page may be written by them once `Dropped` is reported."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Answer to `Joined`: all ranks of the epoch are there, steps may follow."""

    epoch: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The epoch ends as wanted: tear down and exit 0."""

    epoch: int


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Compile a grammar beside the steps; the sampling rank answers with `Compiled`, others have nothing to do.

    A row begins with a grammar only after it was compiled, so no step waits for a compiler.
    """

    epoch: int
    number: int
    """Number of this grammar, unique within the epoch; 0: there is none, only `drop`."""
    grammar: str
    """As in `Sampling.grammar`."""
    drop: list[int] = []
    """Numbers of grammars that no further row begins with."""


ToRank = Step | Welcome | Stop | Compile


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one sampled position, of the distribution before temperature and cuts."""

    chosen: float
    top: list[tuple[int, float]]


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A rank is loaded and warm. All ranks must join with equal fingerprint before the first step."""

    epoch: int
    rank: int
    pid: int
    fingerprint: Fingerprint
    memory: Memory
    num_pages: int
    page_size: int
    context_length: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A rank executed step `n`. Sent by every rank; tokens and log-probabilities by the sampling rank (0) only."""

    epoch: int
    rank: int
    n: int
    digest: int
    """Running 64-bit digest over all steps so far: row order, page tables, shapes, sampled tokens."""
    tokens: list[int] = []
    """One per row with `sample`, in row order."""
    logprobs: list[TopLogprobs | None] = []
    """Empty if no row asked, else one per entry of `tokens`."""
    forward_us: int = 0


class Sent(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Notice: this rank's part of a transfer has ended: it will never write again for it, unless it is `unsure`."""

    epoch: int
    rank: int
    transfer: int
    error: str
    """Empty: every byte was written."""
    sums: list[list[int]]
    """Per page of the `Send`, per own share in `Memory.shares` order."""
    unsure: bool = False
    """It failed after it began: the backend says that it has ended, and only a closed connection proves it."""


class Checked(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Notice: the arrived pages of a room were compared with the sender's checksums."""

    epoch: int
    rank: int
    room: RoomId
    bad: list[tuple[int, int]]
    """(page, share) that differ. Empty: sound."""


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Notice: the peer instance's agent is removed from this rank; nothing of it can land here any more."""

    epoch: int
    rank: int
    instance: int


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Notice, about twice a second while a step runs: `ticks` counts layers and collectives done; it only grows.

    Also of the transfer thread (n and ticks 0), about twice a second while long work of it advances.
    """

    epoch: int
    rank: int
    n: int
    ticks: int
    moving: list[int] = []
    """Transfers that advanced since the last notice, or wait behind one that did."""
    checking: bool = False
    """Checks of arrived pages advanced."""


class RankFault(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Notice: the rank (or its transfer thread) raised; it stops by itself. Ends the epoch."""

    epoch: int
    rank: int
    name: str
    detail: str
    in_step: bool = False
    """Raised where steps run, not by a thread beside them: whoever is in an open step may be the cause."""


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Notice of the sampling rank: a grammar is compiled, or cannot be."""

    epoch: int
    rank: int
    number: int
    error: str
    """What is wrong with it and where; empty: rows may begin with it."""
    size: int = 0
    """Bytes that it takes."""


FromRank = Joined | Report | Sent | Checked | Dropped | Progress | RankFault | Compiled


# --------------------------------------------------------------------------------------------------------------------
# gateway <-> leader
# --------------------------------------------------------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A gateway says it is there, at least once a second; answered by `Status`. Silence ends its rooms (lease)."""

    gateway: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """One attempt at a request, sent to the prefill and to the decode engine alike (once, where one engine is both)."""

    room: RoomId
    rid: str
    tokens: list[int]
    """Prompt and, for a resumed request, all tokens emitted so far."""
    prompt_length: int
    max_new_tokens: int
    """How many more tokens may be sampled, counted from the end of `tokens`; at least 1."""
    sampling: Sampling
    stop_ids: list[int]
    """Tokens that end the request (EOS, stop_token_ids); empty with ignore_eos."""
    deadline_s: float
    """Seconds left for this attempt; the leader ends it with reason `deadline` beyond."""
    peer: str
    """Endpoint of the other engine of the pair; empty: this engine does both."""
    alone: bool = False
    """Twice suspected of breaking a step: batch with nothing else."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """End the room, whatever its state; arriving before its `Submit` it leaves a tombstone."""

    room: RoomId
    reason: str


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Admit nothing new; go on with what is open."""


ToEngine = Attach | Submit | Abort | Drain


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens of one room. `index` is the position in `prompt + output` of the first of them."""

    room: RoomId
    index: int
    tokens: list[int]
    logprobs: list[TopLogprobs] = []


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The room's end, exactly once per (room, engine that was asked)."""

    room: RoomId
    reason: str
    """`stop`, `length`, `abort`, `deadline`, `retract`, `fault`, `peer`, `busy`, `invalid`, `unready` (the
    engine starts or drains: unlike a full queue nothing that the client should hear of)."""
    detail: str
    retryable: bool
    """True: the gateway submits it again under the next generation."""
    retry_after_s: float = 0.0
    charged: bool = False
    """True: it was in the step that failed (see DESIGN, poison requests)."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


class Output(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """What one step released to one gateway: first the tokens, then the ends."""

    tokens: list[Tokens]
    ended: list[Ended]


class Status(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An engine's state of work; counters only grow within an instance."""

    engine: str
    role: str
    """`prefill`, `decode` or `both`."""
    epoch: int
    instance: int
    state: str
    """`starting`, `ready`, `draining`, `faulted`."""
    tp_size: int
    page_size: int
    context_length: int
    max_request_tokens: int
    """Longest prompt + output that the pool can hold."""
    fingerprint: Fingerprint | None
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_owned: int
    pages_quarantined: int
    waiting: int
    running: int
    rooms_open: int
    oldest_wait_s: float
    """Age of the oldest request for which nothing has happened; 0 if none waits."""
    last_progress_s: float
    """Seconds since a step was reported by all ranks."""
    slowest_rank: int
    """The rank that the oldest open step waits for; -1 if none."""
    counters: dict[str, int]
    """`steps`, `prefill_tokens`, `decode_tokens`, `cached_tokens`, `retracted`, `aborted`, `transfers`,
    `transfer_bytes`, `stale_messages`, `bad_shares`, ... exported as `closeranks_*_total`."""
    detail: str = ""


FromEngine = Output | Status


# --------------------------------------------------------------------------------------------------------------------
# decode leader <-> prefill leader. Decode dials prefill. Every message is safe to lose, double and reorder: beats
# list the open rooms, and whoever sees a difference says what it knows again.
# --------------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Who I am; first message of a link, and again to whoever shows that it does not know this instance."""

    engine: str
    """For people: engines may share a name."""
    origin: int
    """Random, kept beside the number of the last epoch: epochs of one origin follow each other, others say nothing."""
    role: str
    epoch: int
    instance: int
    ended_epoch: int
    """Every process of this origin's epochs up to this one has been ended and reaped by its supervisor."""
    fingerprint: Fingerprint
    memories: list[Memory]


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Decode -> prefill: pages are reserved, compute and write."""

    room: RoomId
    instance: int
    """The decode engine's."""
    cached_pages: int
    """Leading pages that decode already has by prefix: not to be sent."""
    pages: list[int]
    """Decode's pages for the sequence's pages `cached_pages ..`, one each, the last one possibly partial."""
    writer: int
    """The prefill engine's instance: only its writes are waited for. Its successor may find the message."""


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Prefill -> decode: all ranks have settled all writes; the first token was agreed."""

    room: RoomId
    instance: int
    """The prefill engine's."""
    token: int
    logprobs: TopLogprobs | None
    sums: list[list[int]]
    """Per granted page, per share number."""
    cached_tokens: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The room has ended here: so it does there. Absorbing; a later message for the room is stale."""

    room: RoomId
    instance: int
    reason: str
    detail: str
    retryable: bool


class Quiet(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Prefill -> decode: proof of quiescence, no writer of this instance writes into the room's pages any more.

    With `torn` it is half a proof: a write failed, so the writers have closed their connections; what is still on its
    way lands until decode's ranks have closed theirs. Decode answers with the same when they have, and prefill connects
    anew.
    """

    room: RoomId
    instance: int
    """The sender's."""
    torn: bool = False


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Lease of both sides, twice a second: the open rooms of this pair as this side sees them."""

    engine: str
    epoch: int
    instance: int
    rooms: list[tuple[RoomId, str]]
    """(room, state name of the sender's room table)."""


PeerMessage = Hello | Grant | Arrived | End | Quiet | Beat

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Struct -> bytes."""

decode_to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
decode_from_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)
decode_to_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToEngine)
decode_from_engine: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromEngine)
decode_peer: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PeerMessage)
"""`.decode(bytes)` raises `msgspec.DecodeError` or `msgspec.ValidationError` on anything that is not of the union."""
