"""Recovery of real processes: specimens that wedge once, ended, started and checked through a real hand-over."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from closeranks.supervise.platforms import processes
from closeranks.watch.discover import Finder
from closeranks.watch.recover import Recovery
from closeranks.watch.recover_act import loops_of
from closeranks.watch.recover_journal import read
from closeranks.watch.recover_state import Case, Policy
from closeranks.watch.snapshot import EngineSeen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240.0
POLICY = Policy(ready_s=PATIENCE_S, verify_s=60.0, ramp=(1, 2))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Pair:
    """A prefill and a decode engine, started by hand, that wedge once."""

    def __init__(self, folder: Path, names: tuple[str, str]) -> None:
        self.folder, self.names = folder, names
        self.ports = {"prefill": free_port(), "decode": free_port()}
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name, (role, port) in zip(self.names, self.ports.items(), strict=True):
            command = [sys.executable, "-m", "closeranks.cli.main", "specimen", name, "--exec", "--once"]
            command += ["--folder", str(self.folder / role), "--fabric", str(self.folder), "--port", str(port)]
            command += ["--world", "2"]
            self.launchers.append(subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL))

    def engines(self) -> tuple[EngineSeen, ...]:
        return Finder(wanted_ports=self.ports.values()).find()

    def wait_struck(self) -> None:
        """Until both stand: each has written that its fault has struck, and no main thread runs."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if all((self.folder / role / "struck").exists() for role in self.ports):
                loops = asyncio.run(loops_of(self.engines()))
                if len(loops) == 2 and set(loops.values()) == {"stands"}:
                    return
            time.sleep(0.5)
        raise AssertionError("they did not come to stand: " + self.log())

    def log(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*/engine.log"))

    def serves(self) -> bool:
        """A request of our own through both, as a router sends it."""
        body = {"text": "a", "sampling_params": {"max_new_tokens": 2}, "bootstrap_room": time.time_ns()}

        async def ask() -> list[bytes]:
            return list(await asyncio.gather(*(asyncio.to_thread(post, port, body) for port in self.ports.values())))

        return all(json.loads(answer)["meta_info"]["completion_tokens"] for answer in asyncio.run(ask()))

    def stop(self) -> None:
        for engine in self.engines():
            processes.end(processes.known(p.pid for p in engine.procs), 20)
        for launcher in self.launchers:
            launcher.wait()


def post(port: int, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


@contextmanager
def wedged(folder: Path) -> Iterator[Pair]:
    pair = Pair(folder, ("incident_prefill", "incident_decode"))
    try:
        pair.start()
        pair.wait_struck()
        yield pair
    finally:
        pair.stop()


def test_a_wedged_pair_is_brought_back_and_serves(tmp_path: Path) -> None:
    with wedged(tmp_path) as pair:
        before = {p.pid for e in pair.engines() for p in e.procs}
        names = tuple(e.name for e in pair.engines() if e.role == "decode")
        case = Case(blamed=names, verdict="DESYNC_DIFFERENT_COLLECTIVE")
        recovery = Recovery(tmp_path / "state", POLICY)
        outcome = asyncio.run(recovery.recover(case, pair.engines()))
        assert outcome.status == "recovered", (outcome, pair.log())
        assert [s.kind for s in outcome.steps if s.kind in ("end", "start")] == ["end", "end", "start", "start"]
        after = pair.engines()
        assert len(after) == 2
        assert not before & {p.pid for e in after for p in e.procs}
        assert all(len(e.deciders) == 2 for e in after)
        assert pair.serves()
        again = asyncio.run(recovery.recover(case, pair.engines()))
        assert again.status == "refused"
        assert again.wait_s


# An engine of the standard library: a launcher and a rank. Its first life answers 200 to everything but requests.
ENGINE = """
import http.server, json, os, sys, time
role, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with open(f"{folder}/{role}.lives", "a+") as lives:
    lives.seek(0)
    first = not lives.read()
    lives.write(f"{os.getpid()}\\n")
if os.fork() == 0:
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"version": "0.5.23"})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if first:
            time.sleep(600)
        self.answer({"text": "a", "meta_info": {"completion_tokens": 1}})
    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

# Recovers, or goes on with it, and kills itself by SIGKILL right after the n-th line of its journal is on disk.
KILLED = """
import asyncio, json, os, signal, sys
from pathlib import Path
from closeranks.supervise.platforms.processes import known
from closeranks.watch.recover import Recovery
from closeranks.watch.recover_journal import Journal
from closeranks.watch.recover_state import Case, Policy
from closeranks.watch.snapshot import EngineSeen, Proc

seen, folder, lines = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
real, count = Journal.append, 0
def append(self, entry):
    global count
    real(self, entry)
    count += 1
    if count == lines:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = append
recovery = Recovery(folder, Policy(ready_s=240.0, verify_s=60.0, ramp=(1,)))
if (folder / "journal").exists():
    outcome = asyncio.run(recovery.resume())
else:
    engines = [
        EngineSeen(role, "sglang", role, f"http://127.0.0.1:{port}",
                   tuple(Proc(p.pid, p.start, 1, "launcher", role, None, "x") for p in known([pid])))
        for role, port, pid in seen
    ]
    outcome = asyncio.run(recovery.recover(Case(blamed=("decode",), verdict="DEAD_PEER"), engines))
print(outcome.status if outcome is not None else "nothing is left to do")
"""


def test_killed_again_and_again_it_ends_and_starts_each_engine_once(tmp_path: Path) -> None:
    """Each process of recovery lives for a few lines of the journal, then SIGKILL; the next goes on."""
    script, state = tmp_path / "engine.py", tmp_path / "state"
    script.write_text(ENGINE)
    ports = {"prefill": free_port(), "decode": free_port()}
    first = {}
    for role, port in ports.items():
        command = [sys.executable, str(script), role, str(port), str(tmp_path)]
        first[role] = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        for port in ports.values():
            wait_listening(port)
        seen = json.dumps([(role, port, first[role].pid) for role, port in ports.items()])
        for attempt in range(40):
            command = [sys.executable, "-c", KILLED, seen, str(state), str(3 + attempt % 3)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if ran.returncode == 0:
                break
            assert ran.returncode == -signal.SIGKILL, ran.stderr
        over = [e.says for e in read(state / "journal") if e.event == "over"]  # the last kill may come right after it
        assert len(over) == 1, (ran.stdout, ran.stderr)
        assert over[0].startswith("recovered:"), over
        assert attempt >= 4
        for role in ports:
            lives = (tmp_path / f"{role}.lives").read_text().split()
            assert len(lives) == 2, f"{role} was started {len(lives) - 1} times"
            assert not processes.tree(processes.known([first[role].pid])) or first[role].wait() == -signal.SIGKILL
    finally:
        for role in ports:
            pids = [int(pid) for pid in (tmp_path / f"{role}.lives").read_text().split()]
            processes.end(processes.known(pids), 20)
            first[role].wait()


def wait_listening(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"nobody listens on {port}")


def holder(lock: Path) -> int:
    """Process that holds the lock, 0 for none."""
    inode = lock.stat().st_ino if lock.exists() else -1
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            return int(words[4])
    return 0


def test_of_two_watches_one_acts_and_the_other_takes_over_when_it_is_killed(tmp_path: Path) -> None:
    """Both see the wedge, with one py-spy in the other's way; the one that acts is killed between end and start."""
    pair, state = Pair(tmp_path, ("incident_prefill", "incident_decode")), tmp_path / "state"
    watches = []
    try:
        pair.start()
        for number in range(2):
            command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--act", "--json", "--verify-s", "60"]
            for port in pair.ports.values():
                command += ["--url", f"http://127.0.0.1:{port}"]
            command += ["--state-dir", str(state), "--bundle-dir", str(tmp_path / f"bundles{number}")]
            with (tmp_path / f"watch{number}.log").open("wb") as log:
                watches.append(subprocess.Popen([*command, "--wait-s", "240"], stdout=subprocess.PIPE, stderr=log))
        pair.wait_struck()
        deadline, killed = time.monotonic() + PATIENCE_S, 0
        while not killed:
            assert time.monotonic() < deadline, "nobody acted"
            time.sleep(0.02)
            done = [e for e in read(state / "journal") if e.action and e.action.kind == "end" and e.event == "done"]
            killed = holder(state / "lock") if done else 0
        (victim,) = (w for w in watches if w.pid == killed)
        (other,) = (w for w in watches if w.pid != killed)
        victim.kill()
        victim.communicate()
        assert other.stdout is not None
        events = []
        for line in other.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "recovery" and events[-1]["status"] != "busy":
                break
        assert events[-1]["status"] == "recovered", events
        assert len({e.plan for e in read(state / "journal")}) == 1
        assert len(list(state.glob("*.taken"))) == 2, "each engine was started once"
        assert len(pair.engines()) == 2
        assert pair.serves()
    finally:
        for watch in watches:
            watch.terminate()
            watch.communicate(timeout=90)
        pair.stop()


def test_watch_acts_by_itself(tmp_path: Path) -> None:
    """From a wedge to serving again, with bundle, verdict, page and issue text, and nobody at a keyboard."""
    pair = Pair(tmp_path, ("incident_prefill", "incident_decode"))
    told = tmp_path / "told"
    command = [sys.executable, "-m", "closeranks.cli.main", "watch", "--act", "--json"]
    for port in pair.ports.values():
        command += ["--url", f"http://127.0.0.1:{port}"]
    command += ["--state-dir", str(tmp_path / "state"), "--bundle-dir", str(tmp_path / "bundles")]
    command += ["--notify", f"tee -a {told}", "--verify-s", "60", "--wait-s", "240"]
    try:
        pair.start()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watch:
            assert watch.stdout is not None
            events = []
            for line in watch.stdout:
                events.append(json.loads(line))
                if events[-1]["event"] == "recovery":
                    break
            watch.send_signal(signal.SIGTERM)
            watch.communicate(timeout=90)
        recovery = events[-1]
        assert recovery["status"] == "recovered", (events, pair.log())
        incident = next(e for e in events if e["event"] == "incident")
        assert incident["verdict"] == "DESYNC_DIFFERENT_COLLECTIVE"
        bundle = Path(incident["bundle"])
        assert {"verdict.html", "issue.md", "manifest.json"} <= {p.name for p in bundle.iterdir()}
        assert pair.serves()
        assert '"status": "recovered"' in told.read_text()
    finally:
        pair.stop()
