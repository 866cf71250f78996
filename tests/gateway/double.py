"""A stand-in for a leader: a ROUTER over ipc that follows the protocol, with scripted tokens and planted trouble."""

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.auth

from closeranks.protocol import (
    Abort,
    Attach,
    Ended,
    Fingerprint,
    Output,
    RoomId,
    Status,
    Submit,
    Tokens,
    TopLogprobs,
    decode_to_engine,
    encode,
)

FINGERPRINT = Fingerprint(1, "weights", "float32", "16 tokens", "tokenizer", "xxh3_64")


@dataclass
class Room:
    submit: Submit
    gateway: bytes
    sent: int = 0


@dataclass
class Leader:
    """`script(submit)` gives all output tokens of a request, from its first; a resumed one gets the rest of them."""

    endpoint: str
    role: str = "both"
    script: Callable[[Submit], list[int]] = lambda submit: [104] * 1000
    context_length: int = 512
    step_s: float = 0.002
    instance: int = 1
    state: str = "ready"
    silent: bool = False
    """No Status, no Output: as a stopped process."""
    paused: bool = False
    """Status goes on, tokens do not."""
    mangle: Callable[[Output], list[Output]] | None = None
    """Makes what is sent of what should be."""
    refuse: Callable[[Submit], Ended | None] | None = None
    fingerprint: Fingerprint = FINGERPRINT
    curve_key_file: str = ""
    oldest_wait_s: float = 0.0
    slowest_rank: int = -1
    last_progress_s: float = 0.0
    rooms: dict[RoomId, Room] = field(default_factory=dict)
    submits: list[Submit] = field(default_factory=list)
    aborts: list[RoomId] = field(default_factory=list)
    tokens_sent: int = 0
    _orders: "queue.Queue[Callable[[], None]]" = field(default_factory=queue.Queue)
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: int = -1
    _gateways: set[bytes] = field(default_factory=set)
    _socket: Any = None
    _thread: Any = None

    def __enter__(self) -> "Leader":
        ready = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)
        os.close(self._wake)

    # ---- what tests do to it

    def do(self, order: Callable[[], None]) -> None:
        """Run in the leader's thread, and wait for it."""
        done = threading.Event()
        self._orders.put(lambda: (order(), done.set())[0])
        os.eventfd_write(self._wake, 1)
        assert done.wait(10)

    def restart(self) -> None:
        """As a new epoch under the same address: nothing is known any more."""

        def order() -> None:
            self.rooms.clear()
            self.instance += 1
            self._say_status()

        self.do(order)

    def end_all(self, reason: str, *, retryable: bool, charged: bool = False, detail: str = "") -> None:
        def order() -> None:
            for room in list(self.rooms.values()):
                ended = Ended(room.submit.room, reason, detail, retryable, charged=charged)
                self._send(room.gateway, Output([], [ended]))
            self.rooms.clear()

        self.do(order)

    def reset(self) -> None:
        """As at the start, for the next test; the instance stays."""

        def order() -> None:
            self.rooms.clear()
            self.submits.clear()
            self.aborts.clear()
            self.silent = self.paused = False
            self.mangle = self.refuse = None
            self.step_s, self.state, self.oldest_wait_s, self.slowest_rank = 0.002, "ready", 0.0, -1
            self.script = lambda submit: [104] * 1000

        self.do(order)

    # ---- what it does

    def _run(self, ready: threading.Event) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self.curve_key_file:
            public, secret = zmq.auth.load_certificate(self.curve_key_file)
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
        self._socket.bind(self.endpoint)
        if self.endpoint.startswith("tcp://"):
            self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        ready.set()
        due = time.monotonic()
        while not self._stop.is_set():
            if self.rooms and self.role != "prefill":
                awake = dict(poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000))))
            else:  # it has no step to take: the one that serves all tests of a run costs nothing in between
                awake = dict(poller.poll())
                due = time.monotonic() + self.step_s
            if self._wake in awake:
                os.eventfd_read(self._wake)
            while self._socket.poll(0):
                gateway, frame = self._socket.recv_multipart()
                self._take(gateway, decode_to_engine.decode(frame))
            while not self._orders.empty():
                self._orders.get()()
            if time.monotonic() >= due:
                due = time.monotonic() + self.step_s
                if not self.paused and not self.silent and self.role != "prefill":
                    self._step()
        self._socket.close()
        context.term()

    def _take(self, gateway: bytes, message: Any) -> None:
        self._gateways.add(gateway)
        if isinstance(message, Attach):
            self._say_status()
        elif isinstance(message, Submit):
            self.submits.append(message)
            refused = self.refuse(message) if self.refuse else None
            if refused is not None:
                self._send(gateway, Output([], [refused]))
            else:
                self.rooms[message.room] = Room(message, gateway)
        elif isinstance(message, Abort):
            self.aborts.append(message.room)
            self.rooms.pop(message.room, None)

    def _step(self) -> None:
        outputs: dict[bytes, Output] = {}
        for room in list(self.rooms.values()):
            submit = room.submit
            done = len(submit.tokens) - submit.prompt_length
            wanted = self.script(submit)
            at = done + room.sent
            if at >= len(wanted):
                continue  # silence: the script says nothing more
            token = wanted[at]
            output = outputs.setdefault(room.gateway, Output([], []))
            logprobs = []
            if submit.sampling.logprobs >= 0:
                top = [(token, -0.5), (0, -float("inf"))][: submit.sampling.logprobs]
                logprobs = [TopLogprobs(-0.5, top)]
            output.tokens.append(Tokens(submit.room, submit.prompt_length + at, [token], logprobs))
            room.sent += 1
            self.tokens_sent += 1
            reason = "stop" if token in submit.stop_ids else "length" if room.sent >= submit.max_new_tokens else ""
            if reason:
                output.ended.append(Ended(submit.room, reason, "", False, cached_tokens=3))
                del self.rooms[submit.room]
        for gateway, output in outputs.items():
            for sent in self.mangle(output) if self.mangle else [output]:
                self._send(gateway, sent)

    def _say_status(self) -> None:
        status = Status(
            engine=self.role,
            role=self.role,
            epoch=self.instance,
            instance=self.instance,
            state=self.state,
            tp_size=1,
            page_size=16,
            context_length=self.context_length,
            max_request_tokens=self.context_length,
            fingerprint=self.fingerprint,
            pages_total=100,
            pages_free=100,
            pages_cached=0,
            pages_owned=0,
            pages_quarantined=0,
            waiting=0,
            running=0 if self.role == "prefill" else len(self.rooms),
            rooms_open=len(self.rooms),
            oldest_wait_s=self.oldest_wait_s,
            last_progress_s=self.last_progress_s,
            slowest_rank=self.slowest_rank,
            counters={"decode_tokens": self.tokens_sent, "requests": len(self.submits), "aborted": 0, "steps": 0},
        )
        for gateway in self._gateways:
            self._send(gateway, status)

    def _send(self, gateway: bytes, message: Any) -> None:
        if not self.silent:
            self._socket.send_multipart([gateway, encode(message)])
