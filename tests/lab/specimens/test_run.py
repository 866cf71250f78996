"""Each specimen for real: it sets in, real py-spy shows its picture, and it leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.lab.specimens import SPECIMENS, Running, start

pytestmark = pytest.mark.slow

CONTROL = {
    "different_collectives": {"broadcast_pyobj": "half", "poll_and_all_reduce": "others"},
    "skipped_collective": {"broadcast_pyobj": "last", "loading_check": "others"},
    "incident_prefill": {"writing_check": "all"},
    "incident_decode": {"broadcast_pyobj": "half", "poll_and_all_reduce": "others"},
    "other_size": {"broadcast_pyobj": "half", "poll_and_all_reduce": "others"},
    "stopped_rank": {"tensor_model_parallel_all_reduce": "others"},
    "straggler": {"load_jit": "last", "tensor_model_parallel_all_reduce": "others"},
    "gil_held": {"wait_holding_the_gil": "first", "broadcast_pyobj": "others"},
    "blocking_io": {"_ensure_prefill_info": "first", "all_reduce": "others"},
    "crash_hidden": {"_shutdown": "last", "all_reduce": "others"},
    "startup": {"load_weights": "last", "barrier": "others"},
    "lost_message": {"worker_busy_loop": "all"},
    "vllm_idle": {"worker_busy_loop": "all"},
    "long_step": {"forward": "all"},
}
"""Function that must be on the main thread's stack -> which ranks; `others` are those not named before it."""


def main_thread(folder: Path, label: str, number: int) -> list[str]:
    """Function names of the MainThread in one dump, innermost first, without the class that 0.4.3 puts in front."""
    names: list[str] = []
    inside = False
    for line in (folder / f"round{number}" / f"pyspy_{label}.txt").read_text().splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line
        elif inside and line.startswith("    "):
            names.append(re.sub(r" \([^()]*\)$", "", line.strip()).split(".")[-1])
    return names


def counters(folder: Path, number: int) -> dict[int, list[int]]:
    """Context switches of each process's main thread, from the /proc listing."""
    text = (folder / f"proc_{number}.txt").read_text()
    found: dict[int, list[int]] = {}
    for pid, status in re.findall(r"==> /proc/(\d+)/status <==\n(.*?)\n==>", text, re.DOTALL):
        found[int(pid)] = [int(n) for n in re.findall(r"voluntary_ctxt_switches:\t(\d+)", status)]
    return found


def metric(folder: Path, number: int, name: str) -> list[float]:
    text = (folder / f"metrics_{number}.txt").read_text()
    return [float(v) for v in re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)]


def check_picture(running: Running, folder: Path) -> None:
    spec, world = running.specimen, running.world
    named: set[int] = set()
    for function, who in CONTROL.get(spec.name, {}).items():
        ranks = frozenset(range(world)) - named if who == "others" else spec.ranks(who, world)  # type: ignore[arg-type]
        if who == "others" and spec.name == "stopped_rank":
            ranks = ranks - spec.ranks("last", world)
        named |= ranks
        for rank in ranks:
            assert function in main_thread(folder, f"TP{rank}", 2), f"{function} on rank {rank}"
    standing = spec.ranks(spec.stands, world)
    before, after = counters(folder, 1), counters(folder, 2)
    for rank in standing:
        assert before[running.pids[rank]] == after[running.pids[rank]], f"rank {rank} does not stand"
    if spec.engine == "sglang" and not standing and spec.name not in ("dead_peer", "startup"):
        assert all(before[running.pids[r]] != after[running.pids[r]] for r in range(world)), "a live loop stands"
    titles = "VLLM::Worker_TP{}" if spec.engine == "vllm" else "sglang::scheduler_TP{}"
    if spec.name not in ("dead_peer", "engine_dead"):
        for rank in range(world):
            head = (folder / "round1" / f"pyspy_TP{rank}.txt").read_text().splitlines()[0]
            assert head == f"Process {running.pids[rank]}: {titles.format(rank)}"
    ps = (folder / "ps.txt").read_text()
    assert spec.name not in ps.lower().replace("vllm_idle", ""), "the command lines give the specimen away"


def check_numbers(running: Running, folder: Path) -> None:
    name, spec = running.specimen.name, running.specimen
    log = (folder / "engine.log").read_text()
    health = (folder / "health.txt").read_text()
    if spec.engine == "sglang" and name not in ("dead_peer", "frontend_frozen"):
        stage = "sglang:scheduler_stage_seconds_total"
        grown = [b - a for a, b in zip(metric(folder, 1, stage), metric(folder, 2, stage), strict=True)]
        if spec.stands == "all":
            assert grown == [0.0] * running.world
        elif name == "long_step":
            assert grown == [0.0] * running.world  # as in a wedge: only /proc tells them apart
        elif name != "startup":
            assert all(g > 1.0 for g in grown)
        alive = (spec.stands != "all" or spec.health_is_a_flag) and name not in ("startup", "long_step")
        assert ("-> 200" in health) == alive, health
    expectations = {
        "incident_prefill": lambda: log.count("Unexpected transfer worker error for room 5703557506917441074") == 3,
        "incident_decode": lambda: "Aborted by AbortReq" in log,
        "dead_peer": lambda: "crashed with exit code -9" in log and "no answer" in health and " Z" in ps_states(folder),
        "helper_dead": lambda: "Foreign traffic?" in log and "bootstrap_thread" not in dump(folder, 0),
        "stuck_transfer": lambda: (
            metric(folder, 2, "sglang:num_decode_transfer_queue_reqs")[0] > 0
            and metric(folder, 1, "sglang:generation_tokens_total")
            == metric(folder, 2, "sglang:generation_tokens_total")
        ),
        "lost_message": lambda: metric(folder, 2, "vllm:num_requests_running") != [0.0] and "-> 200" in health,
        "engine_dead": lambda: "-> 200" in health and " Z" in ps_states(folder),
        "crash_hidden": lambda: "Scheduler hit an exception" in log,
        "frontend_frozen": lambda: "no answer" in health,
        "gil_held": lambda: owns_gil(folder, 0),
        "stopped_rank": lambda: " T" in ps_states(folder),
        "paused": lambda: metric(folder, 2, "sglang:num_paused_reqs")[0] > 0,
        "startup": lambda: "ready to roll" not in log and "Load weight begin" in log,
        "other_size": lambda: differing_sizes(folder),
    }
    if name in expectations:
        assert expectations[name](), log[-2000:]


def dump(folder: Path, rank: int) -> str:
    return (folder / "round2" / f"pyspy_TP{rank}.txt").read_text()


def ps_states(folder: Path) -> str:
    return " ".join(" " + line.split()[2] for line in (folder / "ps.txt").read_text().splitlines()[1:])


def owns_gil(folder: Path, rank: int) -> bool:
    threads = json.loads((folder / "round2" / f"pyspy_TP{rank}.json").read_text())
    return any(t["owns_gil"] for t in threads if t["thread_name"] == "MainThread")


def differing_sizes(folder: Path) -> bool:
    """The same sequence number and operation with other sizes, in torch's own record."""
    ranks = [json.loads((folder / f"nccl_trace_rank_{r}.json").read_text())["entries"] for r in (0, 1)]
    ops = [{(e["pg_id"], e["op_id"], e["profiling_name"]): e["input_sizes"] for e in entries} for entries in ranks]
    return any(ops[0][key] != ops[1][key] for key in ops[0].keys() & ops[1].keys())


def check_diagnosis(running: Running, folder: Path) -> None:
    """What `closeranks diagnose` says of the capture must be the declared class."""
    command = [sys.executable, "-m", "closeranks.cli.main", "diagnose", "--json", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    main = json.loads(ran.stdout)["findings"][0]
    assert main["class"] in {running.specimen.verdict_class, *running.specimen.also}, main["summary"]


def group_members(pgid: int) -> list[str]:
    listed = subprocess.run(["ps", "-o", "pid,stat,args", "-g", str(pgid)], capture_output=True, text=True, check=False)
    return [
        line for line in listed.stdout.splitlines()[1:] if line.split()[1][0] != "Z"
    ]  # Z: ended, init is to reap it


@pytest.mark.parametrize("name", SPECIMENS)
def test_shows_its_picture_and_ends_clean(name: str, tmp_path: Path) -> None:
    with start(name, folder=tmp_path) as running:
        onset = running.wait_onset()
        folder = running.capture()
        group = running.launcher.pid
        assert onset > 0
        check_picture(running, folder)
        check_numbers(running, folder)
        check_diagnosis(running, folder)
    assert not group_members(group)


@pytest.mark.parametrize("world", [2, 3])
def test_another_number_of_ranks(world: int, tmp_path: Path) -> None:
    with start("different_collectives", world=world, folder=tmp_path) as running:
        running.wait_onset()
        check_picture(running, running.capture())
        assert sorted(running.pids) == list(range(world))


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    with (
        start("idle", world=2, folder=tmp_path / "a") as one,
        start("straggler", world=2, folder=tmp_path / "b") as two,
    ):
        two.wait_onset()
        one.wait_onset()
        assert not {*one.pids.values()} & {*two.pids.values()}
        assert one.port != two.port
        os.kill(one.pids[1], 0)


def test_a_fault_that_strikes_once_is_gone_after_a_restart(tmp_path: Path) -> None:
    with start("different_collectives", world=2, folder=tmp_path, once=True) as first:
        first.wait_onset()
        port = first.port
    with start("different_collectives", world=2, folder=tmp_path, once=True, port=port) as second:
        second.wait_onset()
        assert second.specimen.healthy
        assert second.port == port
        assert "-> 200" in (second.capture() / "health.txt").read_text()


def test_dies_with_its_harness(tmp_path: Path) -> None:
    program = (
        "import signal\nfrom closeranks.lab.specimens import start\n"
        "from pathlib import Path\n"
        f"with start('different_collectives', world=2, folder=Path({str(tmp_path)!r})) as s:\n"
        "    s.wait_onset()\n    print(s.launcher.pid, flush=True)\n    signal.pause()\n"
    )
    script = tmp_path / "harness.py"
    script.write_text(program)
    harness = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert harness.stdout is not None
    group = int(harness.stdout.readline())
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    gone = subprocess.run(
        [
            "bash",
            "-c",
            f"for i in $(seq 100); do ps -o stat= -g {group} | grep -qv Z || exit 0; sleep 0.1; done; exit 1",
        ],
        check=False,
    )
    assert gone.returncode == 0, group_members(group)
