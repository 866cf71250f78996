"""The ranks of one engine as a group. No other module of closeranks calls torch.distributed collectives."""

from . import futex
from .base import (
    CollectiveBroken,
    CollectiveFault,
    CollectiveMismatch,
    CollectiveTimeout,
    Group,
    Solo,
)
from .dist import Distributed
from .rendezvous import meet

__all__ = [
    "CollectiveBroken",
    "CollectiveFault",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Group",
    "Solo",
    "choose",
    "join",
]


def choose(wanted: str, device: str, rendezvous: str) -> str:
    """`shm`, `gloo` or `nccl`: the wanted one, else what the device and the place of meeting allow."""
    if wanted:
        return wanted
    if device.startswith("cuda"):
        return "nccl"
    return "shm" if futex.SUPPORTED and "/" in rendezvous else "gloo"


def join(
    wanted: str,
    device: str,
    rendezvous: str,
    rank: int,
    size: int,
    epoch: int,
    instance: int,
    *,
    deadline_s: float,
    join_deadline_s: float,
) -> Group:
    """Meet the other ranks; returns when all are there.

    `rendezvous` is a folder (one host) or host:port of rank 0.

    Raises:
        CollectiveTimeout: not all came.
        CollectiveMismatch: one of another epoch, instance or group size came.
        ValueError: shared memory is wanted where it cannot be used.
    """
    if size == 1:
        return Solo(epoch)
    kind = choose(wanted, device, rendezvous)
    if kind == "shm":
        if not futex.SUPPORTED:
            raise ValueError("collectives shm needs Linux on x86-64; use gloo")
        return meet(rendezvous, rank, size, epoch, instance, deadline_s=deadline_s, join_deadline_s=join_deadline_s)
    return Distributed(
        kind, rendezvous, rank, size, epoch, instance, deadline_s=deadline_s, join_deadline_s=join_deadline_s
    )
