"""HiCache's agreement on finished write-throughs, once per turn of the loop."""

import threading
import time

import torch
import torch.distributed as dist

WRITE_SECONDS = 0.3
"""Time to copy a request's pages to the host."""
AT_A_TIME = 8
"""Copies that are looked at in one turn. (From 9 int32 on gloo ends the rank whose list is shorter.)"""


class HiRadixCache:
    """`ongoing_write_through`: rooms whose pages are being copied to the host -> when they began."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ongoing_write_through: dict[int, float] = {}
        self._lock = threading.Lock()

    def write_backup(self, room: int) -> None:
        with self._lock:
            self.ongoing_write_through[room] = time.monotonic()

    def forget(self, room: int) -> None:
        """Its request was aborted: nobody waits for the copy."""
        with self._lock:
            self.ongoing_write_through.pop(room, None)

    def check_hicache_events(self) -> None:
        self.writing_check()
        self.loading_check()

    def writing_check(self) -> None:
        """Which copies are finished on every rank: a mask as long as this rank's own list."""
        with self._lock:
            rooms = list(self.ongoing_write_through.items())[:AT_A_TIME]
        now = time.monotonic()
        finished = torch.tensor([int(now - begun > WRITE_SECONDS) for _, begun in rooms] or [0], dtype=torch.int32)
        dist.all_reduce(finished, op=dist.ReduceOp.MIN, group=self.group)
        with self._lock:
            for (room, _), done in zip(rooms, finished.tolist(), strict=False):
                if done:
                    self.ongoing_write_through.pop(room, None)

    def loading_check(self) -> None:
        finish_count = torch.tensor([0], dtype=torch.int32)
        dist.all_reduce(finish_count, op=dist.ReduceOp.MIN, group=self.group)
