"""Who acts for another user: each has a folder of recovery of its own, and `--stop` in ours would not reach theirs."""

import contextlib
import os
import pwd
from collections.abc import Callable, Iterable
from pathlib import Path

from closeranks.watch.procfs import Row


def name_of(uid: int) -> str:
    """Of a user; its number where it has none, as in many containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _owner(pid: int) -> int:
    return os.stat(f"/proc/{pid}").st_uid


def out_of_reach(rows: Iterable[Row], folder: Path, owner: Callable[[int], int] = _owner) -> list[str]:
    """Acting watches and recoveries of other users with another folder than this, in words."""
    found = []
    for row in rows:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            if _acts(row.argv) and (uid := owner(row.pid)) != os.geteuid() and _folder(row.argv) != str(folder):
                where = _folder(row.argv) or "its own"
                found.append(f"process {row.pid} of {name_of(uid)} acts, with another folder ({where})")
    return found


def _acts(argv: tuple[str, ...]) -> bool:
    """Whether it is `closeranks watch --act` or one of recover's that act; not a shell or sudo around that."""
    place = next((n for n, word in enumerate(argv[:3]) if "closeranks" in word.rpartition("/")[2]), None)
    runs = place == 0 or (place is not None and "python" in argv[0].rpartition("/")[2])
    rest = argv[place + 1 :] if place is not None else ()
    return runs and rest[:1] in (("watch",), ("recover",)) and bool({"--act", "--resume"} & set(rest))


def _folder(argv: tuple[str, ...]) -> str:
    """What `--state-dir` says; empty without it."""
    for word, after in zip(argv, (*argv[1:], ""), strict=True):
        if word == "--state-dir":
            return after
        if word.startswith("--state-dir="):
            return word.partition("=")[2]
    return ""
