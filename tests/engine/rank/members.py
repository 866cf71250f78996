"""Runs a program on all members of a group, each in a process of its own, and collects how each one ended."""

import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "closeranks.engine.rank.collectives", "closeranks.engine.rank.transfer"])


@dataclass
class Outcome:
    """How one member ended: its value, or the name and text of what it raised; neither if it was still running."""

    value: Any = None
    fault: str = ""
    text: str = ""
    running: bool = False


def _member(pipe: Connection, program: Callable[..., Any], kind: str, folder: str, rank: int, size: int, options: Any):
    import torch

    from closeranks.engine.rank.collectives import join

    torch.set_num_threads(1)
    deadlines = {"deadline_s": 60.0, "join_deadline_s": 120.0} | options.pop("deadlines", {})
    try:
        group = join(kind, "cpu", folder, rank, options.pop("as_if", size), options.pop("epoch", 1), 0xABC, **deadlines)
        outcome = Outcome(program(group, **options))
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        outcome = Outcome(None, type(error).__name__, str(error))
    pipe.send(outcome)
    os._exit(0)


def run_group(
    program: Callable[..., Any],
    size: int,
    kind: str = "shm",
    timeout_s: float = 200.0,
    absent: int = -1,
    **options: Any,
) -> list[Outcome]:
    """Run `program(group, **options)` on every rank. Members that are left at the time-out are killed (`running`).

    The rank `absent` is not waited for.

    A value in `options` that is a list with one entry per rank and whose name ends with `_by_rank` is dealt out.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, members = [], []
        for rank in range(size):
            mine = {
                name.removesuffix("_by_rank"): value[rank] if name.endswith("_by_rank") else value
                for name, value in options.items()
            }
            here, there = CONTEXT.Pipe()
            member = CONTEXT.Process(target=_member, args=(there, program, kind, folder, rank, size, mine))
            member.start()
            there.close()
            pipes.append(here)
            members.append(member)
        until = time.monotonic() + timeout_s
        outcomes = []
        for rank, pipe in enumerate(pipes):
            try:
                ready = pipe.poll(0 if rank == absent else max(0.0, until - time.monotonic()))
                outcomes.append(pipe.recv() if ready else Outcome(running=True))
            except EOFError:
                outcomes.append(Outcome(fault="died"))
        for member in members:
            if member.is_alive():
                member.join(0.2)
            if member.is_alive():
                member.kill()
            member.join()
        return outcomes
