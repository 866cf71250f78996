"""Becomes an engine: takes a token that only one process can have, then executes the given program in its place.

Run as a script with JSON on its standard input: the fields of `Launch`, `taken` (path of the token) and `log`. A parent
of its own forks it off, so the engine is nobody's child and leaves no zombie. Standard library only.
"""

import json
import os
import resource
import sys
from typing import Any


def main() -> None:
    spec = json.load(sys.stdin)
    told, tell = os.pipe()  # closed by a successful exec; written to by a failed one
    pid = os.fork()
    if pid:
        os.close(tell)
        failed = b""
        while part := os.read(told, 4096):
            failed += part
        kind, _, text = failed.decode(errors="replace").partition(" ")
        if kind == "taken":
            print(f"not started again: {text}")
        elif failed:
            os.waitpid(pid, 0)
            sys.exit(failed.decode(errors="replace"))
        else:
            print(f"started as process {pid}")
        return
    try:
        os.setsid()
        _take(spec["taken"])
        _dress(spec)
        os.execve(spec["program"], spec["argv"], spec["env"])
    except FileExistsError:
        os.write(tell, f"taken the start was made before ({spec['taken']})".encode())
        os._exit(0)
    except OSError as error:
        os.write(tell, f"failed {error}".encode())
        os._exit(1)


def _take(path: str) -> None:
    """Raises FileExistsError if anybody took it before, whatever became of them."""
    token = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open("/proc/self/stat") as file:
        start = file.read().rpartition(")")[2].split()[19]
    try:
        os.write(token, f"{os.getpid()} {start}\n".encode())
        os.fsync(token)
    except OSError:
        os.unlink(path)  # a full disk: nobody could tell whose it is, and no later start would be made
        raise
    os.close(token)


def _dress(spec: dict[str, Any]) -> None:
    """Everything that a process inherits, as its predecessor had it; what may not be set is said on its log."""
    outputs = {}
    for number, key in ((1, "stdout"), (2, "stderr")):
        name = spec[key] or spec["log"]
        outputs[number] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, descriptor in outputs.items():
        os.dup2(descriptor, number)
    refused = []
    for name, (soft, hard) in spec["limits"].items():
        try:
            resource.setrlimit(getattr(resource, name), (soft, hard))
        except (OSError, ValueError) as error:
            refused.append(f"{name}={soft}:{hard} ({error})")
    try:
        os.setpriority(os.PRIO_PROCESS, 0, spec["nice"])
        if spec["cpus"]:
            os.sched_setaffinity(0, spec["cpus"])
    except OSError as error:
        refused.append(f"nice {spec['nice']} or CPUs {spec['cpus']} ({error})")
    if os.geteuid() == 0 and spec["uid"] >= 0:
        os.setgroups(spec["groups"])
        os.setgid(spec["gid"])
        os.setuid(spec["uid"])
    os.umask(spec["umask"])
    os.chdir(spec["cwd"])
    if refused:
        os.write(2, f"closeranks: started without {', '.join(refused)}\n".encode())


if __name__ == "__main__":
    main()
