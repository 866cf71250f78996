"""Agreement on the states of transfers: one MIN all-reduce over the local queue, skipped when that queue is empty."""

import torch
import torch.distributed as dist

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)


def poll_and_all_reduce(polls: list[int], group: dist.ProcessGroup) -> list[int]:
    """The lowest state of each entry over the ranks; its length comes from local state, which is the flaw shown."""
    if not polls:
        return []
    states = torch.tensor(polls, dtype=torch.int32)
    dist.all_reduce(states, op=dist.ReduceOp.MIN, group=group)
    return [int(state) for state in states.tolist()]
