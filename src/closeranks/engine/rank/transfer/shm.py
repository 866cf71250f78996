"""Transfers within one host: the writer maps the peer rank's pool file and copies in bounded slices.

Copies run on the transfer thread inside `poll` only, so a write is settled the moment it is no longer polled.
"""

import ctypes
import mmap
import os
from collections import deque
from dataclasses import dataclass, field

import msgspec

from closeranks.protocol import Memory, Peer, Send

from ..planes import Pool
from .plan import PeerUnusable, Piece, Route, pieces, routes

SLICE = 4 << 20
"""Bytes copied per `poll`, about a millisecond."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a pool's file is opened, and the random stamp behind its last byte that proves that it is the one."""

    path: str
    nbytes: int
    stamp: bytes


_address = msgspec.msgpack.Decoder(Address)


class _Target:
    """A peer rank's pool, mapped."""

    def __init__(self, route: Route) -> None:
        self.route = route
        where = _decoded(route.memory)
        try:
            fd = os.open(where.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerUnusable(f"pool of rank {route.memory.rank} cannot be opened: {error}") from error
        try:
            length = os.fstat(fd).st_size
            expected = route.memory.num_pages * route.page_bytes
            if where.nbytes != expected or length < expected + len(where.stamp):
                raise PeerUnusable(f"pool of rank {route.memory.rank} has {length} B, its description says {expected}")
            self._map = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        if self._map[where.nbytes : where.nbytes + len(where.stamp)] != where.stamp:
            self._map.close()
            raise PeerUnusable(f"{where.path} is not the pool of rank {route.memory.rank}: its process has ended")
        self._hold = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(self._hold)

    def close(self) -> None:
        del self._hold
        self._map.close()


def _decoded(memory: Memory) -> Address:
    try:
        return _address.decode(memory.address)
    except msgspec.MsgspecError as error:
        raise PeerUnusable(f"address of rank {memory.rank} is not one of shared memory: {error}") from error


@dataclass
class Write:
    """An open write: the slices that are left to copy, or how it ended."""

    instance: int
    left: deque[tuple[int, Piece]] = field(default_factory=deque)
    ended: str | None = None


class ShmBackend:
    """Backend `shm`; see `base.Backend`. Needs a pool in CPU memory."""

    name = "shm"
    receives = False

    def __init__(self, pool: Pool) -> None:
        if not pool.path:
            raise ValueError(f"transfer backend shm needs a pool in CPU memory, this one is on {pool.device}")
        self._pool = pool
        self.address: bytes = msgspec.msgpack.encode(Address(pool.path, pool.nbytes, pool.stamp))
        self._peers: dict[int, tuple[Peer, list[_Target]]] = {}
        self._open: list[Write] = []

    def meet(self, peer: Peer) -> None:
        known = self._peers.get(peer.instance)
        if known is not None and known[0] == peer:
            return
        if known is not None:
            raise PeerUnusable(f"{peer.engine} instance {peer.instance:x} came again with other memories")
        targets: list[_Target] = []
        try:
            for route in routes(self._pool.shares, self._pool.share_bytes, peer, self.name):
                targets.append(_Target(route))
        except PeerUnusable:
            for target in targets:
                target.close()
            raise
        self._peers[peer.instance] = (peer, targets)

    def start(self, send: Send) -> Write:
        if send.peer not in self._peers:
            raise PeerUnusable(f"peer instance {send.peer:x} is not known")
        targets = self._peers[send.peer][1]
        write = Write(send.peer)
        for index, target in enumerate(targets):
            for piece in pieces(target.route, self._pool.page_bytes, send.pages):
                for at in range(0, piece.length, SLICE):
                    length = min(SLICE, piece.length - at)
                    write.left.append((index, Piece(piece.own + at, piece.theirs + at, length)))
        self._open.append(write)
        return write

    def poll(self, write: Write) -> str | None:
        if write.ended is None:
            targets = self._peers[write.instance][1]
            budget = SLICE
            while write.left and budget > 0:
                index, piece = write.left.popleft()
                ctypes.memmove(targets[index].base + piece.theirs, self._pool.base + piece.own, piece.length)
                budget -= piece.length
            if not write.left:
                write.ended = ""
        if write.ended is not None:
            self._open = [other for other in self._open if other is not write]
        return write.ended

    def moved(self, write: Write) -> int:
        return -len(write.left)

    def drop(self, instance: int) -> bool:
        known = self._peers.pop(instance, None)
        for write in self._open:
            if write.instance == instance and write.ended is None:
                write.ended = "the peer was dropped before every byte was written"
                write.left.clear()
        if known is not None:
            for target in known[1]:
                target.close()
        return True

    def progress(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        for instance in list(self._peers):
            self.drop(instance)
