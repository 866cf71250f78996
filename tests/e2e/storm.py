"""Mass aborts: agents in groups, most of each group disconnected at one moment, and nothing may be left or be wrong.

    python -m tests.e2e.storm --requests 5000                    tiny model, PD 1+1
    python -m tests.e2e.storm --requests 1000 --model FOLDER     a Hugging Face folder
    python -m tests.e2e.storm --requests 10000 --minutes 10 --kill-every 60
                                       PD 2+2, a random rank killed every minute, memory of each process written down

Hand-over by NIXL over TCP; with root and `ip`, in a network namespace whose loopback is shaped to `--rate`, so that
transfers last long enough to be hit. Afterwards: zero pages owned or quarantined, zero open rooms, every surviving
answer equal to the reference; and the step logs of both engines say in which stage each abort found its request.
"""

import argparse
import asyncio
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from closeranks.engine.leader.core import Leader
from closeranks.engine.leader.events import Aborted
from closeranks.engine.leader.replay import replay
from closeranks.protocol import RoomId
from tests.e2e import tiny
from tests.e2e.endurance import FLAT, WARM_S, Endurance
from tests.e2e.exactness import complete
from tests.e2e.reference import NEAR, Expected, Reference
from tests.e2e.service import Served, serve

GROUP = 64
CUT = 0.65
INSIDE = "CLOSERANKS_STORM_INSIDE"


async def agent(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int, cut: asyncio.Event) -> bool:
    """Stream a completion until it ends or `cut` fires; whether it was cut."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    async def read() -> None:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for _ in answer.content:
                pass

    reading = asyncio.create_task(read())
    cutting = asyncio.create_task(cut.wait())
    await asyncio.wait({reading, cutting}, return_when=asyncio.FIRST_COMPLETED)
    cutting.cancel()
    if reading.done():
        reading.result()
        return False
    reading.cancel()
    await asyncio.wait({reading})
    return True


async def survivor(session: aiohttp.ClientSession, url: str, expected: Expected) -> None:
    got = await complete(session, url, expected.prompt, len(expected.tokens))
    for i, (a, b) in enumerate(zip(got, expected.tokens, strict=True)):
        if a != b:  # after a near tie the two runs are different texts
            assert expected.gaps[i] < NEAR, f"token {i}: {a} instead of {b}, gap {expected.gaps[i]:.2e}"
            return


async def storm(
    served: Served, requests: int, pool: Sequence[Expected], output: int, seed: int, minutes: float = 0.0
) -> tuple[int, int]:
    """Send at least so many requests in groups, for at least so long; (cut, survived). AssertionError: a wrong one."""
    draw = random.Random(seed)
    cut_count = done_count = 0
    until = time.monotonic() + 60 * minutes
    span = 2.0  # seconds that a group took, lately: the moment of the cut is drawn from it
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        sent = 0
        while sent < requests or time.monotonic() < until:
            size = min(GROUP, requests - sent) if sent < requests else GROUP
            sent += size
            begin, cut = time.monotonic(), asyncio.Event()
            tasks: list[asyncio.Task[bool]] = []
            keep: list[asyncio.Task[None]] = []
            for _ in range(size):
                expected = draw.choice(pool)
                if draw.random() < CUT:
                    tail = [draw.randrange(5, 500) for _ in range(8)]  # no two have the whole prompt in common
                    tasks.append(
                        asyncio.create_task(agent(session, served.url, expected.prompt + tail, output * 4, cut))
                    )
                else:
                    keep.append(asyncio.create_task(survivor(session, served.url, expected)))
            asyncio.get_running_loop().call_later(draw.random() * span, cut.set)
            await asyncio.gather(*keep)
            cut.set()
            cut_count += sum(await asyncio.gather(*tasks))
            done_count += len(keep)
            span = 0.7 * span + 0.3 * (time.monotonic() - begin)
            print(
                f"\r{sent}/{requests} sent, {cut_count} cut, {span:.1f} s a group", end="", file=sys.stderr, flush=True
            )
    print(file=sys.stderr)
    return cut_count, done_count


def stages(run_dir: Path) -> collections.Counter[str]:
    """In which stage each abort found its request, from the step logs of both engines.

    The logs are replayed; `Leader.aborted` is watched, because what an abort found is gone once it is handled.
    """
    states: dict[str, dict[RoomId, tuple[str, bool]]] = {"prefill": {}, "decode": {}}
    handle = Leader.aborted

    def watched(leader: Leader, event: Aborted) -> None:
        room = leader.rooms.open.get(event.room)
        found = (room.state, bool(room.unsettled)) if room else ("gone", False)
        states[leader.config.engine].setdefault(event.room, found)
        handle(leader, event)

    Leader.aborted = watched  # type: ignore[method-assign]
    try:
        for log in sorted(run_dir.glob("*/*/log"), key=lambda p: int(p.parent.name)):
            result = replay(log)
            assert result.difference is None, result.difference
    finally:
        Leader.aborted = handle  # type: ignore[method-assign]
    counted: collections.Counter[str] = collections.Counter()
    for room in {**states["prefill"], **states["decode"]}:
        prefill, flying = states["prefill"].get(room, ("gone", False))
        decode, _ = states["decode"].get(room, ("gone", False))
        if decode == "running":
            counted["decode"] += 1
        elif flying or prefill in ("sending", "handed") or decode == "checking":
            counted["transfer"] += 1
        elif prefill == "prefill":
            counted["prefill"] += 1
        elif decode in ("waiting", "reserved") or prefill in ("waiting", "promised", "queued"):
            counted["queued"] += 1
        else:
            counted["already ended"] += 1
    return counted


def run(
    model: Path, args: argparse.Namespace, flags: Sequence[str], lengths: range, output: int, vocabulary: int
) -> None:
    """One storm against one service; prints what was seen. Raises AssertionError at residue or a wrong answer."""
    draw = random.Random(args.seed)
    reference = Reference(model)
    pool = [
        reference.continue_([draw.randrange(5, vocabulary) for _ in range(draw.choice(lengths))], output)
        for _ in range(24)
    ]
    with serve(model, "--disaggregation-transfer-backend", "nixl", *flags) as served:
        endurance = Endurance(served, args.kill_every, args.seed)
        endurance.start()
        begin = time.monotonic()
        try:
            cut, survived = asyncio.run(storm(served, args.requests, pool, output, args.seed, args.minutes))
        finally:
            endurance.stop()
        took = time.monotonic() - begin
        engines = served.assert_no_residue()
        if not args.kill_every:
            served.assert_undisturbed()
        replaced = len(list(served.run_dir.glob("*/incidents/*/manifest.json")))
        assert replaced <= len(endurance.killed), f"{replaced} engines replaced, {len(endurance.killed)} ranks killed"
        counted = stages(served.run_dir)
        memory = endurance.growth()
    print(f"{cut + survived} requests in {took:.0f} s: {cut} cut, {survived} survived, all exact; residue: none")
    if args.kill_every:
        print(f"{len(endurance.killed)} ranks killed, {replaced} engines replaced")
    print("aborts by stage: " + ", ".join(f"{stage} {n}" for stage, n in sorted(counted.items())))
    for name, engine in engines.items():
        print(f"{name}: {engine['pages_free']} free + {engine['pages_cached']} cached = {engine['pages_total']} pages")
    for title, (first, last, growth) in memory.items():
        print(f"memory of {title}: {first / 2**20:.1f} -> {last / 2**20:.1f} MiB ({growth:+.1%})")
    grown = [title for title, (_, _, growth) in memory.items() if growth > FLAT]
    assert took < 2 * WARM_S or not grown, f"memory is not flat: {grown}"


def in_namespace(rate: str) -> int:
    """Run this very command inside a network namespace with a shaped loopback."""
    name = f"crstorm{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        shape = [
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            "256kb",
            "latency",
            "5s",
        ]
        subprocess.run(shape, check=True)
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.e2e.storm", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; left out: the tiny random model")
    parser.add_argument("--rate", default="400mbit", help="of the shaped loopback")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for at least so long")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between kills of a random rank; 0: none")
    parser.add_argument("flags", nargs="*", help="further flags of closeranks serve")
    args = parser.parse_args()
    if INSIDE not in os.environ and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        return in_namespace(args.rate)
    if args.model:
        flags = ["--num-pages", "600", *args.flags]
        run(args.model, args, flags, range(20, 400), 8, 40000)
    else:
        model = tiny.make(Path(tempfile.mkdtemp(prefix="crt-")))
        ranks = ["--tp-size", "2"] if args.kill_every else []
        flags = ["--num-pages", "1500", "--threads", "1", *ranks, *args.flags]
        run(model, args, flags, range(50, 1500), 24, tiny.VOCABULARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
