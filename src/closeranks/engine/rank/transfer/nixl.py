"""Transfers through NIXL (nixl-cu12 1.5): one agent per rank, one write request per peer rank and transfer.

What was measured and is relied on here:

- A released request goes on writing. Only DONE or an error of `check_xfer_state` settles it; it is released after.
- Removing a remote agent makes its open requests unknowable (`NOT_FOUND` from then on, whatever they do), and so does
  loading its metadata again. So both wait until the requests to it are settled.
- The agent's own progress thread takes a whole core while idle. It is off: `poll` moves outgoing bytes and `progress`
  incoming ones, which is as fast.
- With UCX_TLS=tcp a write is posted in milliseconds. With UCX's own choice on one host it is done inside the post.
- The library crashes at interpreter exit: the rank leaves by `os._exit`.
"""

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from closeranks.protocol import Peer, Send

from ..planes import Pool
from .plan import PeerUnusable, Route, pieces, routes

_BUSY_S = 50e-6
"""A call that takes longer moved bytes: an empty one takes 2 to 20 µs."""


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


@dataclass
class _Target:
    route: Route
    address: Address


@dataclass
class Write:
    """An open write: the requests that are not settled yet, and what the settled ones said."""

    instance: int
    requests: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class NixlBackend:
    """Backend `nixl`; see `base.Backend`. `agent` must be unique per rank and instance; `transport` is UCX_TLS."""

    name = "nixl"
    receives = True

    def __init__(self, pool: Pool, agent: str, transport: str = "tcp") -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if transport:
            os.environ.setdefault("UCX_TLS", transport)
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
        self._agent = nixl_agent(agent, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(pool.base, pool.nbytes, max(0, self._device), "")], self._kind)
        metadata = self._agent.get_agent_metadata()
        self.address: bytes = msgspec.msgpack.encode(Address(agent, metadata, pool.base, self._device))
        self._peers: dict[int, tuple[Peer, list[_Target]]] = {}
        self._unsettled: Counter[int] = Counter()
        self._broken: dict[int, str] = {}
        """Instances to which a request failed: UCX never mends an endpoint, only a reloaded agent gets a new one."""

    def meet(self, peer: Peer) -> None:
        known = self._peers.get(peer.instance)
        if known is not None and known[0] == peer:
            return
        if known is not None:
            raise PeerUnusable(f"{peer.engine} instance {peer.instance:x} came again with other memories")
        targets: list[_Target] = []
        try:
            for route in routes(self._pool.shares, self._pool.share_bytes, peer, self.name):
                address = _address.decode(route.memory.address)
                self._agent.add_remote_agent(address.metadata)
                targets.append(_Target(route, address))
        except self._unfit as error:
            for target in targets:
                self._agent.remove_remote_agent(target.address.agent)
            raise PeerUnusable(f"{peer.engine} instance {peer.instance:x} is refused by NIXL: {error!r}") from error
        self._peers[peer.instance] = (peer, targets)

    def start(self, send: Send) -> Write:
        if send.peer not in self._peers:
            raise PeerUnusable(f"peer instance {send.peer:x} is not known")
        if send.peer in self._broken:
            self._reconnect(send.peer)
        plans = [
            (target, pieces(target.route, self._pool.page_bytes, send.pages)) for target in self._peers[send.peer][1]
        ]
        write = Write(send.peer)
        self._unsettled[send.peer] += 1
        for target, plan in plans:
            table = np.array([(p.own, p.theirs, p.length) for p in plan], dtype=np.uint64).reshape(-1, 3)
            own = np.zeros_like(table)
            own[:, 0] = table[:, 0] + np.uint64(self._pool.base)
            own[:, 1] = table[:, 2]
            own[:, 2] = max(0, self._device)
            theirs = np.zeros_like(table)
            theirs[:, 0] = table[:, 1] + np.uint64(target.address.base)
            theirs[:, 1] = table[:, 2]
            theirs[:, 2] = max(0, target.address.device)
            kind = "DRAM" if target.address.device < 0 else "VRAM"
            agent = self._agent
            try:
                request = agent.initialize_xfer(
                    "WRITE",
                    agent.get_xfer_descs(own, self._kind),
                    agent.get_xfer_descs(theirs, kind),
                    target.address.agent,
                )
            except self._refused as error:
                self._fail(write, f"rank {target.route.memory.rank}: {error!r}")
                continue
            write.requests.append(request)
            try:
                agent.transfer(request)
            except self._failed as error:
                self._fail(write, f"rank {target.route.memory.rank}: {error!r}")
        return write

    def _fail(self, write: Write, problem: str) -> None:
        write.errors.append(problem)
        self._broken[write.instance] = problem

    def _reconnect(self, instance: int) -> None:
        """Load a peer's agents anew after a failure, once nothing to it is open."""
        if self._unsettled[instance] > 0:
            raise PeerUnusable(f"the connection failed ({self._broken[instance]}) and is not mended yet")
        peer, targets = self._peers.pop(instance)
        del self._broken[instance]
        for target in targets:
            self._agent.remove_remote_agent(target.address.agent)
        self.meet(peer)

    def poll(self, write: Write) -> str | None:
        write.requests = [request for request in write.requests if not self._settled(write, request)]
        if write.requests:
            return None
        self._unsettled[write.instance] -= 1
        return "; ".join(write.errors)

    def _settled(self, write: Write, request: Any) -> bool:
        """Whether a request has ended and NIXL let go of it: one that it cannot release may still be under way."""
        try:
            state = self._agent.check_xfer_state(request)
        except self._failed as error:
            state = f"{error!r}"
        if state == "PROC":
            return False
        if state != "DONE" and state not in write.errors:
            self._fail(write, state)
        try:
            self._agent.release_xfer_handle(request)
        except self._active:
            return False
        return True

    def drop(self, instance: int) -> bool:
        if self._unsettled[instance] > 0:
            return False
        del self._unsettled[instance]
        self._broken.pop(instance, None)
        known = self._peers.pop(instance, None)
        for target in known[1] if known else ():
            self._agent.remove_remote_agent(target.address.agent)
        return True

    def progress(self) -> bool:
        begun = time.perf_counter()
        self._agent.get_new_notifs()
        return time.perf_counter() - begun > _BUSY_S

    def close(self) -> None:
        """Nothing is torn down: only a process's end makes NIXL quiet, and releasing could wait for a dead peer."""
