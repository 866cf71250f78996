"""The sockets to the leaders: one DEALER each, drained whole whenever it is readable.

ZeroMQ reconnects by itself; what was in flight when a connection broke is lost without a word. So each socket is
watched, and a broken connection is an event of its own.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import zmq
import zmq.auth
from zmq.utils.monitor import parse_monitor_message

from closeranks.protocol import Attach, FromEngine, ToEngine, decode_from_engine, encode

HIGH_WATER = 20_000
"""Messages queued per direction and leader; beyond it a leader is not reading, which counts as a broken connection."""

log = structlog.get_logger()


class Receiver(Protocol):
    """What the links report to."""

    def on_message(self, endpoint: str, message: FromEngine) -> None: ...

    def on_link_lost(self, endpoint: str) -> None: ...


class CurveKeyError(ValueError):
    """The key file is missing or holds no secret key; the text names it."""


class Link:
    """The connection to one leader. Lives in the event loop's thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str, receiver: Receiver, curve_key: str
    ) -> None:
        """`curve_key`: the deployment's key file, for `tcp://` (empty: no encryption). Raises CurveKeyError."""
        self.endpoint = endpoint
        self.dropped = 0
        """Messages that could not be queued."""
        self._receiver = receiver
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if endpoint.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
            if curve_key:
                public, secret = load_curve(curve_key)
                self._socket.curve_publickey = public
                self._socket.curve_secretkey = secret
                self._socket.curve_serverkey = public
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._loop.add_reader(self._socket.fileno(), self.poll)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self.poll()

    def attach(self) -> None:
        """Say that the gateway is there; the leader answers with its Status."""
        self.send(Attach(self._name))

    def send(self, message: ToEngine) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            log.error("a leader takes no messages", endpoint=self.endpoint, dropped=self.dropped)
            self._loop.call_soon(self._receiver.on_link_lost, self.endpoint)
        # sending may consume the descriptor's edge for messages that have come in meanwhile
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.poll)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def poll(self) -> None:
        """Take in everything that has arrived."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_from_engine.decode(frame)
            except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one
                log.error("unreadable message from a leader", endpoint=self.endpoint, size=len(frame), error=str(error))
                continue
            self._receiver.on_message(self.endpoint, message)

    def _watch(self) -> None:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                self.poll()  # what arrived before counts
                self._receiver.on_link_lost(self.endpoint)


def load_curve(path: str) -> tuple[bytes, bytes]:
    """(public, secret) of the deployment. Raises CurveKeyError."""
    try:
        public, secret = zmq.auth.load_certificate(Path(path))
    except (OSError, ValueError) as error:
        raise CurveKeyError(f"{path}: {error}") from error
    if secret is None:
        raise CurveKeyError(f"{path} has no secret key")
    return public, secret
