"""Real leaders as processes, stand-in ranks and a gateway over real sockets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from closeranks.engine.leader.replay import replay
from closeranks.protocol import (
    Abort,
    Attach,
    Dropped,
    Ended,
    Fingerprint,
    Joined,
    Output,
    RoomId,
    Sampling,
    Status,
    Step,
    Stop,
    Submit,
    decode_from_engine,
    decode_to_rank,
    encode,
)
from tests.engine.leader.stand_in import StandIn, continuation

FINGERPRINT = Fingerprint(1, "w", "fp32", "16", "t", "xxh3_64")


class Engine:
    """A leader's process and its stand-in ranks (threads)."""

    def __init__(self, folder: Path, role: str, tp_size: int, peers: dict[int, "Engine"], **more: object) -> None:
        self.endpoint = f"ipc://{folder}/{role}/api.sock"
        self.instance = {"prefill": 11, "decode": 22, "both": 33}[role]
        self.peers = peers
        peers[self.instance] = self
        settings = {
            "run_dir": str(folder),
            "engine": role,
            "role": role,
            "epoch": 1,
            "instance": self.instance,
            "endpoint": self.endpoint,
            "ranks_endpoint": f"ipc://{folder}/{role}/ranks.sock",
            "tp_size": tp_size,
            "page_size": 4,
            "max_running": 8,
            "chunk": 16,
            **more,
        }
        path = folder / f"{role}.json"
        path.write_text(json.dumps(settings))
        env = {**os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen([sys.executable, "-m", "closeranks.engine.leader", str(path)], env=env)
        self.context = zmq.Context()
        self.stopped = threading.Event()
        self.ranks_endpoint = str(settings["ranks_endpoint"])
        self.ranks = [StandIn(1, rank, 64, 4) for rank in range(tp_size)]
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self.serve, args=(rank, self.ranks_endpoint)) for rank in self.ranks]
        for thread in self.threads:
            thread.start()

    def serve(self, rank: StandIn, endpoint: str) -> None:
        socks = []
        for kind in ("step", "note"):
            sock = self.context.socket(zmq.DEALER)
            sock.identity = f"{kind}:{rank.rank}".encode()
            sock.linger = 0
            sock.connect(endpoint)
            socks.append(sock)
        step_sock, note = socks
        step_sock.send(encode(Joined(1, rank.rank, os.getpid(), FINGERPRINT, rank.memory(), 64, 4, 256)))
        try:
            while True:
                if not step_sock.poll(100):
                    if self.process.poll() is not None:
                        return
                    continue
                message = decode_to_rank.decode(step_sock.recv())
                if isinstance(message, Stop):
                    return
                if not isinstance(message, Step) or self.stopped.is_set():
                    continue
                step_sock.send(encode(rank.execute(message)))
                for send in message.sends:
                    note.send(encode(rank.send(send, self.peers[send.peer].ranks[rank.rank])))
                for check in message.checks:
                    note.send(encode(rank.check(check.room, check.pages, check.sums)))
                for instance in message.drop:
                    note.send(encode(Dropped(1, rank.rank, instance)))
        except BaseException as error:  # noqa: BLE001 - raised again by `close` in the test's thread
            self.errors.append(error)
        finally:
            for sock in socks:
                sock.close()

    def close(self, expected: int = 0) -> None:
        if expected == 0:
            self.process.terminate()
        code = self.process.wait(20)
        for thread in self.threads:
            thread.join(20)
        self.context.term()
        if self.errors:
            raise self.errors[0]
        assert code == expected


class Gateway:
    def __init__(self, *engines: Engine) -> None:
        self.context = zmq.Context()
        self.socks = []
        for engine in engines:
            sock = self.context.socket(zmq.DEALER)
            sock.identity = b"gateway-1"
            sock.linger = 0
            sock.connect(engine.endpoint)
            self.socks.append(sock)
        self.status: dict[str, Status] = {}
        self.tokens: dict[RoomId, list[int]] = {}
        self.ended: dict[tuple[str, RoomId], Ended] = {}
        self.engines = [engine.endpoint.split("/")[-2] for engine in engines]
        self.attached = 0.0

    def pump(self, seconds: float = 0.05) -> None:
        now = time.monotonic()
        if now - self.attached > 0.3:
            self.attached = now
            for sock in self.socks:
                sock.send(encode(Attach("gateway-1")))
        for name, sock in zip(self.engines, self.socks):
            while sock.poll(int(seconds * 1000 / len(self.socks))):
                message = decode_from_engine.decode(sock.recv())
                if isinstance(message, Status):
                    self.status[name] = message
                    continue
                assert isinstance(message, Output)
                for tokens in message.tokens:
                    known = self.tokens.setdefault(tokens.room, [])
                    known += tokens.tokens
                    assert tokens.index == 10 + len(known) - 1
                for ended in message.ended:
                    assert (name, ended.room) not in self.ended
                    self.ended[name, ended.room] = ended

    def until(self, what: object, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not what():  # type: ignore[operator]
            assert time.monotonic() < end, (self.status, self.ended)
            self.pump()

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        self.context.term()


def submit(room: int, peer: str, tokens: list[int], new: int) -> Submit:
    return Submit(RoomId(room, 1), f"r{room}", tokens, len(tokens), new, Sampling(), [], 60.0, peer)


@pytest.mark.parametrize(
    ("pair", "tp_size", "overlap"),
    [
        (True, 2, True),
        pytest.param(False, 1, True, marks=pytest.mark.slow),
        pytest.param(False, 2, False, marks=pytest.mark.slow),
        pytest.param(True, 1, True, marks=pytest.mark.slow),
        pytest.param(True, 1, False, marks=pytest.mark.slow),
    ],
)
def test_requests_go_through_and_leave_nothing(tmp_path: Path, pair: bool, tp_size: int, overlap: bool) -> None:
    peers: dict[int, Engine] = {}
    roles = ["prefill", "decode"] if pair else ["both"]
    engines = [Engine(tmp_path, role, tp_size, peers, overlap=overlap) for role in roles]
    gateway = Gateway(*engines)
    try:
        gateway.until(lambda: len(gateway.status) == len(engines))
        gateway.until(lambda: all(s.state == "ready" for s in gateway.status.values()))
        prompts = {i: [(i * 7 + k * (k % 3 + 1)) % 50 for k in range(10)] for i in range(1, 13)}
        for room, tokens in prompts.items():
            for index, sock in enumerate(gateway.socks):
                sock.send(encode(submit(room, engines[1 - index].endpoint if pair else "", tokens, 6)))
        last = "decode" if pair else "both"
        for sock in gateway.socks:
            sock.send(encode(Abort(RoomId(99, 1), "before its submit")))
            sock.send(encode(submit(99, "x", [1], 1)))
        rooms = [RoomId(i, 1) for i in (*prompts, 99)]
        gateway.until(lambda: all((last, room) in gateway.ended for room in rooms))
        for i, tokens in prompts.items():
            assert gateway.ended[last, RoomId(i, 1)].reason == "length"
            assert gateway.tokens[RoomId(i, 1)] == continuation(tokens, 6)
        assert gateway.ended[last, RoomId(99, 1)].reason == "abort"
        gateway.until(lambda: all(s.pages_owned + s.rooms_open == 0 for s in gateway.status.values()))
        for status in gateway.status.values():
            assert status.pages_free + status.pages_cached == status.pages_total
    finally:
        gateway.close()
        for engine in engines:
            engine.close()
    for role in roles:
        found = replay(tmp_path / role / "1" / "log")
        assert found.difference is None
        assert found.steps > 5


def test_a_fault_ends_the_process_with_70_and_its_evidence(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "both", 1, {}, step_deadline_s=0.5)
    gateway = Gateway(engine)
    try:
        gateway.until(lambda: gateway.status.get("both") is not None and gateway.status["both"].state == "ready")
        engine.stopped.set()  # the rank takes steps and says nothing any more
        gateway.socks[0].send(encode(submit(1, "", [1, 2, 3], 5)))
        gateway.until(lambda: ("both", RoomId(1, 1)) in gateway.ended)
        ended = gateway.ended["both", RoomId(1, 1)]
        assert (ended.reason, ended.retryable) == ("fault", True)
        gateway.until(lambda: gateway.status["both"].state == "faulted")
    finally:
        gateway.close()
        engine.close(expected=70)
    evidence = json.loads((tmp_path / "both" / "1" / "fault.json").read_text())
    assert evidence["name"] == "stuck"
    assert evidence["rank"] == 0
    assert replay(tmp_path / "both" / "1" / "log").difference is None


@pytest.mark.parametrize("alone", [False, True])
def test_a_crash_of_a_rank_is_charged_and_one_that_ran_alone_is_the_culprit(tmp_path: Path, alone: bool) -> None:
    engine = Engine(tmp_path, "both", 1, {})
    gateway = Gateway(engine)
    try:
        gateway.until(lambda: gateway.status.get("both") is not None and gateway.status["both"].state == "ready")
        assert (tmp_path / "both" / "1" / "ready").exists()
        engine.stopped.set()  # the rank is gone, in the midst of a step
        sent = msgspec.structs.replace(submit(1, "", [1, 2, 3], 5), alone=alone)
        gateway.socks[0].send(encode(sent))
        gateway.until(lambda: gateway.status["both"].running == 1)
        (tmp_path / "both" / "1" / "ended.json").write_text('{"rank": 0, "how": "was ended by signal 11"}')
        engine.process.send_signal(signal.SIGUSR2)
        gateway.until(lambda: ("both", RoomId(1, 1)) in gateway.ended)
        ended = gateway.ended["both", RoomId(1, 1)]
        assert (ended.reason, ended.retryable, ended.charged) == ("fault", True, True)
    finally:
        gateway.close()
        engine.close(expected=70)
    evidence = json.loads((tmp_path / "both" / "1" / "fault.json").read_text())
    assert evidence["name"] == "crash"
    assert "signal 11" in evidence["detail"]
    assert evidence["charged"] == [str(RoomId(1, 1))]
    assert evidence["culprit"] == (str(RoomId(1, 1)) if alone else "")
    assert replay(tmp_path / "both" / "1" / "log").difference is None


def test_rubbish_on_every_socket_is_counted_and_harms_nobody(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "both", 1, {})
    gateway = Gateway(engine)
    context = zmq.Context()
    try:
        gateway.until(lambda: gateway.status.get("both") is not None and gateway.status["both"].state == "ready")
        sent = 0
        for endpoint, identity in [
            (engine.endpoint, b"gateway-x"),
            (engine.endpoint, b"peer:x"),
            (engine.ranks_endpoint, b"step:7"),
            (engine.ranks_endpoint, b"note:0x"),
        ]:
            sock = context.socket(zmq.DEALER)
            sock.identity = identity
            sock.linger = 1000
            sock.connect(endpoint)
            for data in (b"", b"\xc1", b"{}", b"\x93\x02\x01\x05", b"\xff" * 1000, b"\xdd\xff\xff\xff\xff"):
                sock.send(data)
                sent += 1
            sock.send_multipart([b"one", b"two", b"three"])
            sent += 1
            sock.close()
        gateway.until(lambda: gateway.status["both"].counters.get("undecodable_messages", 0) >= sent)
        gateway.socks[0].send(encode(submit(1, "", list(range(10)), 5)))
        gateway.until(lambda: ("both", RoomId(1, 1)) in gateway.ended)
        assert gateway.tokens[RoomId(1, 1)] == continuation(list(range(10)), 5)
    finally:
        context.term()
        gateway.close()
        engine.close()
