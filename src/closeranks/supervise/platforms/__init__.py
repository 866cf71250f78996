"""Who runs an engine, behind one protocol: plain processes, systemd, Docker, Kubernetes, or a supervisor of its own.

platform = platform_of(pid)            # by the process's cgroup; an operator's choice goes before
target = platform.find(seen)           # what is to be ended and started, read before anything is done
platform.end_tree(target, deadline_s)  # every process of that life is gone, or `StillAlive`
platform.start(target, token)          # one at a time per token, whoever asks again
"""

from closeranks.supervise.platforms.base import (
    Launch,
    Platform,
    PlatformError,
    Process,
    Seen,
    StillAlive,
    Target,
)
from closeranks.supervise.platforms.detect import NAMES, ends_with_us, platform_named, platform_of

__all__ = [
    "NAMES",
    "Launch",
    "Platform",
    "PlatformError",
    "Process",
    "Seen",
    "StillAlive",
    "Target",
    "ends_with_us",
    "platform_named",
    "platform_of",
]
