"""Broadcast of the requests from the entry rank: an 8-byte size, then the payload if there is any."""

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast_pyobj(data: list[Any], rank: int, group: dist.ProcessGroup) -> list[Any]:
    """The entry rank's list on every rank of `group`."""
    if rank == 0:
        payload = bytearray(json.dumps(data).encode()) if data else bytearray()
        size = torch.tensor([len(payload)], dtype=torch.long)
        dist.broadcast(size, src=0, group=group)
        if payload:
            dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0, group=group)
        return data
    size = torch.zeros(1, dtype=torch.long)
    dist.broadcast(size, src=0, group=group)
    length = int(size.item())
    if not length:
        return []
    received = torch.zeros(length, dtype=torch.uint8)
    dist.broadcast(received, src=0, group=group)
    decoded: list[Any] = json.loads(received.numpy().tobytes())
    return decoded
