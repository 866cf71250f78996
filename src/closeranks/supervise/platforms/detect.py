"""Which platform runs a process: read from its cgroup, where managers put the name of what they manage."""

import os
import re
from pathlib import Path

from closeranks.supervise.platforms import processes
from closeranks.supervise.platforms.base import Platform, PlatformError, Runner, run
from closeranks.supervise.platforms.docker import Docker
from closeranks.supervise.platforms.kubernetes import Kubernetes
from closeranks.supervise.platforms.plain import Plain, started
from closeranks.supervise.platforms.supervised import Supervised
from closeranks.supervise.platforms.systemd import Systemd

NAMES = ("plain", "systemd", "systemd-user", "docker", "podman", "kubernetes", "supervised")

_CONTAINER = re.compile(r"(?:docker[-/]|libpod-|/)([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")
_POD = re.compile(r"kubepods")
# A login session's or a user manager's own unit is not an engine's.
_NOT_ENGINES = re.compile(r"^(user@\d+|sshd?@?.*|getty@.*|cron|docker|containerd|kubelet|podman.*)\.service$")


def platform_named(name: str) -> Platform:
    """The platform of one of `NAMES`. Raises KeyError."""
    made: dict[str, Platform] = {
        "plain": Plain(),
        "systemd": Systemd(),
        "systemd-user": Systemd(user=True),
        "docker": Docker(),
        "podman": Docker("podman"),
        "kubernetes": Kubernetes(),
        "supervised": Supervised(),
    }
    return made[name]


def platform_of(pid: int, folder: Path | None = None) -> tuple[str, str]:
    """(name of the platform, unit or container) of a process. ("plain", "") where no manager is seen.

    In a container, the outer manager is not visible from within: what is found is what this pid namespace shows. What
    recovery with this `folder` started from our own unit is plain, and the unit is not its; what else shares that unit
    may have somebody who starts it again (supervisord runs both).
    """
    name, unit = from_cgroup(_cgroup(pid))
    if folder and name.startswith("systemd") and (name, unit) == from_cgroup(_cgroup(os.getpid())):
        above = processes.ancestors(pid)
        if any(process.pid in above for process in started(folder)):
            return "plain", ""
    return name, unit


def ends_with_us(runner: Runner = run) -> str:
    """Why plain processes that we start would end with our own unit; empty where they would not, or nobody can tell."""
    name, unit = from_cgroup(_cgroup(os.getpid()))
    if not name.startswith("systemd"):
        return ""
    systemctl = ("systemctl", "--user") if name == "systemd-user" else ("systemctl",)
    try:
        mode = runner((*systemctl, "show", "--property=KillMode", unit), 15.0).out.strip().partition("=")[2]
    except PlatformError:
        return ""
    if mode not in ("control-group", "mixed"):
        return ""
    return f"it is in {unit}, whose stop ends it (KillMode={mode}; KillMode=process would not)"


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def from_cgroup(text: str) -> tuple[str, str]:
    """As `platform_of`, from the text of /proc/PID/cgroup."""
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    if any(_POD.search(path) for path in paths):
        return "supervised", ""  # the kubelet starts the container again; a pod's name does not stand in its cgroup
    for path in paths:
        if (found := _CONTAINER.search(path)) is not None:
            return ("podman" if "libpod" in path else "docker"), found[1]
    for path in paths:
        units = [u for u in _UNIT.findall(path) if not _NOT_ENGINES.match(u)]
        if units:
            return ("systemd-user" if "/user@" in path else "systemd"), units[-1]
    return "plain", ""
