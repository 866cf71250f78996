"""One rank: the event loop of SGLang in miniature, with the points at which a specimen's fault strikes."""

import ctypes
import json
import logging
import os
import signal
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import setproctitle
import torch
import torch.distributed as dist
import zmq

from closeranks.lab.specimens.stage import AFTER_THE_LOAD, STRIKE_AT, LogFormat, Stage, die_with_parent, log_to_stderr

from ..disaggregation.decode import SchedulerDisaggregationDecodeMixin
from ..disaggregation.nixl.conn import NixlKVManager
from ..disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from ..layers.model import Model
from ..mem_cache.hiradix_cache import HiRadixCache
from ..utils.common import broadcast_pyobj

GLOO_TIMEOUT = timedelta(seconds=7200)
IDLE_POLL_MS = 50
STEP_SECONDS = 0.02
TOKENS_PER_REQUEST = 40


class Scheduler(SchedulerDisaggregationDecodeMixin, SchedulerDisaggregationPrefillMixin):
    """The event loop of one tensor-parallel rank."""

    def __init__(self, stage: Stage, tp_rank: int, silent_port: int, logger: logging.Logger) -> None:
        self.stage, self.tp_rank, self.silent_port, self.logger = stage, tp_rank, silent_port, logger
        self.specimen = stage.specimen
        self.transfer_queue: list[list[int]] = []
        self.bootstrap_queue: list[list[int]] = []
        self.inflight_queue: list[list[int]] = []
        self.running: list[list[int]] = []
        self.paused = False
        self.announced = False
        self.settled_for = 0
        self.transfers_stuck = False
        self.iteration = 0
        self.last = time.monotonic()
        self.idle_in_iteration = 0.0
        self.init_distributed()
        self.tree_cache = HiRadixCache(stage, tp_rank, self.tp_cpu_group, self.tp_device_group, logger)
        self.kv_manager = NixlKVManager(stage, tp_rank, self.specimen.mode)
        self.asked: dict[int, int] = {}  # room of a request that came over HTTP → tokens that it wants
        self.model = Model(stage, tp_rank, self.tp_device_group)
        if tp_rank == 0:
            self.recv_from_tokenizer = zmq.Context().socket(zmq.PULL)
            self.recv_from_tokenizer.bind(f"ipc://{stage.folder}/scheduler.ipc")
            self.send_to_detokenizer = zmq.Context().socket(zmq.PUSH)
            self.send_to_detokenizer.connect(f"ipc://{stage.folder}/detokenizer.ipc")
        logger.info("Load weight begin. avail mem=13.01 GB")
        self.model.load_weights()
        dist.barrier(group=self.tp_cpu_group)
        logger.info(
            "Load weight end. type=LlamaForCausalLM, dtype=torch.float32, avail mem=12.84 GB, mem usage=0.17 GB."
        )

    def init_distributed(self) -> None:
        self.logger.info("Init torch distributed begin.")
        store = torch._C._distributed_c10d.FileStore(str(self.stage.folder / "rendezvous"), self.stage.world)
        dist.init_process_group(
            "gloo", store=store, rank=self.tp_rank, world_size=self.stage.world, timeout=GLOO_TIMEOUT
        )
        group = dist.group.WORLD
        assert group is not None
        self.tp_cpu_group = group
        self.tp_device_group = dist.new_group(timeout=GLOO_TIMEOUT)  # NCCL's place: the model's collectives
        self.logger.info("Init torch distributed ends. mem usage=0.00 GB")
        if self.specimen.flight_recorder:
            threading.Thread(target=self.dump_flight_recorder, daemon=True).start()

    def dump_flight_recorder(self) -> None:
        """Side thread: writes torch's own record of the collectives when the launcher asks for it."""
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined,unused-ignore]

        self.stage.dump_flight_recorder.wait()
        path = self.stage.folder / f"nccl_trace_rank_{self.tp_rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(_dump_fr_trace_json())
        partial.rename(path)
        self.stage.tell("flight_recorder", self.tp_rank, path=str(path))

    def recv_requests(self) -> list[dict[str, Any]]:
        if self.stage.strikes("gil_held", self.tp_rank):
            self.wait_holding_the_gil()
        received: list[dict[str, Any]] = []
        if self.tp_rank == 0:
            busy = self.running and not self.paused
            before = time.monotonic()
            if self.recv_from_tokenizer.poll(0 if busy else IDLE_POLL_MS):
                received.append(json.loads(self.recv_from_tokenizer.recv()))
            self.idle_in_iteration = 0.0 if busy else time.monotonic() - before
        return broadcast_pyobj(received, self.tp_rank, self.tp_cpu_group)

    def process_input_requests(self, recv_reqs: list[dict[str, Any]]) -> None:
        for message in recv_reqs:
            if message["kind"] == "pause_generation":
                self.paused = True
                self.stage.strikes("paused", self.tp_rank)
                self.logger.info("Generation paused by pause_generation (mode=retract).")
                continue
            if message["kind"] == "abort":
                self.abort_request(message)
                continue
            self.asked |= {int(req["room"]): int(req["tokens"]) for req in message["reqs"] if "tokens" in req}
            if self.specimen.mode == "decode":
                self.admit_decode(message["reqs"])
            else:
                self.admit_prefill(message["reqs"])

    def get_next_batch_to_run(self) -> list[list[int]]:
        return [] if self.paused else list(self.running)

    def run_batch(self, batch: list[list[int]]) -> None:
        if self.stage.strikes("raises", self.tp_rank):
            raise ValueError(f"token id 151936 of request r{batch[0][0]} is outside the vocabulary of 151936")
        if self.stage.strikes("killed", self.tp_rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stage.strikes("stopped", self.tp_rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        self.model.forward(len(batch))
        time.sleep(STEP_SECONDS)  # the time that a device would compute

    def process_batch_result(self, batch: list[list[int]]) -> None:
        board, rank = self.stage.board, self.tp_rank
        if self.specimen.mode == "prefill":
            board.add(rank, "prompted", 512 * len(batch))
            self.inflight_queue += [[room, 0] for room, _ in batch]
            self.running.clear()
            self.log_batch("Prefill")
        else:
            board.add(rank, "generated", len(batch))
            for entry in batch:
                entry[1] += 1
            done = [entry for entry in batch if entry[1] >= self.asked.get(entry[0], TOKENS_PER_REQUEST)]
            board.add(rank, "finished", len(done))
            self.stream_output([(room, tokens) for room, tokens in done])
            self.running = [entry for entry in batch if entry not in done]
            if self.iteration % 10 == 0:
                self.log_batch("Decode")

    def stream_output(self, done: list[tuple[int, int]]) -> None:
        """Finished requests, to whoever asked: through the detokenizer, by the entry rank alone."""
        for room, tokens in done:
            if self.asked.pop(room, 0) and self.tp_rank == 0:
                self.send_to_detokenizer.send_json({"room": room, "tokens": tokens})

    def abort_request(self, message: dict[str, Any]) -> None:
        """Takes requests that came over HTTP out of every queue; `room` 0: all of them."""
        rooms = {room for room in self.asked if message["room"] in (0, room)}
        for queue in (self.transfer_queue, self.bootstrap_queue, self.inflight_queue, self.running):
            queue[:] = [entry for entry in queue if entry[0] not in rooms]
        for room in rooms:
            del self.asked[room]

    def on_idle(self) -> None:
        """Nothing to run: the loop turns on."""

    def log_batch(self, kind: str) -> None:
        if self.tp_rank:
            return
        if kind == "Prefill":
            self.logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: 0, token usage: 0.01, #running-req: 0, "
                "#queue-req: 0, #pending-token: 0, #bootstrap-req: %d, #inflight-req: %d, #optimistic-req: 0, "
                "cuda graph: False, input throughput (token/s): 9120.44",
                *(len(self.inflight_queue), 512 * len(self.inflight_queue)),
                *(len(self.bootstrap_queue), len(self.inflight_queue)),
            )
            return
        self.logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: 0.01, pre-allocated usage: 0.00, "
            "#prealloc-req: 0, #transfer-req: %d, #retracted-req: 0, cuda graph: True, "
            "gen throughput (token/s): %.2f, #queue-req: 0",
            *(len(self.running), 512 * len(self.running), len(self.transfer_queue), 45.2 * len(self.running)),
        )

    def end_of_iteration(self) -> None:
        """Progress numbers, written by a loop that turns and by nobody else."""
        now = time.monotonic()
        self.iteration += 1
        board = self.stage.board
        board.add(self.tp_rank, "loop_seconds", now - self.last)
        board.add(self.tp_rank, "idle_seconds", self.idle_in_iteration)
        self.last = now
        waiting = len(self.running) if self.paused else 0
        board.put(
            self.tp_rank,
            iteration=self.iteration,
            heartbeat=time.time(),
            running=0 if self.paused else len(self.running),
            paused=waiting,
            bootstrap=len(self.bootstrap_queue),
            inflight=len(self.inflight_queue),
            transfer=len(self.transfer_queue),
        )
        if self.iteration == 1:
            self.stage.tell("ready", self.tp_rank)
        self.announce_standing_work()

    def announce_standing_work(self) -> None:
        """The onset of faults that leave the loop alive: some iterations after the work began to stand."""
        held = self.transfer_queue or self.bootstrap_queue
        settled = {
            "": True,
            "frontend_blocks": not self.running,
            "transfer_stuck": held and not self.running,
            "bootstrap_thread_dies": held,
            "paused": self.paused,
        }
        self.settled_for = self.settled_for + 1 if settled.get(self.specimen.fault, False) else 0
        client_done = self.iteration > AFTER_THE_LOAD
        if client_done and self.settled_for >= STRIKE_AT and self.tp_rank == 0 and not self.announced:
            self.announced = True
            self.stage.tell("standing", self.tp_rank)

    def wait_holding_the_gil(self) -> None:
        """A C library's wait, called without releasing the GIL, for a thread that needs the GIL to go on."""
        libc, holding = ctypes.PyDLL(None), ctypes.CDLL(None)
        semaphore = ctypes.create_string_buffer(64)
        libc.sem_init(semaphore, 0, 0)
        started = threading.Event()

        def transfer_worker() -> None:
            started.set()
            holding.usleep(200_000)  # releases the GIL, and needs it back to post
            holding.sem_post(semaphore)

        threading.Thread(target=transfer_worker, daemon=True).start()
        started.wait()
        libc.sem_wait(semaphore)


def hang_at_exit() -> None:
    """A thread that is no daemon and never ends, which interpreter exit waits for."""
    threading.Thread(target=threading.Event().wait, name="prefetch_thread_func").start()


def run_scheduler_process(stage: Stage, tp_rank: int, parent: int, silent_port: int) -> None:
    """Entry of a rank's process."""
    die_with_parent(parent)
    setproctitle.setproctitle(f"sglang::scheduler_TP{tp_rank}")
    logger = log_to_stderr(LogFormat(f" TP{tp_rank}"))
    torch.set_num_threads(1)
    stage.tell("process", tp_rank, role="scheduler")
    try:
        scheduler = Scheduler(stage, tp_rank, silent_port, logger)
        if stage.specimen.mode == "decode":
            scheduler.event_loop_normal_disagg_decode()
        else:
            scheduler.event_loop_normal_disagg_prefill()
    except (RuntimeError, ValueError):
        logger.error("Scheduler hit an exception: %s", traceback.format_exc())
        hang_at_exit()
        raise SystemExit(1) from None
