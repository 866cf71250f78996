"""The KV manager: threads beside the loop that read and change what the loop decides by."""

import json
import queue
import threading
import time
from logging import Logger
from pathlib import Path

import zmq

from closeranks.lab.specimens.programs.sglang.srt.disaggregation.utils import FAILED, SUCCESS

from ...mem_cache.hiradix_cache import HiRadixCache

TRANSFER_SECONDS = 0.004
"""Time to write a page."""


class NixlKVManager:
    """Of one rank. `transfer_infos` and `request_status` belong to nobody: the loop and the threads both write them."""

    def __init__(self, engine: str, rank: int, folder: Path, cache: HiRadixCache, logger: Logger) -> None:
        self.rank, self.cache, self.logger = rank, cache, logger
        self.transfer_infos: dict[int, float] = {}
        self.request_status: dict[int, int] = {}
        self._outgoing: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        names = [f"ipc://{folder}/bootstrap_{rank}.ipc", f"ipc://{folder}/status_{rank}.ipc"]
        own, theirs = names if engine == "prefill" else names[::-1]
        threads = [lambda: self._send_to(theirs), lambda: self._listen_at(own)]
        if engine == "prefill":
            threads.append(self.transfer_worker)
        for target in threads:
            threading.Thread(target=target, daemon=True).start()

    # ---------------------------------------------------------------------------------------------- called by the loop

    def send_metadata(self, room: int) -> None:
        """Decode: the pages are there, write."""
        self._outgoing.put({"kind": "metadata", "room": room})

    def add_transfer_request(self, room: int, pages: int) -> None:
        self._jobs.put((room, pages))

    def has_failed(self, room: int) -> bool:
        return self.request_status.get(room) == FAILED

    def abort(self, room: int) -> None:
        """The client left: the room goes, whoever works on it; decode tells the same rank of prefill."""
        self.transfer_infos.pop(room, None)
        self._outgoing.put({"kind": "abort", "room": room})

    # -------------------------------------------------------------------------------------------------------- threads

    def _send_to(self, where: str) -> None:
        socket = zmq.Context().socket(zmq.PUSH)
        socket.connect(where)
        while True:
            socket.send(json.dumps(self._outgoing.get()).encode())

    def _listen_at(self, where: str) -> None:
        socket = zmq.Context().socket(zmq.PULL)
        socket.bind(where)
        while True:
            message = json.loads(socket.recv())
            room = int(message["room"])
            if message["kind"] == "metadata":
                self.transfer_infos[room] = time.monotonic()
            elif message["kind"] == "status":
                self.request_status[room] = int(message["status"])
            else:
                self.transfer_infos.pop(room, None)
                self.request_status[room] = FAILED
                self.cache.forget(room)

    def transfer_worker(self) -> None:
        while True:
            room, pages = self._jobs.get()
            try:
                for _ in range(pages):
                    assert room in self.transfer_infos
                    time.sleep(TRANSFER_SECONDS)
                status = SUCCESS
            except AssertionError:
                self.logger.exception("Unexpected transfer worker error for room %d: ", room)
                status = FAILED
                self.cache.forget(room)
            self.request_status[room] = status
            self._outgoing.put({"kind": "status", "room": room, "status": status})
