"""Prefill's loop: receive, agree on handshakes, on HiCache and on transfers, run a batch."""

from typing import Any

from closeranks.lab.specimens.programs.sglang.srt.disaggregation.utils import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING_FOR_INPUT,
    poll_and_all_reduce,
)

IN_FLIGHT = 8
"""Rooms that are sent at a time, as many as decode takes."""
PAGE_SECONDS = 0.001
"""Time to compute a page."""


class SchedulerDisaggregationPrefillMixin:
    """Prefill's part of the scheduler; `self` is the `Scheduler`."""

    def event_loop_normal_disagg_prefill(self: Any) -> None:
        while True:
            recv_reqs = self.recv_requests()
            self.process_input_requests(recv_reqs)
            self.pop_bootstrapped()
            self.tree_cache.check_hicache_events()
            free = IN_FLIGHT - len(self.inflight_queue)
            batch, self.waiting_queue = self.waiting_queue[:free], self.waiting_queue[free:]
            if batch:
                self.run_batch(PAGE_SECONDS * sum(req.pages for req in batch))
                for req in batch:
                    self.tree_cache.write_backup(req.bootstrap_room)
                    self.kv_manager.add_transfer_request(req.bootstrap_room, req.pages)
                    self.inflight_queue.append(req)
            self.process_disagg_prefill_inflight_queue()

    def pop_bootstrapped(self: Any) -> None:
        infos = self.kv_manager.transfer_infos
        polls = [WAITING_FOR_INPUT if req.bootstrap_room in infos else BOOTSTRAPPING for req in self.bootstrap_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        self.waiting_queue += [r for r, state in zip(self.bootstrap_queue, agreed) if state == WAITING_FOR_INPUT]
        self.bootstrap_queue = [r for r, state in zip(self.bootstrap_queue, agreed) if state != WAITING_FOR_INPUT]

    def process_disagg_prefill_inflight_queue(self: Any) -> None:
        states = self.kv_manager.request_status
        polls = [states.get(req.bootstrap_room, TRANSFERRING) for req in self.inflight_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        ended = (SUCCESS, FAILED)
        self.inflight_queue = [req for req, state in zip(self.inflight_queue, agreed) if state not in ended]
