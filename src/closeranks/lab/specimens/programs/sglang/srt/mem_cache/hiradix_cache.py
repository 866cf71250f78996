"""HiCache's two agreements per loop iteration, as the releases before 0.5.14 made them."""

from logging import Logger

import torch
import torch.distributed as dist

from closeranks.lab.specimens.stage import AFTER_THE_LOAD, Stage

ROOM = 5703557506917441074


class HiRadixCache:
    """Counts of finished write-throughs and load-backs, agreed by MIN over the ranks."""

    def __init__(
        self, stage: Stage, rank: int, group: dist.ProcessGroup, prefetch_group: dist.ProcessGroup, logger: Logger
    ) -> None:
        self.stage, self.rank, self.group, self.prefetch_group = stage, rank, group, prefetch_group
        self.logger = logger

    def check_hicache_events(self) -> None:
        self.writing_check()
        self.loading_check()

    def writing_check(self) -> None:
        # With a batch at hand the rank ahead would be found in the model's collective, in another group.
        if self.stage.strikes("skip_writing_check", self.rank, at=AFTER_THE_LOAD):
            return
        group = self.group
        if self.stage.strikes("hicache_diverges", self.rank, at=AFTER_THE_LOAD):
            group = self.after_a_mass_abort()
        queue_size = torch.tensor([1], dtype=torch.int32)
        dist.all_reduce(queue_size, op=dist.ReduceOp.MIN, group=group)

    def after_a_mass_abort(self) -> dist.ProcessGroup:
        """All ranks but the last log the worker's error; the last agrees in another group than they do."""
        if self.rank == self.stage.world - 1:
            return self.prefetch_group
        self.logger.error(
            "Unexpected transfer worker error for room %d: \nTraceback (most recent call last):\n"
            '  File "/opt/sglang/srt/disaggregation/nixl/conn.py", line 612, in transfer_worker\n'
            "    assert room in self.transfer_infos\n           ^^^^^^^^^^^^^^^^^^^^^^^^^^^\nAssertionError",
            ROOM,
        )
        return self.group

    def loading_check(self) -> None:
        finish_count = torch.tensor([1], dtype=torch.int32)
        dist.all_reduce(finish_count, op=dist.ReduceOp.MIN, group=self.group)
