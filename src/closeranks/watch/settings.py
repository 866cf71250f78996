"""Settings of the watch. Each is a flag, a variable (`CLOSERANKS_WATCH_` and the name in capitals) and a YAML key."""

import os
from pathlib import Path

import msgspec


def default_bundles() -> str:
    """`$XDG_STATE_HOME/closeranks/incidents`."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "closeranks" / "incidents")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is watched and how."""

    url: tuple[str, ...] = ()
    """Watch the engines of this machine that listen on the ports of these addresses only (`http://127.0.0.1:30000`)."""
    pid: tuple[int, ...] = ()
    """Watch the engines that these processes belong to only."""
    log: tuple[str, ...] = ()
    """`ENGINE=FILE`: the log of an engine whose output goes to no file that can be found."""
    interval: float = 1.0
    """Seconds between two looks."""
    bundle_dir: str = msgspec.field(default_factory=default_bundles)
    """Folder of incident bundles; the newest 20 are kept."""
    probe: str = "suspect"
    """Requests of its own through the real path: `never`, `suspect` (only to decide a suspicion) or `always`."""
    probe_url: str = ""
    """Router or gateway through which probes go; without it each prefill–decode pair is probed directly."""
    recorder_path: str = ""
    """Path on the engines that makes them write torch's flight recorder to files, where they have one."""
    api_key: str = ""
    """Sent to the engines as a bearer token."""
    port: int = -1
    """Port on 127.0.0.1 of the watch's own /healthz, /metrics and /liveness/ENGINE; 0: any; -1: none."""
    wait_s: float = 60.0
    """Without any engine to see for so long at the start, the command ends with code 3."""
