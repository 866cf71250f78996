"""systemd units: ended and started by their manager, so that its own restart does not come in between.

`stop` is queued first: from then on the manager starts nothing by itself (`Restart=`). Then SIGKILL to the unit's whole
cgroup, because a wedged engine would use up `TimeoutStopSec`. No process can leave its cgroup, so an empty one proves
that reparented ranks are gone too.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from closeranks.supervise.platforms import processes
from closeranks.supervise.platforms.base import PlatformError, Ran, Runner, Seen, StillAlive, Target, run

CALL_S = 15.0
LOOK_S = 0.2
CGROUPS = Path("/sys/fs/cgroup")


class Systemd:
    """Drives `systemctl`; `user` units through `--user`."""

    tried: ClassVar[bool] = False

    def __init__(self, user: bool = False, runner: Runner = run, sleep: Callable[[float], None] = time.sleep) -> None:
        self.name = "systemd-user" if user else "systemd"
        self._systemctl = ("systemctl", "--user") if user else ("systemctl",)
        self._run, self._sleep = runner, sleep

    def find(self, seen: Seen) -> Target:
        """The unit of the engine's first process, and the invocation that runs now."""
        if not seen.unit:
            raise PlatformError(f"{seen.name}: its unit is not known")
        shown = self._show(seen.unit)
        if shown.get("LoadState") != "loaded":
            raise PlatformError(f"{seen.unit}: {shown.get('LoadState', 'unknown')} to systemd, not loaded")
        return Target(
            name=seen.name,
            platform=self.name,
            processes=seen.processes,
            unit=seen.unit,
            life=shown.get("InvocationID", ""),
            detail=_strangers(seen, shown),
            wanted=_wanted(seen, shown),
        )

    def is_running(self, target: Target) -> bool:
        """Whether that invocation has not ended: its cgroup is not empty, or one of its known processes lives."""
        if any(processes.lives(p) for p in target.processes):
            return True
        shown = self._show(target.unit)
        if target.life and shown.get("InvocationID") != target.life:
            return False
        return shown.get("ActiveState") not in ("inactive", "failed") or bool(_members(shown.get("ControlGroup", "")))

    def end_tree(self, target: Target, deadline_s: float) -> int:
        """`stop --no-block`, `kill --signal=SIGKILL`, then wait until the cgroup is empty."""
        until = time.monotonic() + deadline_s
        if target.life and self._show(target.unit).get("InvocationID") != target.life:
            return 0  # a later life has begun; what is left of this one, if anything, lies outside the unit
        self._do("stop", "--no-block", target.unit)
        self._do(*_KILL, target.unit, may_fail="No such process")
        while self.is_running(target):
            if time.monotonic() > until:
                raise StillAlive([p.pid for p in target.processes if processes.lives(p)], deadline_s)
            self._sleep(LOOK_S)
        return len(target.processes)

    def start(self, target: Target, token: str, folder: Path) -> str:
        """`reset-failed` (a unit that failed too often refuses to start), then `start`. Starting twice is once."""
        self._do("reset-failed", target.unit, may_fail="not loaded")
        self._do("start", "--no-block", target.unit)
        return f"asked systemd to start {target.unit}"

    def has_ended(self, target: Target, token: str, folder: Path) -> str:
        """Whether the unit has failed since."""
        shown = self._show(target.unit)
        return f"{target.unit} is failed ({shown.get('SubState')})" if shown.get("ActiveState") == "failed" else ""

    def describe(self, target: Target, step: str) -> tuple[str, ...]:
        """The systemctl command that matters in this step."""
        return (*self._systemctl, *(_KILL if step == "end" else ("start", "--no-block")), target.unit)

    def _show(self, unit: str) -> dict[str, str]:
        properties = "LoadState,ActiveState,SubState,Result,MainPID,InvocationID,ControlGroup"
        said = self._do("show", f"--property={properties}", unit)
        return dict(line.split("=", 1) for line in said.out.splitlines() if "=" in line)

    def _do(self, *words: str, may_fail: str = "") -> Ran:
        """`may_fail`: what it says where its failure is none."""
        said = self._run((*self._systemctl, *words), CALL_S)
        if said.code and not (may_fail and may_fail in said.err):
            raise PlatformError(f"`systemctl {' '.join(words)}` exited with {said.code}: {said.err.strip()}")
        return said


def _wanted(seen: Seen, shown: dict[str, str]) -> str:
    """Whether somebody is stopping the unit. One that has ended without a fault tells nothing: a vLLM whose engine
    process died exits with 0 (vllm#48966), as a stopped one does."""
    if shown.get("ActiveState") != "deactivating" or shown.get("Result") != "success":
        return ""
    return f"unit {seen.unit} is deactivating without a fault: somebody is stopping it"


def _strangers(seen: Seen, shown: dict[str, str]) -> str:
    """What a unit holds besides the engine: a supervisor's or a runner's own unit is not the engine's to stop."""
    own = {p.pid for p in seen.processes}
    if not own or shown.get("MainPID") in {str(pid) for pid in own}:
        return ""
    own |= {p.pid for p in processes.tree(seen.processes)} | processes.ancestors(seen.processes[0].pid)
    others = sorted(set(_members(shown.get("ControlGroup", ""))) - own)
    if not others and os.getpid() not in _members(shown.get("ControlGroup", "")):
        return ""
    pids = ", ".join(str(pid) for pid in others[:5]) or str(os.getpid())
    return f"unit {seen.unit} holds other processes than this engine's ({pids}): say which platform runs it"


_KILL = ("kill", "--signal=SIGKILL")  # to the whole cgroup, which needs no option: its name changed with version 252


def _members(cgroup: str) -> list[int]:
    """Processes in a unit's cgroup and below (version 2, or version 1's systemd hierarchy)."""
    if not cgroup:
        return []
    for root in (CGROUPS, CGROUPS / "systemd"):
        base = root / cgroup.lstrip("/")
        if base.is_dir():
            return [int(n) for file in [base, *base.rglob("*/")] for n in _read(file / "cgroup.procs").split()]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the group was removed meanwhile, with everything in it
        return ""


def verify_unit(path: Path, runner: Runner = run) -> list[str]:
    """What `systemd-analyze verify` has against a unit file. It exits 0 on many faults and says them on standard error,
    so that is what is read. Raises PlatformError where the tool is missing."""
    said = runner(("systemd-analyze", "verify", str(path)), CALL_S)
    lines = [line for line in said.err.splitlines() if line.strip()]
    return lines or ([f"systemd-analyze exited with {said.code}"] if said.code else [])
