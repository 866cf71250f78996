"""Docker containers: `docker stop` keeps the daemon's restart policy from coming in between, `docker start` runs the
same container again, with its command, mounts and devices."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from closeranks.supervise.platforms.base import PlatformError, Ran, Runner, Seen, StillAlive, Target, run

CALL_S = 15.0
LOOK_S = 0.2
GRACE_S = 1
_STATE = "{{.State.Running}} {{.HostConfig.AutoRemove}} {{.State.StartedAt}}"
# No exit code: 0, 143 and 137 are those of a stopped container, of one that we stopped, and of engines that crashed.


class Docker:
    """Drives the `docker` command (or `podman`, which takes the same words)."""

    tried: ClassVar[bool] = False

    def __init__(
        self, command: str = "docker", runner: Runner = run, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.name, self._run, self._sleep = command, runner, sleep

    def find(self, seen: Seen) -> Target:
        """The container, and the start of its present life."""
        if not seen.unit:
            raise PlatformError(f"{seen.name}: its container is not known")
        _, removed, life = self._state(seen.unit)
        detail = f"container {seen.unit} was run with --rm: stopped, it would be gone" if removed else ""
        return Target(
            name=seen.name,
            platform=self.name,
            processes=seen.processes,
            unit=seen.unit,
            life=life,
            detail=detail,
        )

    def is_running(self, target: Target) -> bool:
        """Whether the container still is in that life."""
        running, *_, life = self._state(target.unit)
        return running and life == target.life

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """`docker stop`: SIGTERM, a second later SIGKILL to every process of the container's pid namespace."""
        until = time.monotonic() + deadline_s
        if not self.is_running(target):
            return 0
        self._do("stop", "-t", str(GRACE_S), target.unit, limit_s=deadline_s)
        while self.is_running(target):
            if time.monotonic() > until:
                raise StillAlive([p.pid for p in target.processes], deadline_s)
            self._sleep(LOOK_S)
        return len(target.processes)

    def start(self, target: Target, token: str, folder: Path) -> str:
        """`docker start`; on a running container it does nothing."""
        self._do("start", target.unit, limit_s=CALL_S * 4)
        return f"asked {self.name} to start {target.unit}"

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Whether the container has exited since."""
        running, *_, life = self._state(target.unit)
        return "" if running or life == target.life else f"container {target.unit} has exited"

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """`docker stop -t 1 NAME` or `docker start NAME`."""
        return (self.name, *(("stop", "-t", str(GRACE_S)) if step == "end" else ("start",)), target.unit)

    def _state(self, container: str) -> tuple[bool, bool, str]:
        """Whether it runs, whether it is removed when it ends, and when it started."""
        said = self._do("inspect", "--format", _STATE, container)
        words = said.out.strip().split(" ", 2)  # podman writes a time with blanks in it
        if len(words) < 3:
            raise PlatformError(f"`{self.name} inspect {container}` said {said.out.strip()[:200]!r}")
        running, removed, started = words
        return running == "true", removed == "true", started

    def _do(self, *words: str, limit_s: float = CALL_S) -> Ran:
        said = self._run((self.name, *words), limit_s)
        if said.code:
            raise PlatformError(f"`{self.name} {' '.join(words)}` exited with {said.code}: {said.err.strip()}")
        return said
