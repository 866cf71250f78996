"""HiCache's two agreements per loop iteration, as the releases before 0.5.14 made them."""

import torch
import torch.distributed as dist

from closeranks.lab.specimens.stage import AFTER_THE_LOAD, Stage


class HiRadixCache:
    """Counts of finished write-throughs and load-backs, agreed by MIN over the ranks."""

    def __init__(self, stage: Stage, rank: int, group: dist.ProcessGroup) -> None:
        self.stage, self.rank, self.group = stage, rank, group

    def check_hicache_events(self) -> None:
        self.writing_check()
        self.loading_check()

    def writing_check(self) -> None:
        # With a batch at hand the rank ahead would be found in the model's collective, in another group.
        if self.stage.strikes("skip_writing_check", self.rank, at=AFTER_THE_LOAD):
            return
        queue_size = torch.tensor([1], dtype=torch.int32)
        dist.all_reduce(queue_size, op=dist.ReduceOp.MIN, group=self.group)

    def loading_check(self) -> None:
        finish_count = torch.tensor([1], dtype=torch.int32)
        dist.all_reduce(finish_count, op=dist.ReduceOp.MIN, group=self.group)
