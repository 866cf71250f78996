"""Moving pages into the pools of peer engines, and verifying those that arrived."""

from typing import Any

from closeranks.faults import Injector

from ..planes import Pool
from .base import Backend
from .faulty import FaultyBackend
from .nixl import NixlBackend, available, one_host
from .plan import PeerUnusable
from .shm import ShmBackend
from .worker import TransferThread

__all__ = [
    "Backend",
    "FaultyBackend",
    "NixlBackend",
    "PeerUnusable",
    "ShmBackend",
    "TransferThread",
    "choose",
    "make",
    "one_host",
]


def choose(wanted: str) -> str:
    """Name of the backend to use: the wanted one, else NIXL if it imports, else shared memory.

    Raises:
        ValueError: NIXL is wanted and cannot be imported.
    """
    if wanted == "nixl" and not available():
        raise ValueError("transfer_backend nixl: nixl_cu12 cannot be imported; install closeranks[nixl] or use shm")
    return wanted or ("nixl" if available() else "shm")


def make(
    wanted: str, pool: Pool, agent: str, transport: str, local: bool = False, injector: Injector | None = None
) -> Backend[Any]:
    """The backend of a rank; `agent` names it uniquely per instance and rank. `local`: its peers are on this host. With
    an injector its faults act."""
    nixl = choose(wanted) == "nixl"
    backend: Backend[Any] = NixlBackend(pool, agent, transport, local) if nixl else ShmBackend(pool)
    return backend if injector is None else FaultyBackend(backend, injector)
