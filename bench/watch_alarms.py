"""False alarms: `closeranks watch` beside a `closeranks serve` that is well, under one condition after the other.

    python -m bench.watch_alarms [--minutes 30] [--tp-size 2] [--only NAME ...] [--keep DIR]

The time is divided among the conditions. One row each: how often the watch confirmed a fault (each is false), how often
it suspected one, what it excluded and why, how long it saw too little to judge, and what the service did meanwhile:
requests that were answered, engines that its own supervisor replaced (after a true fault a confirmation is no false
one: it is counted apart). Cost: CPU of the watch as a share of one core, and how many processes it watched.

Ends with 1 when anything was confirmed, 3 when the watch saw nothing under a condition, else 0. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e import tiny
from tests.e2e.service import Served

START_S = 240.0
PAUSE_S = 12.0
"""A pause of the whole service, longer than every bound of the watch but those for deaths."""


def spawn(argv: Sequence[str], out: Path, errors: Path) -> "subprocess.Popen[bytes]":
    with out.open("ab") as output, errors.open("ab") as error:
        return subprocess.Popen(argv, stdout=output, stderr=error, stdin=subprocess.DEVNULL)


@dataclass
class Stand:
    """The service under watch; `served` changes with a restart."""

    argv: Sequence[str]
    run_dir: Path
    port: int
    served: Served | None = None
    answered: int = 0
    until: float = 0.0
    """Monotonic: when the present condition ends."""
    draw: random.Random = field(default_factory=lambda: random.Random(11))

    async def start(self) -> None:
        log = self.run_dir / "serve.log"
        self.served = Served(spawn(self.argv, log, log), self.run_dir, log)
        self.served.port = self.port
        deadline = time.monotonic() + START_S
        while not await self.says_ready():
            if self.served.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service did not start:\n{self.served.tail()}")
            await asyncio.sleep(0.2)

    async def says_ready(self) -> bool:
        assert self.served is not None
        try:
            return (await asyncio.to_thread(self.served.get, "/ready", 2.0))[0] == 200
        except OSError:
            return False

    async def stop(self) -> None:
        assert self.served is not None
        await asyncio.to_thread(self.served.stop, 120.0)

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def replaced(self) -> int:
        """Engines that the service's own supervisor has replaced so far."""
        return len(list(self.run_dir.glob("*/incidents/*/manifest.json")))


async def idle(stand: Stand) -> None:
    await asyncio.sleep(max(0.0, stand.until - time.monotonic()))


async def ask(stand: Stand, prompt: int, output: int, leave_s: float | None = None) -> None:
    """One streamed completion of random tokens; `leave_s`: the client is gone after that."""
    body = {"model": "default", "prompt": [stand.draw.randrange(5, 500) for _ in range(prompt)],
            "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}  # fmt: skip
    url = f"http://127.0.0.1:{stand.port}/v1/completions"
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(leave_s),
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
            session.post(url, json=body) as answer,
        ):
            answer.raise_for_status()
            async for _ in answer.content:
                pass
        stand.answered += 1


async def clients(stand: Stand, number: int, prompt: int, output: int) -> None:
    """So many at a time, each with its next request as soon as the last one has ended."""

    async def one() -> None:
        while not stand.over:
            await ask(stand, prompt, output)

    await asyncio.gather(*(one() for _ in range(number)))


async def saturated(stand: Stand) -> None:
    await clients(stand, 48, 64, 200)


async def long_prefills(stand: Stand) -> None:
    await clients(stand, 6, 3600, 4)


async def abort_storms(stand: Stand) -> None:
    while not stand.over:
        cut = stand.draw.random() * 3
        stays = [ask(stand, 48, 60) for _ in range(12)]
        await asyncio.gather(*(ask(stand, 48, 800, cut) for _ in range(40)), *stays)


async def restarts(stand: Stand) -> None:
    """As an operator does it: SIGTERM, and again, with some work in between."""
    while not stand.over:
        await stand.stop()
        await asyncio.sleep(stand.draw.random() * 3)
        await stand.start()
        await asyncio.gather(*(ask(stand, 40, 60) for _ in range(4)))
        await asyncio.sleep(6)


async def pauses(stand: Stand) -> None:
    """Every process of the service stopped by SIGSTOP, as before a snapshot of the machine, and let go on."""
    assert stand.served is not None
    while not stand.over:
        pids = stand.served.descendants()
        for pid in pids:  # the supervisor first: it would take a stopped child for a fault
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*(ask(stand, 40, 60) for _ in range(4)))
        await asyncio.sleep(8)


async def cpu_taken(stand: Stand) -> None:
    """Four busy loops per core at the service's own priority, beside some work."""
    count = 4 * (os.cpu_count() or 1)
    nothing = Path(os.devnull)
    burners = [spawn([sys.executable, "-c", "while True: pass"], nothing, nothing) for _ in range(count)]
    try:
        await clients(stand, 8, 64, 60)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


CONDITIONS: dict[str, Callable[[Stand], Awaitable[None]]] = {
    "idle": idle,
    "saturated": saturated,
    "long_prefills": long_prefills,
    "abort_storms": abort_storms,
    "restarts": restarts,
    "pauses": pauses,
    "cpu_taken": cpu_taken,
}


class Log:
    """The state changes of the watch, from its log."""

    def __init__(self, path: Path) -> None:
        self.path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        lines = self.path.read_text(errors="replace").splitlines()
        fresh, self._read = lines[self._read :], len(lines)
        found = [json.loads(line) for line in fresh if line.startswith("{")]
        return [event for event in found if event.get("event") == "engine state"]


def blind_s(changes: Sequence[dict[str, Any]], end: float) -> float:
    """Longest time for which an engine was blind, in seconds, by the times of its changes."""
    since: dict[str, float] = {}
    longest = 0.0
    for change in changes:
        at, engine = _epoch(change["timestamp"]), change["engine"]
        if engine in since:
            longest = max(longest, at - since.pop(engine))
        if change["phase"] == "blind":
            since[engine] = at
    return max([longest, *(end - at for at in since.values())])


def _epoch(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def watching(port: int, folder: Path) -> AsyncIterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--json", "--url", f"http://127.0.0.1:{port}"]
    command += ["--bundle-dir", str(folder / "bundles"), "--wait-s", "600"]
    watch = spawn(command, folder / "watch.out", folder / "watch.log")
    try:
        yield watch
    finally:
        watch.send_signal(signal.SIGTERM)
        await asyncio.to_thread(watch.wait, 120)


def row(name: str, seconds: float, changes: Sequence[dict[str, Any]], stand: Stand, before: tuple[int, int],
        cost: float) -> dict[str, Any]:  # fmt: skip
    phases = Counter(change["phase"] for change in changes)
    reasons = Counter(w for c in changes if c["phase"] == "excluded" for w in c["why"])
    found = {
        "condition": name,
        "seconds": round(seconds),
        "confirmed": phases["confirmed"],
        "suspected": phases["suspect"],
        "excluded": {reason[:100]: count for reason, count in reasons.items()},
        "blind_longest_s": round(blind_s(changes, time.time()), 1),
        "answered": stand.answered - before[0],
        "replaced_by_itself": stand.replaced() - before[1],
        "cost": round(cost, 4),
        "why": [c["why"] for c in changes if c["phase"] in ("confirmed", "suspect")],
    }
    excluded = "; ".join(f"{reason} ({count})" for reason, count in reasons.items()) or "–"
    print(
        f"| {name} | {found['seconds']} | {found['confirmed']} | {found['suspected']} | {excluded[:160]} | "
        f"{found['blind_longest_s']} | {found['answered']} | {found['replaced_by_itself']} | {100 * cost:.2f} % |",
        flush=True,
    )
    return found


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    run_dir = folder / "run"
    run_dir.mkdir(parents=True)
    argv = [sys.executable, "-m", "closeranks.cli.main", "serve", "--port", str(port), "--run-dir", str(run_dir)]
    argv += ["--model-path", str(tiny.make(folder / "model")), "--cache-dir", str(folder / "cache")]
    argv += ["--tp-size", str(args.tp_size), "--threads", "1", "--num-pages", "1500"]
    stand = Stand(argv, run_dir, port)
    print(f"# {' '.join(argv)}\n# {Path('/proc/loadavg').read_text().strip()}", file=sys.stderr)
    rows = []
    await stand.start()
    try:
        async with watching(port, folder) as watch:
            log = Log(folder / "watch.log")
            await asyncio.sleep(15)  # the watch gets to know the engines
            first = log.new()
            if not any(change["phase"] == "healthy" for change in first):
                raise SystemExit(f"the watch does not call a fresh service healthy: {first}")
            for name in args.only or CONDITIONS:
                stand.until = time.monotonic() + 60 * args.minutes / len(args.only or CONDITIONS)
                began, before, used = time.monotonic(), (stand.answered, stand.replaced()), cpu_s(watch.pid)
                await CONDITIONS[name](stand)
                seconds = time.monotonic() - began
                await asyncio.sleep(2)
                rows.append(row(name, seconds, log.new(), stand, before, (cpu_s(watch.pid) - used) / (seconds + 2)))
    finally:
        await stand.stop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all conditions together")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks of each of the two engines")
    parser.add_argument("--only", nargs="+", choices=CONDITIONS, metavar="NAME", help="these conditions")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and bundles")
    args = parser.parse_args()
    print("| condition | seconds | confirmed | suspected | excluded as | longest blind, s | answered "
          "| engines replaced by the service | cost of watching |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="crw-") as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = asyncio.run(measure(args, folder.absolute()))
    false = sum(r["confirmed"] for r in rows if not r["replaced_by_itself"])
    confirmed = sum(r["confirmed"] for r in rows)
    print(json.dumps({"confirmed": confirmed, "false": false, "minutes": args.minutes, "rows": rows}))
    unseen = any(r["blind_longest_s"] > 0.9 * r["seconds"] for r in rows)
    return 1 if false else 3 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
