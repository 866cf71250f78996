"""EngineCore: one process decides, workers obey."""

import json
import multiprocessing
import os
import queue
import signal
import threading
import time
from typing import Any

import setproctitle
import zmq

from closeranks.lab.specimens.stage import Stage, die_with_parent, log_to_stderr

from ..executor.multiproc_executor import MultiprocExecutor, VllmLogFormat

TOKENS_PER_REQUEST = 40


class EngineCoreProc:
    """The busy loop: new requests from the input queue, then a step of the model."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.input_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.running: list[int] = []
        self.steps = 0
        self.model_executor = MultiprocExecutor(stage, multiprocessing.get_context("fork"), os.getpid())
        threading.Thread(target=self.process_input_sockets, daemon=True).start()

    def process_input_sockets(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        socket.bind(f"ipc://{self.stage.folder}/scheduler.ipc")
        self.stage.tell("core_ready")
        while True:
            self.input_queue.put(json.loads(socket.recv()))

    def run_busy_loop(self) -> None:
        while True:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        while not self.running or not self.input_queue.empty():
            request = self.input_queue.get()
            self.running += [0] * int(request["rows"])
            self.stage.board.put(0, running=len(self.running))

    def _process_engine_step(self) -> None:
        if self.steps > 25 and self.stage.specimen.fault == "core_killed":
            self.stage.tell("onset", 0, fault="core_killed")
            os.kill(os.getpid(), signal.SIGKILL)
        self.step()

    def step(self) -> None:
        tokens = self.model_executor.execute_model(self.steps, len(self.running))
        self.steps += 1
        self.running = [n + 1 for n in self.running if n + 1 < TOKENS_PER_REQUEST]
        board = self.stage.board
        board.add(0, "generated", len(tokens))
        board.put(0, running=len(self.running), heartbeat=time.time())


def run_engine_core(stage: Stage, parent: int) -> None:
    """Entry of the process."""
    die_with_parent(parent)
    setproctitle.setproctitle("VLLM::EngineCore")
    logger = log_to_stderr(VllmLogFormat("EngineCore"))
    stage.tell("process", None, role="engine_core")
    core = EngineCoreProc(stage)
    logger.info("GPU KV cache size: 402,112 tokens")
    core.run_busy_loop()
