"""The prefill side's loop: receive, agree on HiCache, on handshakes and on transfers, run a batch."""

from typing import Any

import torch

from .utils import BOOTSTRAPPING, SUCCESS, TRANSFERRING, WAITING_FOR_INPUT, poll_and_all_reduce


class SchedulerDisaggregationPrefillMixin:
    """Prefill's part of the scheduler. Entries are `[room, age]`, the age counted in polls.

    `self` is the `Scheduler`.
    """

    bootstrap_queue: list[list[int]]
    inflight_queue: list[list[int]]

    @torch.no_grad()
    def event_loop_normal_disagg_prefill(self: Any) -> None:
        while True:
            recv_reqs = self.recv_requests()
            self.process_input_requests(recv_reqs)
            self.pop_bootstrapped()
            batch = self.get_new_batch_prefill()
            if batch:
                self.run_batch(batch)
                self.process_batch_result(batch)
            else:
                self.on_idle()
            self.process_disagg_prefill_inflight_queue()
            self.end_of_iteration()

    def get_new_batch_prefill(self: Any) -> list[list[int]]:
        self.tree_cache.check_hicache_events()
        batch: list[list[int]] = self.get_next_batch_to_run()
        return batch

    def pop_bootstrapped(self: Any) -> None:
        handshakes = self.kv_manager.handshakes
        polls = [WAITING_FOR_INPUT if entry[0] in handshakes else BOOTSTRAPPING for entry in self.bootstrap_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        ready = [entry for entry, state in zip(self.bootstrap_queue, agreed) if state == WAITING_FOR_INPUT]
        for entry in ready:
            self.bootstrap_queue.remove(entry)
            self.running.append([entry[0], 0])

    def process_disagg_prefill_inflight_queue(self: Any) -> None:
        for entry in self.inflight_queue:
            entry[1] += 1
        polls = [SUCCESS if age > 2 else TRANSFERRING for _, age in self.inflight_queue]
        agreed = poll_and_all_reduce(polls, self.tp_cpu_group)
        sent = [e[0] for e, state in zip(self.inflight_queue, agreed) if state == SUCCESS and e[0] in self.asked]
        for room in sent:
            self.kv_manager.hand_over(room)
        self.stream_output([(room, 1) for room in sent])
        self.inflight_queue = [e for e, state in zip(self.inflight_queue, agreed) if state != SUCCESS]

    def admit_prefill(self: Any, reqs: list[dict[str, Any]]) -> None:
        for req in reqs:
            self.bootstrap_queue.append([int(req["room"]), 0])
            self.kv_manager.ask(int(req["room"]))
