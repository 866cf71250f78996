"""Engines whose own supervisor starts them again (`closeranks serve`, supervisord, a Kubernetes kubelet seen from a
side-car in a shared pid namespace): their processes are ended, and what starts the next is not ours to do."""

from pathlib import Path
from typing import ClassVar

from closeranks.supervise.platforms import processes
from closeranks.supervise.platforms.base import Seen, Target


class Supervised:
    """Ends the engine's processes, and nothing above them."""

    name: ClassVar[str] = "supervised"
    tried: ClassVar[bool] = True

    def find(self, seen: Seen) -> Target:
        """The tree of the engine's own processes."""
        return Target(name=seen.name, platform=self.name, processes=processes.life_of(seen))

    def is_running(self, target: Target) -> bool:
        """Whether any process of that life lives."""
        return any(processes.lives(p) for p in processes.tree(target.processes))

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """SIGKILL to all of them."""
        return processes.end(target.processes, deadline_s)

    def start(self, target: Target, token: str, folder: Path) -> str:
        """Nothing: the supervisor does it."""
        return f"the supervisor of {target.name} starts it"

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Not known: the supervisor may try again."""
        return ""

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """`kill -KILL PIDS`; the start has no command."""
        return ("kill", "-KILL", *(str(p.pid) for p in target.processes)) if step == "end" else ()
