"""The forward pass: one tensor-parallel all-reduce per layer, and the ways in which a rank does not get there."""

import fcntl
import os

import torch
import torch.distributed as dist

from closeranks.lab.specimens.stage import Stage

LAYERS = 2


class Model:
    """A stand-in for a model: its collectives are real, its arithmetic is small."""

    def __init__(self, stage: Stage, rank: int, group: dist.ProcessGroup) -> None:
        self.stage, self.rank, self.group = stage, rank, group
        self.weight = torch.eye(64)

    def load_weights(self) -> None:
        """Reads a pipe that ends when all weights are there; of a `slow_load` rank it never does."""
        readable, writable = os.pipe()
        if self.stage.strikes("slow_load", self.rank, at=0):
            while os.read(readable, 1):
                continue
        os.close(writable)
        os.close(readable)

    def forward(self, rows: int) -> None:
        if self.stage.strikes("build_lock", self.rank):
            self.load_jit()
        layers = LAYERS
        if self.stage.strikes("long_step", self.rank):
            layers = 1_000_000
        hidden = torch.ones(rows, 64)
        for _ in range(layers):
            hidden = self.layer_forward(hidden)

    def layer_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.linear(hidden, self.weight)
        return self.tensor_model_parallel_all_reduce(hidden) / self.stage.world

    def tensor_model_parallel_all_reduce(self, hidden: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(hidden, group=self.group)
        return hidden

    def load_jit(self) -> None:
        """Waits for the lock of a kernel's build folder; whoever holds it does not let go."""
        path = self.stage.folder / "kernel.lock"
        with path.open("w") as held, path.open("w") as wanted:
            fcntl.flock(held, fcntl.LOCK_EX)
            fcntl.flock(wanted, fcntl.LOCK_EX)
