"""The decode side's loop: receive, agree on transfers, run a batch."""

import urllib.request
from typing import Any

import torch

from .utils import SUCCESS, TRANSFERRING, poll_and_all_reduce


class SchedulerDisaggregationDecodeMixin:
    """Decode's part of the scheduler. A request is `[room, age]`, the age counted in polls.

    `self` is the `Scheduler`.
    """

    transfer_queue: list[list[int]]

    @torch.no_grad()
    def event_loop_normal_disagg_decode(self: Any) -> None:
        while True:
            recv_reqs = self.recv_requests()
            self.process_input_requests(recv_reqs)
            self.process_decode_queue()
            batch = self.get_next_batch_to_run()
            if batch:
                self.run_batch(batch)
                self.process_batch_result(batch)
            else:
                self.on_idle()
            self.end_of_iteration()

    def process_decode_queue(self: Any) -> None:
        self._ensure_prefill_info()
        self.pop_transferred()

    def _ensure_prefill_info(self: Any) -> None:
        if self.stage.strikes("http_get", self.tp_rank):
            with urllib.request.urlopen(f"http://127.0.0.1:{self.silent_port}/route?engine_rank=-1") as answer:
                answer.read()

    def pop_transferred(self: Any) -> None:
        stage, rank = self.stage, self.tp_rank
        if not self.running and stage.strikes("queue_diverges", rank):
            for room, _ in self.transfer_queue:
                self.logger.error(
                    "Decode transfer failed for request rank=%d decode_req.req.rid='r%d' decode_req.req.bootstrap_room="
                    "%d with exception KVTransferError(bootstrap_room=%d): Aborted by AbortReq.",
                    *(rank, room, room, room),
                )
            self.transfer_queue.clear()
        if not self.running and stage.strikes("short_queue", rank):
            del self.transfer_queue[2:]
        polls = [self._poll(entry) for entry in self.transfer_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        arrived = [entry for entry, state in zip(self.transfer_queue, agreed, strict=False) if state == SUCCESS]
        for entry in arrived:
            self.transfer_queue.remove(entry)
            self.running.append([entry[0], 0])

    def _poll(self: Any, entry: list[int]) -> int:
        """Transfers take three polls; where the fault needs a full queue, every second one takes for ever."""
        entry[1] += 1
        if self.stage.strikes("transfer_stuck", self.tp_rank):
            self.transfers_stuck = True
        if entry[0] in self.asked:  # a real hand-over: it has arrived when prefill's rank has said so
            return SUCCESS if self.kv_manager.has_arrived(entry[0]) else TRANSFERRING
        slow = self.specimen.fault in ("queue_diverges", "short_queue") and entry[0] % 2 == 0
        return TRANSFERRING if slow or self.transfers_stuck or entry[1] < 3 else SUCCESS

    def admit_decode(self: Any, reqs: list[dict[str, Any]]) -> None:
        self.transfer_queue += [[int(req["room"]), 0] for req in reqs]
