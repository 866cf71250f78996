"""The fault table: each row breaks one thing in a served pair under eight streams and prints what became of it.

    python -m bench.faults --list
    python -m bench.faults --times 5                            tiny random model, PD 2+2
    python -m bench.faults --rows 'kill|stop' --model smollm2 --ranks 1

`wanted` is stated before the row runs. Seconds are from the fault on: detected = the supervisor ends the epoch;
serving = a request sent right after the fault is answered whole; silence = the longest that any client went without a
token, a comment or an error. Faults begin once the service has its spare ranks. Rows over a link need root and
/dev/net/tun, those of memory pressure a user who may make memory cgroups (`tests/e2e/memory.py`).
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import memory, smollm, tiny
from tests.e2e.apart import Apart, apart
from tests.e2e.drill import ENDS, REFUSES, RESUMES, RIDES, Drill, Seen, as_wanted, ask, expectations
from tests.e2e.link import Link, possible
from tests.e2e.reference import Expected, Reference
from tests.e2e.service import Served, serve, title_of

POISON = 499
"""A token that no other prompt has."""


LATE = ("transfer.start:late,engine=prefill,rank=0,after=12,seconds=1",)
"""The failure ends the room at once, its bytes land in its pages later."""


@dataclass(frozen=True)
class Row:
    """`where`: one command (`local`), on a small disk (`disk`), with some of its processes in a memory cgroup
    (`memory`), with a network device that can be taken away (`device`), two on one host (`apart`), two networks
    (`link`)."""

    name: str
    wanted: str
    fault: tuple[str, ...] = ()
    strike: Callable[[Served], None] | None = None
    where: str = "local"
    poison: bool = False
    probe: bool = True


def send(number: signal.Signals, engine: str, process: str) -> Callable[[Served], None]:
    def strike(served: Served) -> None:
        os.kill(served.pid_of(engine, process), number)

    return strike


def send_gateway(number: signal.Signals) -> Callable[[Served], None]:
    def strike(served: Served) -> None:
        (gateway,) = [pid for pid in served.descendants() if title_of(pid).startswith("closeranks::gateway")]
        os.kill(gateway, number)

    return strike


def kill_prefill_while_decode_stands(served: Served) -> None:
    decode = served.pid_of("decode", "rank0")
    os.kill(decode, signal.SIGSTOP)
    os.kill(served.pid_of("prefill", "rank0"), signal.SIGKILL)
    time.sleep(2.0)
    os.kill(decode, signal.SIGCONT)


def kill_both_sides(served: Served) -> None:
    victims = [served.pid_of("prefill", "leader"), served.pid_of("decode", "rank0")]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def clear_run_folder(served: Served) -> None:
    shutil.rmtree(served.run_dir, ignore_errors=True)  # its users write at the same time


def remove_sockets_and_kill(served: Served) -> None:
    for role in ("prefill", "decode"):
        (served.run_dir / f"{role}.sock").unlink()
    os.kill(served.pid_of("decode", "rank1"), signal.SIGKILL)


def fill_disk(served: Served) -> None:
    with contextlib.suppress(OSError), (served.run_dir / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65536)


def fill_disk_and_kill(served: Served) -> None:
    fill_disk(served)
    os.kill(served.pid_of("decode", "rank0"), signal.SIGKILL)
    time.sleep(6.0)
    (served.run_dir / "filler").unlink()


def squeeze(rank_is_killed: bool) -> Callable[[Served], None]:
    """Decode's ranks run out of memory, in a cgroup of their own: the kernel kills the balloon in it, or a rank."""

    def strike(served: Served) -> None:
        ranks = [pid for pid in served.descendants() if title_of(pid).startswith("closeranks::rank decode")]
        killed = [served.pid_of("decode", "rank0")]
        assert memory.squeeze(killed if rank_is_killed else ranks, rank_is_killed), "the kernel killed somebody else"

    return strike


def restart_prefill_host(served: Served) -> None:
    assert isinstance(served, Apart)
    served.commands["prefill"].kill()
    served.commands["prefill"].wait()
    served.start("prefill")


def link(seconds: float, loss: float = 0.0, delay_s: float = 0.0) -> Callable[[Served], None]:
    def strike(served: Served) -> None:
        assert isinstance(served, Apart)
        assert served.link is not None
        served.link.set(loss, delay_s)
        if seconds:
            time.sleep(seconds)
            served.link.set()

    return strike


def remove_device(served: Served) -> None:
    """The ranks have each other's address on it."""
    assert served.link is not None
    served.link.close()


def rows() -> list[Row]:
    made = []
    for engine in ("prefill", "decode"):
        after = 30 if engine == "prefill" else 150
        made += [
            Row(f"SIGKILL, {engine} rank", RESUMES, strike=send(signal.SIGKILL, engine, "rank0")),
            Row(f"SIGSTOP, {engine} rank", RESUMES, strike=send(signal.SIGSTOP, engine, "rank0")),
            Row(
                f"exception in forward, {engine} rank",
                RESUMES,
                (f"rank.forward:raise,engine={engine},rank=0,after={after}",),
            ),
            Row(f"wrong digest, {engine} rank", RESUMES, (f"rank.digest:wrong,engine={engine},rank=0,after={after}",)),
            Row(f"endless loop, {engine} rank", RESUMES, (f"rank.forward:loop,engine={engine},rank=0,after={after}",)),
        ]
    for engine in ("prefill", "decode"):
        made += [
            Row(f"SIGKILL, {engine} leader", RESUMES, strike=send(signal.SIGKILL, engine, "leader")),
            Row(f"SIGSTOP, {engine} leader", RESUMES, strike=send(signal.SIGSTOP, engine, "leader")),
            Row(
                f"exception in {engine} leader",
                RESUMES,
                (f"leader.step:raise,engine={engine},after={20 if engine == 'prefill' else 150}",),
            ),
        ]
    transfer = "engine=prefill,rank=0,after=12"
    poison = f"token={POISON},times=0"
    return [
        *made,
        Row("SIGKILL, gateway", ENDS, strike=send_gateway(signal.SIGKILL)),
        Row("SIGSTOP, gateway", ENDS, strike=send_gateway(signal.SIGSTOP)),
        Row("SIGKILL, prefill leader and decode rank", RESUMES, strike=kill_both_sides),
        Row("run folder removed", RESUMES, strike=clear_run_folder),
        Row("control sockets removed, decode rank killed", RESUMES, strike=remove_sockets_and_kill),
        Row("transfer sticks", RESUMES, (f"transfer.start:stick,{transfer}",)),
        Row("transfer sticks for 3 s", RIDES, (f"transfer.start:stick,{transfer},seconds=3",)),
        Row("transfer fails", RESUMES, (f"transfer.start:fail,{transfer}",)),
        Row("transfer fails, is written 1 s later", RESUMES, LATE),
        Row("prefill rank killed while decode rank stands 2 s", RESUMES, strike=kill_prefill_while_decode_stands),
        Row("corrupted page", RESUMES, ("rank.arrived:corrupt,engine=decode,rank=0,after=12",)),
        Row("control messages lost: Grant", RIDES, ("peer.send:drop,message=Grant,after=10,times=3",)),
        Row("control messages lost: Arrived", RIDES, ("peer.send:drop,message=Arrived,after=10,times=3",)),
        Row("control messages doubled", RIDES, ("peer.send:double,after=10,times=200",)),
        Row("control messages reordered", RIDES, ("peer.send:delay,message=Grant,after=10,times=5,seconds=0.5",
                                                  "peer.send:delay,message=Arrived,after=10,times=5,seconds=0.7")),
        Row("poison request (raises)", ENDS, (f"rank.row:raise,{poison},engine=decode",), poison=True),
        Row("poison request (raises in prefill)", ENDS, (f"rank.row:raise,{poison},engine=prefill",), poison=True),
        Row("poison request (crashes)", ENDS, (f"rank.row:crash,{poison},engine=decode",), poison=True),
        Row("link down 3 s", RIDES, strike=link(3, 1.0), where="link"),
        Row("link down 30 s", RESUMES, strike=link(30, 1.0), where="link", probe=False),
        Row("5 % loss and 100 ms delay", RIDES, strike=link(0, 0.05, 0.1), where="link"),
        Row("network device of the ranks removed", RESUMES, strike=remove_device, where="device"),
        Row("disk full", RIDES, strike=fill_disk, where="disk"),
        Row("disk full for 6 s, a rank killed meanwhile", RESUMES, strike=fill_disk_and_kill, where="disk"),
        Row("memory pressure, the kernel kills a neighbour", RIDES, strike=squeeze(False), where="memory"),
        Row("memory pressure, the kernel kills a decode rank", RESUMES, strike=squeeze(True), where="memory"),
        Row("prefill host restarted under its address", RESUMES, strike=restart_prefill_host, where="apart"),
        Row("other model on the prefill host", REFUSES, where="mismatch"),
    ]  # fmt: skip


@contextlib.contextmanager
def world(row: Row, model: Path, flags: Sequence[str]) -> Iterator[Served]:
    """The service that the row breaks. A small disk has room for the converted weights and some 100 MiB."""
    fault = [*(word for spec in row.fault for word in ("--fault", spec))]
    with contextlib.ExitStack() as stack:
        if row.where == "disk":
            place = tempfile.mkdtemp(prefix="crd-")
            room = 96 + 2 * sum(path.stat().st_size for path in model.iterdir()) // 2**20
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}m", "tmpfs", place], check=True)
            stack.callback(os.rmdir, place)
            stack.callback(subprocess.run, ["umount", "-l", place], check=True)
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = place
        between = stack.enter_context(Link(f"crl{os.getpid() % 10000}")) if row.where in ("link", "device") else None
        if row.where in ("local", "disk", "memory", "device"):
            any_device = [("UCX_NET_DEVICES", "all")] if between else []  # not the loopback device alone
            served = stack.enter_context(serve(model, *flags, *fault, env=any_device))
            served.link = between
            yield served
            return
        other = model
        if row.where == "mismatch":
            other = tiny.make(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crm-"))), seed=1)
        backend = ("--disaggregation-transfer-backend", "nixl")
        yield stack.enter_context(
            apart({"prefill": other, "decode": model}, *flags, *backend, link=between, matching=other == model)
        )


def refused(served: Served, expected: Expected) -> Seen:
    """What a client is told by a pair that must not be one."""
    import asyncio

    import aiohttp

    async def once() -> tuple[str, float]:
        async with aiohttp.ClientSession() as session:
            answer = await ask(session, served.url, expected, 4)
            return answer.error, answer.silence_s

    error, silence = asyncio.run(once())
    pids = served.descendants()
    served.stop()
    left = sum(Path(f"/proc/{pid}").exists() for pid in pids)
    return Seen(REFUSES if error else RIDES, error[:300], silence_s=silence, answers=1, left=left)


def run(row: Row, model: Path, flags: Sequence[str], expected: Sequence[Expected], poison: Expected) -> Seen:
    with world(row, model, flags) as served:
        if row.where == "mismatch":
            return refused(served, expected[0])
        if "--no-spares" not in flags:
            served.await_spares()
        return Drill(served, expected, row.strike, poison if row.poison else None, row.probe).run()


def line(row: Row, seen: Seen) -> str:
    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f} s"

    outcome = (
        seen.outcome + (f" ({seen.detail})" if seen.detail else "") + (f"; {seen.residue}" if seen.residue else "")
    )
    outcome = " ".join(outcome.replace("|", "/").split())
    times = [seconds(value) for value in (seen.detected_s, seen.serving_s, seen.silence_s)]
    incidents = ", ".join(seen.incidents) or "–"
    cells = [row.name, row.wanted, outcome, *times, f"{seen.wrong} of {seen.answers}", incidents, str(seen.left)]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="regular expression on the names")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [row for row in rows() if re.search(args.rows, row.name)]
    if args.list:
        print("\n".join(f"{row.name}: {row.wanted}" for row in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="crf-") as place:
        return table(chosen, args, Path(place))


def table(chosen: Sequence[Row], args: argparse.Namespace, place: Path) -> int:
    """Print the rows; 1 if one of them went otherwise than wanted."""
    small = args.model == "tiny"
    model = tiny.make(place) if small else smollm.folder(place)
    output = 200 if small else 60
    reference = Reference(model)
    expected = expectations(reference.continue_, 5, POISON if small else 40000, output)
    poison = reference.continue_([POISON, 7, 8], 4)
    flags = ["--num-pages", "500", "--threads", "1", "--tp-size", str(args.ranks)]
    print("| fault | wanted | seen | detected | serving | silence | wrong | incidents | left |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    bad = 0
    for row in chosen:
        if row.where in ("link", "device") and not possible():
            print(f"| {row.name} | {row.wanted} | not run: needs root and /dev/net/tun | | | | | | |")
            continue
        if row.where == "memory" and not memory.possible():
            print(f"| {row.name} | {row.wanted} | not run: needs a memory cgroup of its own | | | | | | |")
            continue
        if "digest" in row.name and args.ranks == 1:
            print(f"| {row.name} | {row.wanted} | not run: a rank alone has nobody to disagree with | | | | | | |")
            continue
        for _ in range(args.times):
            try:
                seen = run(row, model, flags, expected, poison)
            except (AssertionError, TimeoutError, OSError, subprocess.SubprocessError) as error:
                traceback.print_exc()
                said = " ".join(f"{type(error).__name__}: {error}".split())
                print(f"| {row.name} | {row.wanted} | FAILED {said[:300]} | | | | | | |", flush=True)
                bad += 1
                continue
            bad += not as_wanted(row.wanted, seen.outcome) or bool(seen.wrong or seen.left or seen.residue)
            print(line(row, seen), flush=True)
            print(f"# {row.name}: {'; '.join(seen.reasons)}", file=sys.stderr, flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
