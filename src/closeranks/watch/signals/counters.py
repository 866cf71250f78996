"""Counters and gauges of `/metrics`: SGLang's, vLLM's. Only named lines are read; a page has thousands.

The best sign of life over HTTP is SGLang's `scheduler_stage_seconds_total`, per rank: in every live loop it grows by
about the wall time, in a wedged one by nothing on all ranks.
"""

import asyncio
import math
import re
import time
from collections.abc import Sequence

from closeranks.watch.signals import NO_ADDRESS, Readings
from closeranks.watch.signals.fetch import Answer, Client
from closeranks.watch.snapshot import Blind, EngineSeen, Values
from closeranks.watch.snapshot import Signal as SignalName

# metric → field; several series of one name are summed
_FIELDS = {
    b"sglang:generation_tokens_total": "tokens",
    b"sglang:realtime_tokens_total": "worked",
    b"sglang:num_requests_total": "finished",
    b"sglang:num_aborted_requests_total": "aborted",
    b"sglang:num_bootstrap_failed_reqs_total": "unconnected",
    b"sglang:num_transfer_failed_reqs_total": "unsent",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:num_paused_reqs": "paused",
    b"sglang:num_prefill_bootstrap_queue_reqs": "bootstrap",
    b"sglang:num_prefill_inflight_queue_reqs": "inflight",
    b"sglang:num_decode_prealloc_queue_reqs": "prealloc",
    b"sglang:num_decode_transfer_queue_reqs": "transfer",
    b"sglang:num_retracted_reqs": "retracted",
    b"vllm:generation_tokens_total": "tokens",
    b"vllm:prompt_tokens_total": "prompted",
    b"vllm:estimated_flops_per_gpu_total": "worked",
    b"vllm:request_success_total": "finished",
    b"vllm:nixl_num_failed_transfers_total": "lost",
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
}
_STAGES = {b"sglang:scheduler_stage_seconds_total": "busy_", b"sglang:scheduler_idle_seconds_total": "idle_"}
_FETCHES = b"vllm:num_requests_kv_fetch_by_stage"
_WANTED = frozenset({*_FIELDS, *_STAGES, _FETCHES})
_ENDS = ("aborted", "unconnected", "unsent", "errored", "lost")
"""Requests that were given up, or whose hand-over failed."""
QUEUES = ("bootstrap", "inflight", "prealloc", "transfer")
_RANKS = frozenset({b"tp_rank", b"pp_rank", b"moe_ep_rank", b"attn_tp_rank", b"attn_cp_rank", b"pid"})
"""Labels in which series differ that tell the same."""
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
KEPT_BODIES = 4
KEPT_BYTES = 2 << 20
MANY_RANKS = 2048
ASIDE_BYTES = 256 << 10
"""A larger page is read in a thread: the looks go on meanwhile."""


def parse(body: bytes) -> dict[str, float]:
    """The named values of a page. SGLang's stage seconds are `busy_<rank>`, its idle seconds `idle_<rank>`.

    The gauges and counters of an engine's ranks repeat each other, so the highest rank's value counts once; series that
    differ in anything else (data-parallel replicas, `is_streaming`, ends) count different requests and are summed.
    `worked` grows with every step that computes, also within a prompt or an answer, where `tokens`, `prompted` and
    `finished` may wait for its end: SGLang's tokens of prompts and answers, vLLM's operations (`--enable-mfu-metrics`).
    Requests that were given up, or whose hand-over failed, are not among the finished: in a stall they are all that
    ends. `refused`: hand-overs that failed and that nobody had given up; engines count those that somebody had among
    their failures, so it can fall by requests that were given up elsewhere. SGLang's series of failures appear with
    the first one.
    """
    single: dict[tuple[str, tuple[tuple[bytes, bytes], ...]], float] = {}
    found: dict[str, float] = {}
    for line in body.splitlines():
        cut = line.find(b"{")
        name = line[: cut if cut >= 0 else line.find(b" ")]
        if name not in _WANTED:  # nearly all lines end here
            continue
        field, stage = _FIELDS.get(name), _STAGES.get(name)
        end = line.rfind(b"}")
        try:
            value = float(line[end + 1 :].split()[0] if end >= 0 else line.split()[1])
        except (ValueError, IndexError):
            continue
        if not math.isfinite(value):  # a NaN would differ from itself at every look, and pass for an advance
            continue
        labels = dict(_LABEL.findall(line[cut : end + 1])) if cut >= 0 else {}
        ended = labels.get(b"finished_reason")
        if ended == b"abort":
            continue
        if ended == b"error" and field == "finished":
            field = "errored"
        if stage is not None:
            rank = b"_".join(labels[k] for k in (b"dp_rank", b"pp_rank", b"tp_rank") if k in labels).decode(
                errors="replace"
            )
            key = stage + (rank or "0")
            if key not in found and len(found) >= MANY_RANKS:
                continue
            found[key] = found.get(key, 0.0) + value
        elif field is None:
            found["transfer"] = found.get("transfer", 0.0) + (
                0.0 if labels.get(b"stage", b"")[:9] == b"completed" else value
            )
        else:
            group = tuple(sorted(pair for pair in labels.items() if pair[0] not in _RANKS))
            single[field, group] = max(single.get((field, group), 0.0), value)
    for (field, _), value in single.items():
        found[field] = found.get(field, 0.0) + value
    ends = {name: found.pop(name) for name in _ENDS if name in found}
    if ends:
        aborted, failed = ends.get("aborted", 0.0), ends.get("unconnected", 0.0) + ends.get("unsent", 0.0)
        found["refused"] = failed - aborted + ends.get("errored", 0.0) + ends.get("lost", 0.0)
        if "finished" in found:  # of vLLM's, errors are a series of their own
            found["finished"] -= max(aborted, failed)
    return found


def held(values: dict[str, float]) -> bool:
    """Whether requests are in the engine: running, waiting, or on the way between two engines."""
    return any(values.get(name, 0) > 0 for name in ("running", "waiting", *QUEUES))


def steady(values: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """The same; `finished`, a difference of two counters that are not raised at once, does not fall within a life."""
    if values.get("tokens", 0.0) < before.get("tokens", 0.0) or "finished" not in values:
        return values
    return {**values, "finished": max(values["finished"], before.get("finished", 0.0))}


class CountersSignal:
    """Key: engine. Also keeps the last pages as they came, with their times, for a bundle."""

    name: SignalName = "counters"
    every_s = 2.0
    limit_s = 8.0

    def __init__(self, client: Client) -> None:
        self._client = client
        self.pages: dict[str, list[tuple[float, bytes]]] = {}
        """Engine → its last pages, (epoch seconds, body), oldest first."""
        self.answers: dict[str, tuple[float, Answer]] = {}
        """Engine → when and how its server answered last; the `http` signal is read from here."""
        self._before: dict[str, dict[str, float]] = {}
        self._turning: set[str] = set()

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """One page per engine, all at once."""
        ours = [e for e in engines if e.kind != "closeranks"]
        return dict(await asyncio.gather(*(self._one(engine) for engine in ours)))

    async def _one(self, engine: EngineSeen) -> tuple[str, Values | Blind]:
        if engine.url is None:
            return engine.name, NO_ADDRESS
        answer = await self._client.poll(f"{engine.url}/metrics")
        at = time.monotonic()
        self.answers[engine.name] = (at, answer)
        self._turning.discard(engine.name)
        if not answer.ok:
            hint = (
                ": start the engine with --enable-metrics" if answer.status == 404 and engine.kind == "sglang" else ""
            )
            return engine.name, Blind(f"/metrics: {answer.said}{hint}")
        self.keep(engine.name, answer.body)
        values = await asyncio.to_thread(parse, answer.body) if len(answer.body) > ASIDE_BYTES else parse(answer.body)
        if not values:
            return engine.name, Blind("/metrics has none of the known names")
        before = self._before.get(engine.name, {})
        busy = [name for name in values if name.startswith("busy_")]
        if busy and all(values[name] > before.get(name, values[name]) for name in busy):
            self._turning.add(engine.name)
        values = self._before[engine.name] = steady(values, before)
        sends = values.get("inflight", 0) > 0
        return engine.name, {**values, "held": held(values), "sends": sends, "at": at}

    def turns(self, name: str) -> bool:
        """Whether the seconds of this engine's loops were read at the last look, and had grown."""
        return name in self._turning

    def keep(self, name: str, body: bytes) -> None:
        """Remember a page for a bundle."""
        pages = self.pages.setdefault(name, [])
        pages.append((time.time(), body[:KEPT_BYTES]))
        del pages[:-KEPT_BODIES]


class HttpSignal:
    """Whether the port accepts, and whether it answers. Asks nothing of its own: `counters` has just asked."""

    name: SignalName = "http"
    every_s = 1.0
    limit_s = 2.0

    def __init__(self, counters: CountersSignal) -> None:
        self._counters = counters

    async def read(self, engines: Sequence[EngineSeen], urgent: frozenset[str]) -> Readings:
        """Of the last request to each engine."""
        found: Readings = {}
        for engine in engines:
            last = self._counters.answers.get(engine.name)
            if last is None:
                if engine.kind != "closeranks":
                    found[engine.name] = Blind("not asked yet") if engine.url else NO_ADDRESS
                continue
            at, answer = last
            found[engine.name] = {
                "at": at,
                "accepts": answer.accepted,
                "answers": answer.status > 0,
                "status": float(answer.status),
                "said": answer.said,
            }
        return found
