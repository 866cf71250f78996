"""The launcher of a specimen with SGLang's face: `python -m sglang.launch_server`.

Forks the ranks and the detokenizer, then serves HTTP on its main thread and plays the client that gives them work.
"""

import argparse
import multiprocessing
import os
import socket
import sys
from multiprocessing.process import BaseProcess

from closeranks.lab.specimens.directions import Directions
from closeranks.lab.specimens.stage import LogFormat, Stage, die_with_parent, log_to_stderr

from .srt.entrypoints.http_server import launch_http_server
from .srt.managers.detokenizer_manager import run_detokenizer_process
from .srt.managers.scheduler import run_scheduler_process


def parse(argv: list[str]) -> argparse.Namespace:
    """SGLang's flags that a specimen shows."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    parser.add_argument("--model-path", default="tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp-size", type=int, default=4)
    parser.add_argument("--disaggregation-mode", default="null")
    parser.add_argument("--disaggregation-transfer-backend", default="nixl")
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    parser.add_argument("--disable-overlap-schedule", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    directions = Directions.read()
    die_with_parent(directions.parent)
    logger = log_to_stderr(LogFormat(""))
    stage = Stage(args.tp_size, directions)
    logger.info("server_args=ServerArgs(%s)", ", ".join(f"{name}={value!r}" for name, value in vars(args).items()))
    (directions.folder / "rendezvous").unlink(missing_ok=True)  # of an earlier run in this folder
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    own = os.getpid()
    context = multiprocessing.get_context("fork")
    children: list[BaseProcess] = [
        context.Process(
            target=run_scheduler_process, args=(stage, rank, own, silent.getsockname()[1]), name=f"scheduler_{rank}"
        )
        for rank in range(args.tp_size)
    ]
    children.append(context.Process(target=run_detokenizer_process, args=(stage, own), name="detokenizer"))
    for child in children:
        child.start()
    launch_http_server(stage, args, children, silent.getsockname()[1], logger)


if __name__ == "__main__":
    main(sys.argv[1:])
