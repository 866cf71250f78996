"""The old design, small and real: a prefill and a decode engine that wedge by themselves when many clients leave.

Nothing in it is told to fail. Each rank decides by its own queues what it does next, and agrees with its peers through
gloo collectives as large as those queues; threads beside the loop change them when a message reaches *this* rank:

- an aborted room is taken out of `transfer_infos` while the transfer worker has it (`assert room in
  self.transfer_infos`, logged as `Unexpected transfer worker error for room`, told to the same rank of decode alone);
- decode's ranks take a room that failed out of their own queue before they poll it together;
- HiCache's check is as large as the rank's own list of write-throughs, from which aborted rooms are taken as they come.

As long as no client leaves, all ranks have the same queues and it serves. A mass abort makes them differ for a moment,
and that moment is enough: ranks are found in different collectives for ever, and `/health` says 200. Layout, names and
messages are those of the engine it stands for, so that stacks and logs show what an operator saw.

    python -m closeranks.lab.specimens.double --port 30000 --tp-size 4 --folder DIR

serves `/v1/completions` (streaming, token ids) and `/health` until it is ended.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from closeranks.lab.specimens.capture import dump
from closeranks.lab.specimens.run import SpecimenError, switches

PROGRAM = Path(__file__).parent / "programs" / "double"
STANDING_S = 3.0
"""So long without a context switch of any rank's main thread is no pause."""


@dataclass(frozen=True)
class Double:
    """A running double. `pids`: engine -> its ranks' processes by rank."""

    folder: Path
    port: int
    pids: dict[str, list[int]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "engine.log").read_text(errors="replace")

    def health(self) -> int:
        """What `/health` says."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
            return int(answer.status)

    def stands(self) -> list[str]:
        """Engines of which no rank's main thread has made a context switch for `STANDING_S` seconds; blocks as long."""
        before = {engine: switches(pids) for engine, pids in self.pids.items()}
        time.sleep(STANDING_S)
        return [
            engine for engine, pids in self.pids.items() if all(before[engine]) and switches(pids) == before[engine]
        ]

    def stacks(self, engine: str) -> list[list[str]]:
        """Function names on each rank's main thread, innermost first, without their classes."""
        found = []
        for pid in self.pids[engine]:
            main = dump(pid).partition("MainThread")[2].partition("\n\n")[0].partition("\nThread ")[0]
            found.append([name.split(".")[-1] for name in re.findall(r"^    (\S+) \(", main, re.MULTILINE)])
        return found


def command(flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the launcher; its modules have the engine's names."""
    path = [str(PROGRAM), str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [sys.executable, "-m", "sglang.launch_pair", *flags], env


@contextlib.contextmanager
def start(folder: Path, world: int = 4, patience_s: float = 120.0) -> Iterator[Double]:
    """Run it with `world` ranks an engine until the block ends. Raises SpecimenError if it does not get ready."""
    argv, env = command(["--tp-size", str(world), "--folder", str(folder), "--parent", str(os.getpid())])
    with (folder / "engine.log").open("wb") as log:
        launcher = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
    try:
        until = time.monotonic() + patience_s
        while not (folder / "ready.json").exists():
            if launcher.poll() is not None or time.monotonic() > until:
                raise SpecimenError(f"the double is not ready:\n{(folder / 'engine.log').read_text()[-3000:]}")
            time.sleep(0.1)
        pids = json.loads((folder / "pids.json").read_text())
        yield Double(folder, json.loads((folder / "ready.json").read_text())["port"], pids)
    finally:
        launcher.kill()  # its ranks die with it
        launcher.wait()


if __name__ == "__main__":
    argv, env = command(sys.argv[1:])
    os.execve(argv[0], argv, env)
