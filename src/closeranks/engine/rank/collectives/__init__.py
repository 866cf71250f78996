"""The ranks of one engine as a group. No other module of closeranks calls torch.distributed collectives."""

from .base import (
    CollectiveBroken,
    CollectiveFault,
    CollectiveMismatch,
    CollectiveTimeout,
    Group,
    Solo,
)

__all__ = ["CollectiveBroken", "CollectiveFault", "CollectiveMismatch", "CollectiveTimeout", "Group", "Solo"]
