"""The leader's shell: sockets, signals, clock and files around the desk.

One thread, one loop, no decision of its own.
"""

import errno
import json
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import zmq
import zmq.auth
import zmq.auth.thread

from ...faults import RECORD, injector
from ...protocol import (
    Compile,
    Output,
    PeerMessage,
    RankFault,
    Step,
    Stop,
    Welcome,
    decode_from_rank,
    decode_peer,
    decode_to_engine,
    encode,
)
from .book import Book
from .core import Leader
from .desk import Desk, Undecodable
from .events import Drained, Fault
from .link import REFUSED
from .log import Writer
from .settings import Settings

Socket = zmq.Socket[bytes]

# plain ints: arithmetic on the enums costs microseconds a message
NOBLOCK, SNDMORE, RCVMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.RCVMORE)

TICK_S = 0.1
HEARTBEAT_S = 0.5
MOST_DRAINED = 256
"""Messages taken from one socket before the others get their turn."""
RANK_ENDED = b"e"
PEER_PREFIX = b"peer:"
"""Socket identities of decode leaders start with it; every other identity at the public endpoint is a gateway's."""


class KeyFileError(ValueError):
    """A tcp endpoint without a usable key file; the text names both."""


class Shell:
    """Owns the sockets of one leader. `run` returns the process's exit code: 0 wanted stop, 70 fault."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.run_dir) / settings.engine / str(settings.epoch)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log = structlog.get_logger().bind(engine=settings.engine)
        record = Path(settings.run_dir) / RECORD
        self.faults = injector(settings.fault, record, engine=settings.engine, role=settings.role, epoch=settings.epoch)
        self.leader = Leader(settings.config())
        self.writer: Writer | None = None
        if settings.step_log and settings.log_dir != "-":
            folder = Path(settings.log_dir) if settings.log_dir else self.folder / "log"
            self.writer = Writer(folder, self.leader.config, settings.log_segment_bytes, settings.log_segments)
        salt = Path(settings.salt_file).read_bytes()[:64] if settings.salt_file else secrets.token_bytes(32)
        self.desk = Desk(self.leader, Book(settings.page_size, salt), self, self.writer, settings.log_tokens)
        self.undecodable = 0
        self.code: int | None = None
        self.stop_at = math.inf
        self.heartbeat = self.folder / "heartbeat"
        self.next_beat = 0.0
        self.delayed: list[tuple[float, str, bytes]] = []
        self.links_said: dict[str, str] = {}
        self.open_sockets()

    # ------------------------------------------------------------------------------------------------------ sockets

    def open_sockets(self) -> None:
        settings = self.settings
        self.context: zmq.Context[Socket] = zmq.Context()
        self.key: tuple[bytes, bytes] | None = None
        self.authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        if settings.curve_key_file:
            public, secret = zmq.auth.load_certificate(settings.curve_key_file)
            if secret is None:
                raise KeyFileError(f"{settings.curve_key_file} holds no secret key")
            self.key = (public, secret)
            self.authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
            self.authenticator.start()
            self.authenticator.configure_curve_callback("*", OnlyKey(public))
        self.ranks = self.bind(settings.ranks_endpoint)
        self.public = self.bind(settings.endpoint)
        self.endpoint = self.public.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        (self.folder / "leader.json").write_text(json.dumps({"endpoint": self.endpoint, "pid": os.getpid()}))
        self.dialled: dict[str, Socket] = {}
        self.step_ids = [f"step:{rank}".encode() for rank in range(settings.tp_size)]
        self.wake, self.waker = socket.socketpair()
        self.wake.setblocking(False)
        self.waker.setblocking(False)
        self.poller = zmq.Poller()
        for sock in (self.ranks, self.public, self.wake):
            self.poller.register(sock, zmq.POLLIN)

    def secure(self, sock: Socket, endpoint: str, server: bool) -> None:
        """CURVE and heartbeats for tcp endpoints. Raises KeyFileError."""
        if not endpoint.startswith("tcp:"):
            return
        if self.key is None:
            raise KeyFileError(f"{endpoint}: control sockets over tcp need curve_key_file (`closeranks keygen`)")
        sock.heartbeat_ivl, sock.heartbeat_timeout = 1000, 5000
        sock.curve_publickey, sock.curve_secretkey = self.key
        if server:
            sock.curve_server = True
        else:
            sock.curve_serverkey = self.key[0]

    def bind(self, endpoint: str) -> Socket:
        sock = self.context.socket(zmq.ROUTER)
        sock.linger = 500
        sock.sndhwm = sock.rcvhwm = 0  # bounded by leases and open steps, not by dropping
        sock.router_handover = True  # a restarted gateway or peer takes its identity over
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
        self.secure(sock, endpoint, server=True)
        sock.bind(endpoint)
        return sock

    def dial(self, endpoint: str) -> None:
        config = self.leader.config
        sock = self.context.socket(zmq.DEALER)
        sock.setsockopt(zmq.ROUTING_ID, PEER_PREFIX + f"{config.engine}:{config.instance:016x}".encode())
        sock.linger = 500
        sock.immediate = True  # nothing piles up for a peer that is away: beats say again what matters
        sock.reconnect_ivl, sock.reconnect_ivl_max = 50, 500
        self.secure(sock, endpoint, server=False)
        sock.connect(endpoint)
        self.dialled[endpoint] = sock
        self.poller.register(sock, zmq.POLLIN)

    def hang_up(self, endpoint: str) -> None:
        sock = self.dialled.pop(endpoint)
        self.poller.unregister(sock)
        sock.close()

    # --------------------------------------------------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until the epoch's end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self.on_signal)
        self.log.info("leader is up", endpoint=self.endpoint, role=self.settings.role, epoch=self.settings.epoch)
        next_tick = time.monotonic()
        next_beat = next_tick
        try:
            while self.code is None:
                wait = next_tick - time.monotonic()
                ready = dict(self.poller.poll(max(0, math.ceil(wait * 1000))))
                if self.ranks in ready:
                    self.take(self.ranks, self.from_rank)
                if self.public in ready:
                    self.take(self.public, self.from_public)
                if self.dialled and ready:
                    for endpoint, sock in list(self.dialled.items()):
                        if sock in ready:
                            self.take_dialled(endpoint, sock)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self.tick(now)
                    if now >= next_beat:
                        next_beat = now + HEARTBEAT_S
                        self.beat()
        finally:
            self.close()
        return self.code

    def take(self, sock: Socket, handler: Callable[[bytes, bytes], None]) -> None:
        """Take what has come in, up to a bound."""
        for _ in range(MOST_DRAINED):
            try:
                identity = sock.recv(NOBLOCK)
            except zmq.Again:
                return
            data = sock.recv(NOBLOCK)
            if not sock.get(RCVMORE):
                handler(identity, data)
                continue
            self.undecodable += 1
            while sock.get(RCVMORE):
                sock.recv(NOBLOCK)

    def take_dialled(self, endpoint: str, sock: Socket) -> None:
        for _ in range(MOST_DRAINED):
            try:
                frames = sock.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            self.from_peer(endpoint, frames[-1])
            if endpoint not in self.dialled:
                return

    def on_signal(self, number: int, frame: object) -> None:
        self.waker.send(RANK_ENDED if number == signal.SIGUSR2 else b"!")

    def tick(self, now: float) -> None:
        try:
            woken = self.wake.recv(64)
        except BlockingIOError:
            woken = b""
        if RANK_ENDED in woken:
            self.rank_ended(now)
        signalled = b"!" in woken
        if signalled:
            if self.stop_at < math.inf:
                self.stop_at = now  # told twice: do not wait for open requests
            else:
                self.stop_at = now + self.settings.drain_s
                self.desk.handle(Drained(now))
        for late in [x for x in self.delayed if x[0] <= now]:
            self.delayed.remove(late)
            self.send_peer(late[1], late[2])
        self.desk.tick(now)
        if self.code is None and (now >= self.stop_at or ((signalled or self.stop_at < math.inf) and not self.busy)):
            for name in self.step_ids:
                self.ranks.send_multipart([name, encode(Stop(self.settings.epoch))])
            self.code = 0

    def rank_ended(self, now: float) -> None:
        """The supervisor reaped a rank that crashed: it says so in that rank's place, who cannot any more."""
        said = json.loads((self.folder / "ended.json").read_text())
        self.desk.from_rank(RankFault(self.settings.epoch, said["rank"], "crash", said["how"], in_step=True), now)

    @property
    def busy(self) -> bool:
        return bool(self.leader.rooms.open or self.leader.rooms.closing)

    def say_links(self) -> None:
        """Log what became of the links to peers since the last time."""
        links = self.leader.peers.links
        for name, link in links.items():
            if self.links_said.get(name) != link.state:
                self.links_said[name] = link.state
                say = self.log.error if link.state == REFUSED else self.log.info
                say(
                    "link to a peer",
                    peer=name,
                    engine=link.engine,
                    state=link.state,
                    **({"why": link.why} if link.why else {}),
                )
        for name in list(self.links_said):
            if name not in links:
                del self.links_said[name]
                self.log.info("link to a peer", peer=name, state="removed")

    def beat(self) -> None:
        """Show the supervisor that this loop runs."""
        self.say_links()
        self.touch("heartbeat")

    def touch(self, name: str) -> None:
        """A sign for the supervisor, whose absence it survives."""
        try:
            (self.folder / name).touch()
        except OSError as error:
            self.log.warning(f"{name} could not be written", error=str(error))

    def close(self) -> None:
        if self.writer is not None:
            self.writer.flush()
            self.writer.close()
        for sock in (self.ranks, self.public, *self.dialled.values()):
            sock.close()
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.term()
        self.wake.close()
        self.waker.close()

    # ----------------------------------------------------------------------------------------------------------- in

    def from_rank(self, identity: bytes, data: bytes) -> None:
        try:
            message = decode_from_rank.decode(data)
        except Undecodable:
            self.undecodable += 1
            return
        rank = message.rank
        if 0 <= rank < self.settings.tp_size and identity[5:] == b"%d" % rank:
            self.desk.from_rank(message, time.monotonic())
        else:
            self.undecodable += 1

    def from_public(self, identity: bytes, data: bytes) -> None:
        if identity.startswith(PEER_PREFIX):
            self.from_peer(identity.decode("latin-1"), data)
            return
        try:
            message = decode_to_engine.decode(data)
        except Undecodable:
            self.undecodable += 1
            return
        self.desk.from_gateway(identity.decode("latin-1"), message, time.monotonic())

    def from_peer(self, link: str, data: bytes) -> None:
        try:
            message = decode_peer.decode(data)
        except Undecodable:
            self.undecodable += 1
            return
        self.desk.from_peer(link, message, time.monotonic())

    # ---------------------------------------------------------------------------------------------------------- out

    def to_ranks(self, message: Step | Welcome | Compile) -> None:
        if self.faults is not None:
            if isinstance(message, Step) and message.rows:
                self.faults.act("leader.step", n=message.n)
            if self.writer is not None and self.faults.act("leader.log") is not None:
                self.writer.fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 0)
        if isinstance(message, Welcome):
            self.touch("ready")
            self.log.info("engine is ready", pages=self.leader.pool.total, tokens=self.leader.max_request_tokens)
        data = encode(message)
        send = self.ranks.send
        for name in self.step_ids:
            send(name, SNDMORE)
            send(data)

    def to_gateway(self, gateway: str, message: Output) -> None:
        self.public.send(gateway.encode("latin-1"), SNDMORE)
        self.public.send(encode(message))

    def to_peer(self, link: str, message: PeerMessage) -> None:
        data = encode(message)
        if self.faults is not None:
            fault = self.faults.act("peer.send", message=type(message).__name__)
            if fault is not None and fault.action == "drop":
                return
            if fault is not None and fault.action == "delay":
                self.delayed.append((time.monotonic() + fault.seconds, link, data))
                return
            if fault is not None and fault.action == "double":
                self.send_peer(link, data)
        self.send_peer(link, data)

    def send_peer(self, link: str, data: bytes) -> None:
        sock = self.dialled.get(link)
        if sock is None:
            self.public.send_multipart([link.encode("latin-1"), data])
            return
        try:
            sock.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self.log.debug("peer is away, a message to it is lost", peer=link)

    def say_status(self, gateway: str) -> None:
        status = self.leader.status(time.monotonic(), self.writer.trouble if self.writer is not None else "")
        status.counters["undecodable_messages"] = self.undecodable
        if self.writer is not None:
            status.counters["log_bytes_lost"] = self.writer.lost
        self.public.send_multipart([gateway.encode("latin-1"), encode(status)])

    def fault(self, fault: Fault) -> None:
        """The epoch is over: tell the gateways, leave the evidence, go."""
        for gateway in self.leader.gateways:
            self.say_status(gateway)
        if self.writer is not None:
            self.writer.flush()
        evidence = {
            "schema": 1,
            "engine": self.settings.engine,
            "epoch": self.settings.epoch,
            "name": fault.name,
            "detail": fault.detail,
            "rank": fault.rank,
            "step": fault.n,
            "charged": [str(room) for room in fault.charged],
            "culprit": self.culprit(fault),
            "finished": self.leader.counters["finished"],
            "time": time.time(),
        }
        try:
            temporary = self.folder / "fault.json.new"
            temporary.write_text(json.dumps(evidence, indent=1))
            temporary.rename(self.folder / "fault.json")
        except OSError as error:
            self.log.error("fault.json could not be written", error=str(error))
        self.log.error("epoch ends by a fault", name=fault.name, detail=fault.detail, rank=fault.rank, step=fault.n)
        self.code = 70

    def culprit(self, fault: Fault) -> str:
        """The request that must be to blame: it ran alone, after it had been in two steps that failed. Empty: none."""
        rooms = [self.leader.rooms.closing.get(room) for room in fault.charged]
        return str(rooms[0].id) if len(rooms) == 1 and rooms[0] is not None and rooms[0].alone else ""


class OnlyKey:
    """ZAP credentials: nobody but the holders of the deployment's key."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public
