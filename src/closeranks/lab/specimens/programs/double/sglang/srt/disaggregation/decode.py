"""Decode's loop: receive, hand out pages, agree on transfers, run a batch."""

import json
from typing import Any

from closeranks.lab.specimens.programs.sglang.srt.disaggregation.utils import (
    SUCCESS,
    TRANSFERRING,
    poll_and_all_reduce,
)

STEP_SECONDS = 0.002
RESERVED = 8
"""Rooms that have pages and wait for their transfer, at most (from 9 int32 on gloo ends the rank with fewer)."""


class SchedulerDisaggregationDecodeMixin:
    """Decode's part of the scheduler; `self` is the `Scheduler`."""

    def event_loop_normal_disagg_decode(self: Any) -> None:
        while True:
            recv_reqs = self.recv_requests()
            self.process_input_requests(recv_reqs)
            if self.running:
                self.run_batch(STEP_SECONDS)
                self.process_batch_result()
            self.process_decode_queue()

    def process_decode_queue(self: Any) -> None:
        free = RESERVED - len(self.transfer_queue)
        granted, self.prealloc_queue = self.prealloc_queue[:free], self.prealloc_queue[free:]
        for req in granted:
            self.kv_manager.send_metadata(req.bootstrap_room)
        self.transfer_queue += granted
        self.pop_transferred()

    def pop_transferred(self: Any) -> None:
        """Rooms of which *this* rank heard that they failed are no longer polled."""
        states = self.kv_manager.request_status
        failed = [req for req in self.transfer_queue if self.kv_manager.has_failed(req.bootstrap_room)]
        for req in failed:
            self.transfer_queue.remove(req)
            self.logger.error(
                "Decode transfer failed for request rank=%d decode_req.req.bootstrap_room=%d with exception "
                "KVTransferError(bootstrap_room=%d): Failed to get kvcache from prefill instance",
                *(self.tp_rank, req.bootstrap_room, req.bootstrap_room),
            )
        polls = [states.get(req.bootstrap_room, TRANSFERRING) for req in self.transfer_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        arrived = [req for req, state in zip(self.transfer_queue, agreed, strict=False) if state == SUCCESS]
        for req in arrived:
            self.transfer_queue.remove(req)
        self.running += arrived

    def process_batch_result(self: Any) -> None:
        for req in self.running:
            req.done += 1
            if self.tp_rank == 0:
                token = {"room": req.bootstrap_room, "token": req.done}
                self.send_to_detokenizer.send(json.dumps(token).encode())
        self.running = [req for req in self.running if req.done < req.new]
