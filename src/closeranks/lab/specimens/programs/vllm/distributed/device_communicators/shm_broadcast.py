"""The message queue between EngineCore and its workers; a reader waits without a deadline."""

from typing import Any

import zmq


class MessageQueue:
    """One direction: `enqueue` on one side, `dequeue` on the other."""

    def __init__(self, address: str, *, reader: bool) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL if reader else zmq.PUSH)
        if reader:
            self.socket.bind(address)
        else:
            self.socket.connect(address)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)

    def enqueue(self, message: Any) -> None:
        self.socket.send_json(message)

    def dequeue(self) -> Any:
        return self.acquire_read()

    def acquire_read(self) -> Any:
        while True:
            if self.wait():
                return self.socket.recv_json()

    def wait(self) -> bool:
        return bool(self.poller.poll())
