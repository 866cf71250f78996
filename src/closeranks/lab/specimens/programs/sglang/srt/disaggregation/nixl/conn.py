"""The KV manager's helper thread; prefill's dies for good on the first message that it does not know."""

import queue
import threading

import zmq

from closeranks.lab.specimens.stage import Stage

GUARD = b"NixlMsgGuard"


class NixlKVManager:
    """Hands handshake messages to a thread of its own; `handshakes` are the rooms that it has answered."""

    def __init__(self, stage: Stage, rank: int, mode: str) -> None:
        self.stage, self.rank = stage, rank
        self.handshakes: set[int] = set()
        self._arrived: set[int] = set()
        self._fabric = zmq.Context().socket(zmq.PULL if mode == "decode" else zmq.PUSH)
        where = f"ipc://{stage.fabric}/kv_{rank}.ipc"  # a rank of prefill writes to the same rank of decode
        if mode == "decode":
            self._fabric.bind(where)
        else:
            self._fabric.connect(where)
        self._socket: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        if mode == "prefill":
            self._start_bootstrap_thread()
        else:
            self._start_decode_thread()

    def ask(self, room: int) -> None:
        """What decode's metadata message does: it arrives on the bootstrap socket."""
        if self.stage.strikes("bootstrap_thread_dies", self.rank):
            self._socket.put([b"ABORT", str(room).encode()])
        self._socket.put([GUARD, str(room).encode()])

    def hand_over(self, room: int) -> None:
        """Prefill: this rank's pages of the room are written."""
        self._fabric.send(b"%d" % room)

    def has_arrived(self, room: int) -> bool:
        """Decode: whether prefill's same rank has written its pages of the room."""
        while self._fabric.poll(0):
            self._arrived.add(int(self._fabric.recv()))
        return room in self._arrived

    def _start_bootstrap_thread(self) -> None:
        def bootstrap_thread() -> None:
            while True:
                waiting_req_bytes = self._socket.get()
                assert waiting_req_bytes[0] == GUARD, f"First message should be {GUARD!r}. Foreign traffic?"
                self.handshakes.add(int(waiting_req_bytes[1]))

        threading.Thread(target=bootstrap_thread, daemon=True).start()

    def _start_decode_thread(self) -> None:
        def decode_listener_thread() -> None:
            while True:
                self._socket.get()

        threading.Thread(target=decode_listener_thread, daemon=True).start()
