"""The API server of a specimen with vLLM's face: `python -m vllm.entrypoints.openai.api_server`."""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time

import zmq

from closeranks.lab.specimens.directions import Directions
from closeranks.lab.specimens.stage import STRIKE_AT, Stage, die_with_parent, log_to_stderr
from closeranks.lab.specimens.stand_in import JSON, TEXT, Answer, Routes, StandIn

from ...v1.engine.core import run_engine_core
from ...v1.executor.multiproc_executor import VllmLogFormat

STATS_SECONDS = 1.0
FEED_SECONDS = 0.2


def parse(argv: list[str]) -> argparse.Namespace:
    """vLLM's flags that a specimen shows."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    return parser.parse_args(argv)


class ApiServer:
    """/health is a flag that only a noticed death would change; the numbers are the core's last ones."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.logger = log_to_stderr(VllmLogFormat("APIServer"))

    def health(self) -> Answer:
        return 200, JSON, ""

    def metrics(self) -> Answer:
        board, labels = self.stage.board, '{engine="0",model_name="m"}'
        lines = [
            f"vllm:num_requests_running{labels} {board.get(0, 'running')}",
            f"vllm:num_requests_waiting{labels} {board.get(0, 'queued')}",
            f"vllm:kv_cache_usage_perc{labels} 0.004",
            f"vllm:generation_tokens_total{labels} {board.get(0, 'generated')}",
        ]
        return 200, TEXT, "\n".join(lines) + "\n"

    def version(self) -> Answer:
        return 200, JSON, json.dumps({"version": "0.32.0"})

    def log_stats(self) -> None:
        """Side thread: vLLM's periodic line, from the counters' growth."""
        before, tick, told = 0.0, threading.Event(), False
        while True:
            tick.wait(STATS_SECONDS)
            board = self.stage.board
            generated = board.get(0, "generated")
            self.logger.info(
                "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: %.1f tokens/s, Running: "
                "%d reqs, Waiting: 0 reqs, GPU KV cache usage: 0.4%%, Prefix cache hit rate: 0.0%%",
                (generated - before) / STATS_SECONDS,
                board.get(0, "running"),
            )
            before = generated
            if not self.stage.specimen.fault and not told:
                told = True
                self.stage.tell("standing")

    def feed(self) -> None:
        """Side thread: requests now and then, as clients would send them, until the fault is due."""
        socket, tick = zmq.Context().socket(zmq.PUSH), threading.Event()
        socket.connect(f"ipc://{self.stage.folder}/scheduler.ipc")
        while self.stage.specimen.load and self.stage.board.get(0, "iteration") < 3 * STRIKE_AT:
            tick.wait(FEED_SECONDS)
            socket.send_json({"rows": self.stage.specimen.load})


def main(argv: list[str]) -> None:
    args = parse(argv)
    directions = Directions.read()
    die_with_parent(directions.parent)
    stage = Stage(args.tensor_parallel_size, directions)
    server = ApiServer(stage)
    context = multiprocessing.get_context("fork")
    context.Process(target=run_engine_core, args=(stage, os.getpid()), name="EngineCore").start()
    for side in (server.log_stats, server.feed, lambda: report_core_death(stage)):
        threading.Thread(target=side, daemon=True).start()
    routes: Routes = {"/health": server.health, "/metrics": server.metrics, "/version": server.version}
    asyncio.run(StandIn(stage, server.logger, routes).serve())


def report_core_death(stage: Stage) -> None:
    """Side thread: tells the harness, and nobody else, that EngineCore has gone; leaves it unreaped (state Z)."""
    info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    if info is not None:
        stage.tell("child_died", None, name="EngineCore", exit_code=-info.si_status, t_seen=time.time())


if __name__ == "__main__":
    main(sys.argv[1:])
