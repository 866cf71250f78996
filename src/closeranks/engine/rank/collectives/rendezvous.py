"""How the ranks of one host find their shared segment: rank 0 makes it and tells the others when all have asked.

The segment is an anonymous file (memfd), opened by the others under /proc: nothing is left behind by a kill.
"""

import os
import time
from pathlib import Path

import msgspec
import zmq

from .base import CollectiveMismatch, CollectiveTimeout
from .shm import SLOT_BYTES, Shm, segment_bytes


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    size: int
    epoch: int
    instance: int


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    path: str
    problem: str


_ask = msgspec.msgpack.Decoder(_Ask)
_answer = msgspec.msgpack.Decoder(_Answer)


def meet(
    folder: str,
    rank: int,
    size: int,
    epoch: int,
    instance: int,
    *,
    deadline_s: float,
    join_deadline_s: float,
    slot_bytes: int = SLOT_BYTES,
    spin_s: float | None = None,
) -> Shm:
    """Make or find the group's segment; returns when all ranks have asked for it.

    `folder` is one that only this user may enter (a socket is made there). `deadline_s` is the deadline of each later
    wait, `join_deadline_s` that of meeting.

    Raises:
        CollectiveTimeout: not all ranks came; the missing ones are named.
        CollectiveMismatch: a rank of another epoch, instance or group size came.
    """
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    endpoint = f"ipc://{path / f'ranks-{epoch}-{instance:x}.sock'}"
    me = _Ask(rank, size, epoch, instance)
    until = time.monotonic() + join_deadline_s
    context = zmq.Context()
    try:
        if rank == 0:
            fd = os.memfd_create("closeranks-collectives", os.MFD_CLOEXEC)
            os.ftruncate(fd, segment_bytes(size, slot_bytes))
            _host(context, endpoint, me, fd, until)
        else:
            fd = _guest(context, endpoint, me, until)
        try:
            return Shm(fd, rank, size, epoch, deadline_s, slot_bytes, spin_s)
        finally:
            if rank:
                os.close(fd)
    finally:
        context.destroy(linger=1000)


def _host(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, me: _Ask, fd: int, until: float) -> None:
    """Rank 0: collect one ask of every other rank, then answer all of them."""
    socket = context.socket(zmq.ROUTER)
    socket.bind(endpoint)
    asked: dict[int, bytes] = {}
    while len(asked) < me.size - 1:
        if not socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            missing = [r for r in range(1, me.size) if r not in asked]
            raise CollectiveTimeout(0, f"ranks {missing} did not come to {endpoint}")
        name, body = socket.recv_multipart()
        ask = _ask.decode(body)
        expected = _Ask(ask.rank, me.size, me.epoch, me.instance)
        if ask != expected or not 0 < ask.rank < me.size or ask.rank in asked:
            problem = f"rank {ask.rank} came as {ask}, the group is {me}"
            for other in (name, *asked.values()):
                socket.send_multipart([other, msgspec.msgpack.encode(_Answer("", problem))])
            raise CollectiveMismatch(0, problem)
        asked[ask.rank] = name
    answer = msgspec.msgpack.encode(_Answer(f"/proc/{os.getpid()}/fd/{fd}", ""))
    for name in asked.values():
        socket.send_multipart([name, answer])


def _guest(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, me: _Ask, until: float) -> int:
    """Any other rank: ask, wait for the answer, open the segment."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.connect(endpoint)
    socket.send(msgspec.msgpack.encode(me))
    if not socket.poll(max(0, int((until - time.monotonic()) * 1000))):
        raise CollectiveTimeout(me.rank, f"rank 0 did not answer at {endpoint}")
    answer = _answer.decode(socket.recv())
    if answer.problem:
        raise CollectiveMismatch(me.rank, answer.problem)
    return os.open(answer.path, os.O_RDWR | os.O_CLOEXEC)
