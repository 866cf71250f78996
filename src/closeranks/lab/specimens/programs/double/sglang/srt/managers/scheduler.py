"""One rank: its loop, its own queues, and collectives with its peers as large as those queues."""

import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import setproctitle
import torch
import torch.distributed as dist
import zmq

from closeranks.lab.specimens.programs.sglang.srt.utils.common import broadcast_pyobj
from closeranks.lab.specimens.stage import LogFormat, die_with_parent, log_to_stderr

from ..disaggregation.decode import SchedulerDisaggregationDecodeMixin
from ..disaggregation.nixl.conn import NixlKVManager
from ..disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from ..mem_cache.hiradix_cache import HiRadixCache

GLOO_TIMEOUT = timedelta(seconds=7200)
IDLE_POLL_MS = 20


class Req:
    """One request in this rank's queues."""

    def __init__(self, message: dict[str, int]) -> None:
        self.bootstrap_room = message["room"]
        self.pages = message["pages"]
        self.new = message["new"]
        self.done = 0


class Scheduler(SchedulerDisaggregationDecodeMixin, SchedulerDisaggregationPrefillMixin):
    """The event loop of one tensor-parallel rank."""

    def __init__(self, engine: str, tp_rank: int, tp_size: int, folder: Path, logger: logging.Logger) -> None:
        self.engine, self.tp_rank, self.logger = engine, tp_rank, logger
        self.waiting_queue: list[Req] = []
        self.bootstrap_queue: list[Req] = []
        self.inflight_queue: list[Req] = []
        self.prealloc_queue: list[Req] = []
        self.transfer_queue: list[Req] = []
        self.running: list[Req] = []
        store = torch._C._distributed_c10d.FileStore(str(folder / f"{engine}.rendezvous"), tp_size)
        dist.init_process_group("gloo", store=store, rank=tp_rank, world_size=tp_size, timeout=GLOO_TIMEOUT)
        group = dist.group.WORLD
        assert group is not None
        self.tp_cpu_group = group
        self.tp_device_group = dist.new_group(timeout=GLOO_TIMEOUT)  # NCCL's place: the model's collectives
        self.tree_cache = HiRadixCache(self.tp_cpu_group)
        self.kv_manager = NixlKVManager(engine, tp_rank, folder, self.tree_cache, logger)
        context = zmq.Context()
        if tp_rank == 0:
            self.recv_from_tokenizer = context.socket(zmq.PULL)
            self.recv_from_tokenizer.bind(f"ipc://{folder}/{engine}.ipc")
            self.send_to_detokenizer = context.socket(zmq.PUSH)
            self.send_to_detokenizer.connect(f"ipc://{folder}/tokens.ipc")
        dist.barrier(group=self.tp_cpu_group)
        if tp_rank == 0:
            self.send_to_detokenizer.send(json.dumps({"ready": engine}).encode())

    def idle(self) -> bool:
        queues = (self.bootstrap_queue, self.waiting_queue, self.inflight_queue, self.transfer_queue, self.running)
        return not any(queues)

    def recv_requests(self) -> list[dict[str, Any]]:
        """What came to the entry rank, on every rank."""
        received: list[dict[str, Any]] = []
        if self.tp_rank == 0 and self.recv_from_tokenizer.poll(IDLE_POLL_MS if self.idle() else 0):
            while self.recv_from_tokenizer.poll(0):
                received.append(json.loads(self.recv_from_tokenizer.recv()))
        return broadcast_pyobj(received, self.tp_rank, self.tp_cpu_group)

    def process_input_requests(self, recv_reqs: list[dict[str, Any]]) -> None:
        for message in recv_reqs:
            if message["kind"] == "abort":
                self.abort_request(message["room"])
            elif self.engine == "prefill":
                self.bootstrap_queue.append(Req(message))
            else:
                self.prealloc_queue.append(Req(message))

    def abort_request(self, room: int) -> None:
        """Out of every queue, and out of the transfer that may be under way."""
        for queue in (self.bootstrap_queue, self.waiting_queue, self.prealloc_queue, self.transfer_queue, self.running):
            queue[:] = [req for req in queue if req.bootstrap_room != room]
        self.kv_manager.abort(room)

    def run_batch(self, seconds: float) -> None:
        """The forward pass: a collective among all ranks, and the time that a device would take."""
        dist.all_reduce(torch.ones(1), group=self.tp_device_group)
        time.sleep(seconds)


def run_scheduler_process(engine: str, tp_rank: int, tp_size: int, folder: Path, parent: int) -> None:
    """Entry of a rank's process."""
    die_with_parent(parent)
    os.setpgid(0, 0)
    setproctitle.setproctitle(f"sglang::scheduler_{engine}_TP{tp_rank}")
    logger = log_to_stderr(LogFormat(f" {engine} TP{tp_rank}"))
    torch.set_num_threads(1)
    scheduler = Scheduler(engine, tp_rank, tp_size, folder, logger)
    with torch.no_grad():
        if engine == "prefill":
            scheduler.event_loop_normal_disagg_prefill()
        else:
            scheduler.event_loop_normal_disagg_decode()
