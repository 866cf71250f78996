"""Memory pressure for chosen processes only: a memory cgroup (v2 or v1) with a small limit, and a balloon filling it.

The kernel reclaims and, at the limit, kills inside the group alone, whatever the rest of the machine does. Pages that a
process had before it was moved stay charged where they were: in the group count those that it gets from then on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/unified"))
LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Name of the limit in v2 and in v1."""
BALLOON = """
import os, sys
group, adjustment, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(group + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
with open("/proc/self/oom_score_adj", "w") as file:
    file.write(adjustment)
block = bytearray(size)
for at in range(0, size, 4096):
    block[at] = 1
"""


def _make() -> tuple[Path, str] | None:
    """A new group that can be limited, and the name of its limit; None where there is none."""
    for root in ROOTS:
        if not (root / "cgroup.procs").exists():
            continue
        try:
            place = Path(tempfile.mkdtemp(prefix="closeranks-", dir=root))
        except OSError:
            continue
        for limit in LIMITS:
            if (place / limit).exists() and os.access(place / limit, os.W_OK):
                return place, limit
        place.rmdir()
    return None


def possible() -> bool:
    """Whether this user may make and limit memory cgroups here."""
    made = _make()
    if made:
        made[0].rmdir()
    return made is not None


def _group_of(pid: int) -> list[Path]:
    """Where a process is now, in each hierarchy that could be the group's."""
    found = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "memory"):
            found += [root / path.lstrip("/") for root in ROOTS]
    return [place for place in found if (place / "cgroup.procs").exists()]


@contextlib.contextmanager
def limited(pids: list[int], size: int, first: dict[int, int]) -> Iterator[Path]:
    """A group of `pids` in which they may have `size` more bytes; `first`: oom_score_adj of some of them.

    Whoever is left goes back at the end, and the group is removed. Raises OSError where that is not permitted.
    """
    made = _make()
    if made is None:
        raise OSError("no memory cgroup can be made here")
    place, limit = made
    home = [x for x in _group_of(os.getpid()) if x.is_relative_to(place.parent)][-1]
    try:
        (place / limit).write_text(str(size))
        for pid in pids:
            (place / "cgroup.procs").write_text(str(pid))
        for pid, adjustment in first.items():
            Path(f"/proc/{pid}/oom_score_adj").write_text(str(adjustment))
        yield place
    finally:
        for pid in (place / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                (home / "cgroup.procs").write_text(pid)
        place.rmdir()


def squeeze(pids: list[int], kill_them: bool) -> bool:
    """Fill a group of `pids` with a balloon beyond its limit; whether the kernel killed them, or the balloon alone.

    The kernel ends whoever has the largest sum of resident memory (all of it) and oom_score_adj / 1000 of the limit. So
    the limit is above what `pids` have where the balloon is to go, and small where they are.
    """
    size = 64 << 20 if kill_them else max(map(resident, pids)) + (128 << 20)
    with limited(pids, size, dict.fromkeys(pids, 1000) if kill_them else {}) as place:
        adjustment = "0" if kill_them else "1000"
        balloon = [sys.executable, "-c", BALLOON, str(place), adjustment, str(size + (16 << 20))]
        code = subprocess.run(balloon, timeout=120, check=False).returncode
        return all(map(ended, pids)) if kill_them else code == -signal.SIGKILL and not any(map(ended, pids))


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
