"""Transfers through NIXL (nixl-cu12 1.5): one agent per rank; a write is cut into requests, a few under way at a time.

NIXL says of a request that it is under way or has ended, nothing between. So each is kept as small as takes a fraction
of a second: their ends are how a slow connection is told from a stuck one.

What was measured and is relied on here:

- A released request goes on writing. Only DONE or an error of `check_xfer_state` settles it; it is released after.
- Removing a remote agent makes its open requests unknowable (`NOT_FOUND` from then on, whatever they do), and so does
  loading its metadata again. So both wait until the requests to it are settled.
- The agent's own progress thread takes a whole core while idle. It is off: `poll` moves outgoing bytes and `progress`
  incoming ones, which is as fast.
- With UCX_TLS=tcp a write is posted in milliseconds. With UCX's own choice on one host it is done inside the post.
- UCX gives a connection lanes over every network device that it found at its start. Two processes that found different
  ones, since some device came or went between (a container's, a VPN's), may not connect: "endpoint reconfiguration not
  supported yet", and UCX aborts the process. On one host the loopback device is enough, and always there.
- The library crashes at interpreter exit: the rank leaves by `os._exit`.
"""

import os
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from closeranks.protocol import Peer, Send

from ..planes import Pool
from .plan import PeerUnusable, Piece, Route, pieces, routes

_BUSY_S = 50e-6
"""A call that takes longer moved bytes: an empty one takes 2 to 20 µs."""
UNDER_WAY = 4
"""Requests to one peer rank at a time."""
FIRST, LEAST, MOST = 1 << 20, 64 << 10, 8 << 20
"""Bytes of a request: at first, and the bounds between which it follows the speed of the connection."""
SHORT_S, LONG_S = 0.05, 0.5
"""A request that takes less is followed by one of twice its size, one that takes longer by one of half."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A rank's agent and its pool, for writers."""

    agent: str
    metadata: bytes
    base: int
    device: int
    """Number of the CUDA device; -1: CPU memory."""


_address = msgspec.msgpack.Decoder(Address)


def available() -> bool:
    """Whether NIXL can be imported here."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        import nixl_cu12  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass(eq=False)
class Write:
    """An open write: bytes that are not known to be written, and what failed."""

    instance: int
    left: int = 0
    done: int = 0
    errors: list[str] = field(default_factory=list)
    rounds: dict["_Lane", int] = field(default_factory=dict)
    """Lanes that it takes, and the round of each that it has seen."""


@dataclass(eq=False)
class _Request:
    write: Write
    handle: Any
    length: int
    since: float
    failed: bool = False


@dataclass(eq=False)
class _Lane:
    """The way to one peer rank. Writes take it in their order, so that one advances whenever the lane does."""

    route: Route
    address: Address
    queue: deque[tuple[Write, deque[Piece]]] = field(default_factory=deque)
    """What is not posted yet."""
    under_way: list[_Request] = field(default_factory=list)
    size: int = FIRST
    done: int = 0
    """Bytes written so far."""
    rounds: int = 0

    def take(self) -> tuple[Write, list[Piece]]:
        """The next request's pieces, all of one write."""
        write, left = self.queue[0]
        taken: list[Piece] = []
        room = self.size
        while left and room > 0:
            piece = left.popleft()
            if piece.length > room:
                left.appendleft(Piece(piece.own + room, piece.theirs + room, piece.length - room))
                piece = Piece(piece.own, piece.theirs, room)
            taken.append(piece)
            room -= piece.length
        if not left:
            self.queue.popleft()
        return write, taken

    def give_up(self, write: Write | None = None) -> list[Write]:
        """Post nothing more of a write, or (None) of any; the writes that lost something."""
        lost = []
        kept: deque[tuple[Write, deque[Piece]]] = deque()
        for other, left in self.queue:
            if write is None or other is write:
                other.left -= sum(piece.length for piece in left)
                lost.append(other)
            else:
                kept.append((other, left))
        self.queue = kept
        return lost


def one_host(endpoint: str) -> bool:
    """Whether only this host can reach a leader that listens there."""
    return endpoint.startswith(("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))


class NixlBackend:
    """Backend `nixl`; see `base.Backend`. `agent` must be unique per rank and instance; `transport` is UCX_TLS.

    With `local` all peers are on this host. Both only where the environment does not say otherwise. Raises ValueError
    when UCX cannot be set up so.
    """

    name = "nixl"
    receives = True

    def __init__(self, pool: Pool, agent: str, transport: str = "tcp", local: bool = False) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if transport:
            os.environ.setdefault("UCX_TLS", transport)
        if local and os.environ.get("UCX_TLS") == "tcp":
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        from nixl_cu12 import _bindings
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        kinds = _bindings
        self._failed: tuple[type[Exception], ...] = (
            kinds.nixlRemoteDisconnectError,
            kinds.nixlBackendError,
            kinds.nixlCancelledError,
            kinds.nixlNotPostedError,
        )
        """What a request says that has ended without having written everything."""
        self._refused: tuple[type[Exception], ...] = (
            *self._failed,
            kinds.nixlNotFoundError,
            kinds.nixlInvalidParamError,
            kinds.nixlMismatchError,
            kinds.nixlNotSupportedError,
            kinds.nixlNotAllowedError,
        )
        """What comes before anything was posted."""
        self._active: tuple[type[Exception], ...] = (kinds.nixlRepostActiveError, *self._refused)
        """What a release says that could not be done."""
        self._unfit: tuple[type[Exception], ...] = (msgspec.MsgspecError, *self._refused)
        self._pool = pool
        self._device = pool.device.index or 0 if pool.device.type == "cuda" else -1
        self._kind = "DRAM" if self._device < 0 else "VRAM"
        try:
            self._agent = nixl_agent(agent, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except kinds.nixlBackendError as error:
            asked = {name: os.environ[name] for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ}
            said = f"NIXL's UCX cannot be set up with {asked} ({error}); its own lines above say why"
            raise ValueError(f"{said}: give another --nixl-transport, or change the environment") from error
        self._agent.register_memory([(pool.base, pool.nbytes, max(0, self._device), "")], self._kind)
        metadata = self._agent.get_agent_metadata()
        self.address: bytes = msgspec.msgpack.encode(Address(agent, metadata, pool.base, self._device))
        self._peers: dict[int, tuple[Peer, list[_Lane]]] = {}
        self._unsettled: Counter[int] = Counter()
        self._broken: dict[int, str] = {}
        """Instances to which a request failed: UCX never mends an endpoint, only a reloaded agent gets a new one."""

    def meet(self, peer: Peer) -> None:
        known = self._peers.get(peer.instance)
        if known is not None and known[0] == peer:
            return
        if known is not None:
            raise PeerUnusable(f"{peer.engine} instance {peer.instance:x} came again with other memories")
        lanes: list[_Lane] = []
        try:
            for route in routes(self._pool.shares, self._pool.share_bytes, peer, self.name):
                address = _address.decode(route.memory.address)
                self._agent.add_remote_agent(address.metadata)
                lanes.append(_Lane(route, address))
        except self._unfit as error:
            for lane in lanes:
                self._agent.remove_remote_agent(lane.address.agent)
            raise PeerUnusable(f"{peer.engine} instance {peer.instance:x} is refused by NIXL: {error!r}") from error
        self._peers[peer.instance] = (peer, lanes)

    def start(self, send: Send) -> Write:
        if send.peer not in self._peers:
            raise PeerUnusable(f"peer instance {send.peer:x} is not known")
        if send.peer in self._broken:
            self._reconnect(send.peer)
        plans = [(lane, pieces(lane.route, self._pool.page_bytes, send.pages)) for lane in self._peers[send.peer][1]]
        write = Write(send.peer)
        self._unsettled[send.peer] += 1
        for lane, plan in plans:
            write.left += sum(piece.length for piece in plan)
            write.rounds[lane] = lane.rounds
            lane.queue.append((write, deque(plan)))
        for lane, _ in plans:
            self._fill(lane)
        return write

    def _fill(self, lane: _Lane) -> None:
        """Post requests while there is room under way."""
        while lane.queue and len(lane.under_way) < UNDER_WAY:
            self._post(lane, *lane.take())

    def _post(self, lane: _Lane, write: Write, plan: list[Piece]) -> None:
        length = sum(piece.length for piece in plan)
        table = np.array([(p.own, p.theirs, p.length) for p in plan], dtype=np.uint64).reshape(-1, 3)
        own = np.zeros_like(table)
        own[:, 0] = table[:, 0] + np.uint64(self._pool.base)
        own[:, 1] = table[:, 2]
        own[:, 2] = max(0, self._device)
        theirs = np.zeros_like(table)
        theirs[:, 0] = table[:, 1] + np.uint64(lane.address.base)
        theirs[:, 1] = table[:, 2]
        theirs[:, 2] = max(0, lane.address.device)
        kind = "DRAM" if lane.address.device < 0 else "VRAM"
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(own, self._kind),
                agent.get_xfer_descs(theirs, kind),
                lane.address.agent,
            )
        except self._refused as error:
            write.left -= length
            self._fail(lane, write, repr(error))
            return
        request = _Request(write, handle, length, time.monotonic())
        lane.under_way.append(request)
        try:
            agent.transfer(handle)
        except self._failed as error:
            request.failed = True
            self._fail(lane, write, repr(error))

    def _fail(self, lane: _Lane, write: Write, error: str) -> None:
        """A connection that failed once is not used again: nothing more is posted to it before it is made anew."""
        problem = f"rank {lane.route.memory.rank}: {error}"
        self._broken[write.instance] = problem
        for other in {id(x): x for x in (write, *lane.give_up())}.values():
            if problem not in other.errors:
                other.errors.append(problem)
        for way in write.rounds:
            way.give_up(write)

    def _reconnect(self, instance: int) -> None:
        """Load a peer's agents anew after a failure, once nothing to it is open."""
        if self._unsettled[instance] > 0:
            raise PeerUnusable(f"the connection failed ({self._broken[instance]}) and is not mended yet")
        peer, lanes = self._peers.pop(instance)
        del self._broken[instance]
        for lane in lanes:
            self._agent.remove_remote_agent(lane.address.agent)
        self.meet(peer)

    def poll(self, write: Write) -> str | None:
        for lane, seen in write.rounds.items():
            if seen == lane.rounds:  # else another write has just looked after it
                self._look_after(lane)
            write.rounds[lane] = lane.rounds
        if write.left > 0:
            return None
        self._unsettled[write.instance] -= 1
        return "; ".join(write.errors)

    def _look_after(self, lane: _Lane) -> None:
        lane.rounds += 1
        lane.under_way = [request for request in lane.under_way if not self._ended(lane, request)]
        self._fill(lane)

    def moved(self, write: Write) -> int:
        return write.done + sum(
            lane.done for lane in write.rounds if any(waiting is write for waiting, _ in lane.queue)
        )

    def _ended(self, lane: _Lane, request: _Request) -> bool:
        """Whether a request has ended and NIXL let go of it: one that it cannot release may still be under way."""
        try:
            state = self._agent.check_xfer_state(request.handle)
        except self._failed as error:
            state = f"{error!r}"
        if state == "PROC":
            return False
        write = request.write
        if state != "DONE" and not request.failed:
            request.failed = True
            self._fail(lane, write, state)
        try:
            self._agent.release_xfer_handle(request.handle)
        except self._active:
            return False
        write.left -= request.length
        if state == "DONE":
            write.done += request.length
            lane.done += request.length
            took = time.monotonic() - request.since
            if took < SHORT_S:
                lane.size = min(MOST, lane.size * 2)
            elif took > LONG_S:
                lane.size = max(LEAST, lane.size // 2)
        return True

    def drop(self, instance: int) -> bool:
        if self._unsettled[instance] > 0:
            return False
        del self._unsettled[instance]
        self._broken.pop(instance, None)
        known = self._peers.pop(instance, None)
        for lane in known[1] if known else ():
            self._agent.remove_remote_agent(lane.address.agent)
        return True

    def progress(self) -> bool:
        begun = time.perf_counter()
        self._agent.get_new_notifs()
        return time.perf_counter() - begun > _BUSY_S

    def close(self) -> None:
        """Nothing is torn down: only a process's end makes NIXL quiet, and releasing could wait for a dead peer."""
