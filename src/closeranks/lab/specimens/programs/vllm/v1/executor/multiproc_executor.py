"""Workers and the executor that asks all of them and waits for all answers."""

import logging
import time
from multiprocessing.context import ForkContext
from typing import Any

import setproctitle

from closeranks.lab.specimens.stage import Stage, die_with_parent

from ...distributed.device_communicators.shm_broadcast import MessageQueue

STEP_SECONDS = 0.02


class WorkerProc:
    """One tensor-parallel worker."""

    def __init__(self, stage: Stage, rank: int) -> None:
        self.stage, self.rank = stage, rank
        self.rpc_broadcast_mq = MessageQueue(f"ipc://{stage.folder}/worker{rank}.ipc", reader=True)
        self.worker_response_mq = MessageQueue(f"ipc://{stage.folder}/response{rank}.ipc", reader=False)

    def worker_busy_loop(self) -> None:
        while True:
            method = self.rpc_broadcast_mq.dequeue()
            answer = self.execute(method)
            board = self.stage.board
            board.add(self.rank, "iteration", 1)
            board.put(self.rank, heartbeat=time.time())
            if not self.stage.strikes("message_lost", self.rank):
                self.worker_response_mq.enqueue(answer)

    def execute(self, method: dict[str, Any]) -> dict[str, Any]:
        time.sleep(STEP_SECONDS)  # the time that a device would compute
        return {"step": method["step"], "tokens": [7] * method["rows"]}

    @staticmethod
    def worker_main(stage: Stage, rank: int, parent: int) -> None:
        die_with_parent(parent)
        setproctitle.setproctitle(f"VLLM::Worker_TP{rank}")
        worker = WorkerProc(stage, rank)
        stage.tell("process", rank, role="worker")
        worker.worker_busy_loop()


class MultiprocExecutor:
    """EngineCore's side: one call to every worker, and the wait for every answer."""

    def __init__(self, stage: Stage, context: ForkContext, parent: int) -> None:
        world = range(stage.world)
        self.workers = [
            context.Process(target=WorkerProc.worker_main, args=(stage, rank, parent), name=f"VllmWorker-{rank}")
            for rank in world
        ]
        for worker in self.workers:
            worker.start()
        self.rpc_broadcast_mqs = [MessageQueue(f"ipc://{stage.folder}/worker{r}.ipc", reader=False) for r in world]
        self.response_mqs = [MessageQueue(f"ipc://{stage.folder}/response{r}.ipc", reader=True) for r in world]

    def execute_model(self, step: int, rows: int) -> list[int]:
        return self.collective_rpc({"step": step, "rows": rows})

    def collective_rpc(self, message: dict[str, Any]) -> list[int]:
        for queue in self.rpc_broadcast_mqs:
            queue.enqueue(message)
        return self.get_response()

    def get_response(self) -> list[int]:
        tokens: list[int] = []
        for queue in self.response_mqs:
            tokens = queue.dequeue()["tokens"]
        return tokens


class VllmLogFormat(logging.Formatter):
    """vLLM's prefix: `(Proc pid=N) INFO mm-dd HH:MM:SS [file.py:line] message`."""

    def __init__(self, process: str) -> None:
        super().__init__(
            f"({process} pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
            datefmt="%m-%d %H:%M:%S",
        )
