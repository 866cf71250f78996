"""The leader's shell: sockets in, events to the core, effects out. One thread, one loop, no decision of its own.

It turns every message into an event (tokens, log-probabilities and checksums go into the book), writes the event to the
step log, lets the core answer, and carries the answer out: fills the tokens into steps, sends each step's bytes to all
ranks, and one `Output` per gateway.
"""

import hashlib
import json
import math
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
import zmq.auth.thread

from ...protocol import (
    Abort,
    Arrived,
    Attach,
    Begin,
    Check,
    Drain,
    Ended,
    Output,
    Report,
    Row,
    Sent,
    Step,
    Stop,
    Submit,
    Tokens,
    Welcome,
    decode_from_rank,
    decode_peer,
    decode_to_engine,
    encode,
)
from . import rooms as r
from .book import Book
from .core import Leader
from .events import (
    Aborted,
    Attached,
    Dial,
    Drained,
    Effect,
    Event,
    Fault,
    Forget,
    Greet,
    Hangup,
    PeerSaid,
    Plan,
    RankSaid,
    Release,
    ReleaseFirst,
    Reported,
    SayArrived,
    SayEnded,
    SayPeer,
    Settled,
    Submitted,
    Tick,
)
from .log import Mark, Words, Writer
from .settings import Settings

TICK_S = 0.1
PEER_PREFIX = b"peer:"
"""Socket identities of decode leaders start with it; every other identity at the public endpoint is a gateway's."""

MOST_DRAINED = 256
"""Messages taken from one socket before the others get their turn."""


def secure(sock: zmq.Socket[bytes], endpoint: str, key: dict[str, str] | None, server: bool) -> None:
    """CURVE for tcp endpoints: one keypair for the whole deployment. Raises ValueError if there is none."""
    if not endpoint.startswith("tcp:"):
        return
    if key is None:
        raise ValueError(f"{endpoint}: control sockets over tcp need curve_key_file")
    sock.curve_publickey = key["public"].encode()
    sock.curve_secretkey = key["secret"].encode()
    if server:
        sock.curve_server = True
    else:
        sock.curve_serverkey = key["public"].encode()


class OnlyKey:
    """ZAP credentials: nobody but the holders of the deployment's key."""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class Shell:
    """Owns the sockets, the book and the log of one leader. `run` returns the process's exit code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = Path(settings.run_dir) / settings.engine / str(settings.epoch)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.leader = Leader(settings.config())
        salt = Path(settings.salt_file).read_bytes() if settings.salt_file else settings.run_dir.encode()
        self.book = Book(settings.page_size, hashlib.blake2b(salt, digest_size=32).digest())
        self.log = structlog.get_logger().bind(engine=settings.engine)
        self.writer: Writer | None = None
        if settings.log_dir != "-":
            folder = Path(settings.log_dir) if settings.log_dir else self.folder / "log"
            self.writer = Writer(folder, self.leader.config, settings.log_segment_bytes, settings.log_segments)
        self.outputs: dict[str, tuple[list[Tokens], list[Ended]]] = {}
        self.undecodable = 0
        self.code: int | None = None
        self.stop_at = math.inf
        self.open_sockets()

    # ------------------------------------------------------------------------------------------------------ sockets

    def open_sockets(self) -> None:
        settings = self.settings
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.key: dict[str, str] | None = None
        self.authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        if settings.curve_key_file:
            self.key = msgspec.json.decode(Path(settings.curve_key_file).read_bytes(), type=dict[str, str])
            self.authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
            self.authenticator.start()
            self.authenticator.configure_curve_callback("*", OnlyKey(self.key["public"].encode()))
        self.ranks = self.bind(settings.ranks_endpoint)
        self.public = self.bind(settings.endpoint)
        self.endpoint = self.public.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        (self.folder / "leader.json").write_text(json.dumps({"endpoint": self.endpoint, "pid": os.getpid()}))
        self.dialled: dict[str, zmq.Socket[bytes]] = {}
        self.step_ids = [f"step:{rank}".encode() for rank in range(settings.tp_size)]
        self.wake, self.waker = socket.socketpair()
        self.wake.setblocking(False)
        self.waker.setblocking(False)
        self.poller = zmq.Poller()
        for sock in (self.ranks, self.public, self.wake):
            self.poller.register(sock, zmq.POLLIN)

    def bind(self, endpoint: str) -> zmq.Socket[bytes]:
        sock = self.context.socket(zmq.ROUTER)
        sock.linger = 500
        sock.sndhwm = sock.rcvhwm = 0  # bounded by leases and open steps, not by dropping
        sock.router_handover = True  # a restarted gateway or peer takes its identity over
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
        secure(sock, endpoint, self.key, server=True)
        sock.bind(endpoint)
        return sock

    def dial(self, endpoint: str) -> None:
        config = self.leader.config
        sock = self.context.socket(zmq.DEALER)
        sock.identity = PEER_PREFIX + f"{config.engine}:{config.instance:016x}".encode()
        sock.linger = 500
        sock.sndhwm = 10_000
        sock.reconnect_ivl, sock.reconnect_ivl_max = 50, 500
        secure(sock, endpoint, self.key, server=False)
        sock.connect(endpoint)
        self.dialled[endpoint] = sock
        self.poller.register(sock, zmq.POLLIN)

    def hang_up(self, endpoint: str) -> None:
        sock = self.dialled.pop(endpoint)
        self.poller.unregister(sock)
        sock.close()

    # --------------------------------------------------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until the epoch's end. Returns 0 (wanted stop) or 70 (fault)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)
        self.log.info("leader is up", endpoint=self.endpoint, role=self.settings.role, epoch=self.settings.epoch)
        next_tick = time.monotonic()
        try:
            while self.code is None:
                wait = next_tick - time.monotonic()
                ready = dict(self.poller.poll(max(0, math.ceil(wait * 1000))))
                if self.ranks in ready:
                    self.take(self.ranks, self.from_rank)
                if self.public in ready:
                    self.take(self.public, self.from_public)
                if len(ready) > 0 and self.dialled:
                    for endpoint, sock in list(self.dialled.items()):
                        if sock in ready:
                            self.take_dialled(endpoint, sock)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self.tick(now)
        finally:
            self.close()
        return self.code

    def take(self, sock: "zmq.Socket[bytes]", handler: Any) -> None:
        """Take what has come in, up to a bound."""
        for _ in range(MOST_DRAINED):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                handler(frames[0], frames[1])
            else:
                self.undecodable += 1

    def take_dialled(self, endpoint: str, sock: "zmq.Socket[bytes]") -> None:
        for _ in range(MOST_DRAINED):
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.from_peer(endpoint, frames[-1])
            if endpoint not in self.dialled:
                return

    def on_signal(self, number: int, frame: object) -> None:
        self.waker.send(b"!")

    def tick(self, now: float) -> None:
        try:
            signalled = self.wake.recv(64)
        except BlockingIOError:
            signalled = b""
        if signalled:
            if self.stop_at < math.inf:
                self.stop_at = now
            else:
                self.stop_at = now + self.settings.drain_s
                self.handle(Drained(now))
        self.handle(Tick(now))
        if self.writer is not None:
            self.writer.flush()
        if self.code is None and self.stop_at < math.inf and (now >= self.stop_at or not self.leader.rooms.open):
            for name in self.step_ids:
                self.ranks.send_multipart([name, encode(Stop(self.settings.epoch))])
            self.code = 0

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

    # ----------------------------------------------------------------------------------------------------- messages

    def from_rank(self, identity: bytes, data: bytes) -> None:
        try:
            message = decode_from_rank.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self.undecodable += 1
            return
        rank = message.rank
        if not 0 <= rank < self.settings.tp_size or identity[5:] != str(rank).encode():
            self.undecodable += 1
            return
        now = time.monotonic()
        if isinstance(message, Report):
            if rank == 0 and message.epoch == self.settings.epoch:
                self.handle(self.book.report(message, now))
            else:
                self.handle(Reported(now, message.epoch, rank, message.n, message.digest))
        elif isinstance(message, Sent):
            current = message.epoch == self.settings.epoch
            error = self.book.sent(message) if current else message.error
            self.handle(Settled(now, message.epoch, rank, message.transfer, error))
            if message.transfer not in self.leader.handover.transfers:
                self.book.settled(message.transfer)
        else:
            self.handle(RankSaid(now, message))

    def from_public(self, identity: bytes, data: bytes) -> None:
        if identity.startswith(PEER_PREFIX):
            self.from_peer(identity.decode("latin-1"), data)
            return
        try:
            message = decode_to_engine.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self.undecodable += 1
            return
        now = time.monotonic()
        gateway = identity.decode("latin-1")
        if isinstance(message, Submit):
            self.submit(now, gateway, message)
        elif isinstance(message, Attach):
            self.handle(Attached(now, gateway))
            self.say_status(gateway)
        elif isinstance(message, Abort):
            self.handle(Aborted(now, gateway, message.room, message.reason))
        elif isinstance(message, Drain):
            self.handle(Drained(now))

    def submit(self, now: float, gateway: str, message: Submit) -> None:
        flaw, hashes = "", list[bytes]()
        if not 0 < message.deadline_s < math.inf:
            flaw = f"deadline_s is {message.deadline_s}"
        elif not 0 < message.prompt_length <= len(message.tokens):
            flaw = f"prompt_length is {message.prompt_length} with {len(message.tokens)} tokens"
        else:
            try:
                hashes = self.book.submit(message, gateway)
            except OverflowError:
                flaw = "a token id is negative or beyond 32 bits"
        self.handle(
            Submitted(
                now,
                gateway,
                message.room,
                message.rid,
                len(message.tokens),
                message.max_new_tokens,
                hashes,
                message.deadline_s,
                message.peer,
                message.alone,
                flaw,
            )
        )
        if message.room not in self.leader.rooms.open:
            self.book.entries.pop(message.room, None)
        elif self.settings.log_tokens and self.writer is not None:
            self.writer.write(Words((message.room.id, message.room.generation), 0, message.tokens))

    def from_peer(self, link: str, data: bytes) -> None:
        try:
            message = decode_peer.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError):
            self.undecodable += 1
            return
        if isinstance(message, Arrived):
            room = self.leader.rooms.open.get(message.room)
            waiting = room is not None and room.state == r.RESERVED and room.instance == message.instance
            message = self.book.arrived(message, room.targets if room is not None and waiting else None)
        self.handle(PeerSaid(time.monotonic(), link, message))

    # ------------------------------------------------------------------------------------------------------ effects

    def handle(self, event: Event) -> None:
        """Log the event, let the core answer, carry the answer out."""
        writer = self.writer
        if writer is not None:
            if writer.full:
                writer.begin(time.time(), event.at, b"")
            writer.write(event)
        try:
            effects = self.leader.handle(event)
        except BaseException:
            if writer is not None:
                writer.flush()
            raise
        if not effects:
            return
        if writer is not None:
            digest = hashlib.blake2b(encode(effects), digest_size=8).digest()
            writer.write(Mark(digest))
        fault: Fault | None = None
        for effect in effects:
            if isinstance(effect, Fault):
                fault = effect
            else:
                self.carry_out(effect)
        if self.outputs:
            for gateway, (tokens, ended) in self.outputs.items():
                self.public.send_multipart([gateway.encode("latin-1"), encode(Output(tokens, ended))])
            self.outputs = {}
        if fault is not None:
            self.fault(fault)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Plan):
            self.issue(effect)
        elif isinstance(effect, Release):
            self.release(effect)
        elif isinstance(effect, SayEnded):
            self.book.entries.pop(effect.ended.room, None)
            self.output(effect.gateway)[1].append(effect.ended)
            self.log.debug("room ended", room=str(effect.ended.room), reason=effect.ended.reason)
        elif isinstance(effect, ReleaseFirst):
            entry = self.book.entries[effect.room]
            top = [] if entry.top is None else [entry.top]
            self.output(entry.gateway)[0].append(Tokens(entry.room, entry.index, [entry.tokens[entry.index]], top))
            entry.index += 1
        elif isinstance(effect, SayPeer):
            self.say_peer(effect.link, effect.message)
        elif isinstance(effect, SayArrived):
            room, pages = effect.room, effect.pages
            self.say_peer(
                effect.link, self.book.arrival(room, self.leader.config.instance, pages, effect.cached_tokens)
            )
        elif isinstance(effect, Forget):
            self.book.entries.pop(effect.room, None)
        elif isinstance(effect, Dial):
            self.dial(effect.endpoint)
        elif isinstance(effect, Hangup):
            self.hang_up(effect.endpoint)
        elif isinstance(effect, Greet):
            self.book.join([m for m in self.leader.memories if m is not None])
            for name in self.step_ids:
                self.ranks.send_multipart([name, encode(Welcome(self.settings.epoch))])
            for gateway in self.leader.gateways:
                self.say_status(gateway)
            self.log.info("engine is ready", ranks=self.settings.tp_size, pages=self.leader.pool.total)

    def issue(self, plan: Plan) -> None:
        """Fill tokens and sums into a step and send the same bytes to every rank."""
        book, rows, checks = self.book, plan.rows, plan.checks
        book.issued(plan)
        if plan.begins:
            rows = list(rows)
            for (index, room), table in zip(plan.begins, plan.tables):
                entry, row = book.entries[room], rows[index]
                begin = Begin(entry.sampling, entry.tokens, entry.prompt_length, table)
                rows[index] = Row(row.slot, row.start, row.count, row.pages, row.sample, begin)
        if checks:
            checks = [Check(c.room, c.pages, [book.entries[c.room].sums[page] for page in c.pages]) for c in checks]
        step = Step(self.settings.epoch, plan.n, rows, plan.copies, plan.sends, checks, plan.meet, plan.drop)
        data = encode(step)
        for name in self.step_ids:
            self.ranks.send_multipart([name, data])

    def release(self, effect: Release) -> None:
        """The tokens of an agreed step leave."""
        step = self.book.open.pop(effect.n)
        dropped, logprobs, outputs = effect.dropped, step.logprobs, self.outputs
        if self.settings.role == "prefill":
            for number, entry in enumerate(step.entries):
                if entry is not None:
                    entry.top = logprobs[number] if logprobs else None
            return
        words = self.writer if self.settings.log_tokens else None
        number = -1
        for token, entry in zip(step.tokens, step.entries):
            number += 1
            if entry is None or (dropped and number in dropped):
                continue
            index = entry.index
            entry.index = index + 1
            top = logprobs[number] if logprobs else None
            output = outputs.get(entry.gateway)
            if output is None:
                output = self.output(entry.gateway)
            output[0].append(Tokens(entry.room, index, [token], [] if top is None else [top]))
            if words is not None:
                words.write(Words((entry.room.id, entry.room.generation), index, [token]))

    def output(self, gateway: str) -> tuple[list[Tokens], list[Ended]]:
        output = self.outputs.get(gateway)
        if output is None:
            output = self.outputs[gateway] = ([], [])
        return output

    def say_peer(self, link: str, message: Any) -> None:
        data = encode(message)
        sock = self.dialled.get(link)
        if sock is not None:
            try:
                sock.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self.log.warning("peer does not take messages, one is lost", peer=link, kind=type(message).__name__)
        else:
            self.public.send_multipart([link.encode("latin-1"), data])

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
            "epoch": self.settings.epoch,
            "name": fault.name,
            "detail": fault.detail,
            "rank": fault.rank,
            "step": fault.n,
            "charged": [str(room) for room in fault.charged],
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
