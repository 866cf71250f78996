"""What the guard saw: counters for /metrics, and a few samples with their text redacted.

Counts are plain integers, turned into Prometheus families only when scraped. Label values that an upstream chooses
(model names) are bounded: after `MAX_MODELS` of them, further ones count under "other".
"""

import re
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_MODELS = 64
MAX_SHAPES = 64
SAMPLE_CHARACTERS = 400

# Words of the markup itself, kept in samples: without them a sample would not show what leaked.
_MARKUP_WORDS = [
    "DSML",
    "tool_calls",
    "tool_call",
    "toolcalls",
    "toolcall",
    "function_calls",
    "calls",
    "invoke",
    "parameter",
    "name",
    "string",
    "true",
    "false",
    "think",
    "arguments",
    "begin",
    "end",
    "of",
    "sentence",
    "User",
    "Assistant",
    "System",
    "tool",
    "sep",
    "outputs",
    "call",
    "function",
]
_WORD = re.compile(r"[^\W_]+(?:_[^\W_]+)*")
_LONGEST_KEPT = 12


def redact(text: str) -> str:
    """`text` with every word that is not part of the markup replaced by `x`s; punctuation and layout stay.

    Lengths over twelve are cut, so that a sample does not tell how long a secret was.
    """
    keep = set(_MARKUP_WORDS)
    return _WORD.sub(lambda m: m.group() if m.group() in keep else "x" * min(len(m.group()), _LONGEST_KEPT), text)


class Counters(Collector):
    """All counters of one guard. Registered once in a `CollectorRegistry`; every method is O(1)."""

    def __init__(self, samples: int = 100) -> None:
        self.leaks: Counter[tuple[str, str, str, str]] = Counter()  # model, field, shape, action
        self.requests: Counter[tuple[str, str]] = Counter()  # watched, status
        self.unwatched: Counter[str] = Counter()  # reason
        self.upstream_errors: Counter[str] = Counter()  # kind
        self.events: Counter[str] = Counter()  # model
        self.rewritten = 0
        self.open_streams = 0
        self.samples: deque[dict[str, str]] = deque(maxlen=samples)
        self._models: set[str] = set()
        self._shapes: set[str] = set()

    def model(self, name: str) -> str:
        """The label value for a model name that came from outside."""
        return _bounded(name[:128], self._models, MAX_MODELS)

    def leak(self, model: str, field: str, shape: str, action: str, sample: str) -> None:
        """Count one piece of markup found in `field`; keep `sample` (raw text) redacted."""
        shape = _bounded(shape, self._shapes, MAX_SHAPES)
        key = (self.model(model), field, shape, action)
        self.leaks[key] += 1
        text = redact(sample[:SAMPLE_CHARACTERS])
        self.samples.append({"model": key[0], "field": field, "shape": shape, "action": action, "text": text})

    def collect(self) -> Iterable[Metric]:
        """The Prometheus families."""
        yield _family(
            "closeranks_guard_leaks",
            "Pieces of markup found in an answer, by what was done: repaired, stripped, reported or counted.",
            ("model", "field", "shape", "action"),
            self.leaks,
        )
        yield _family(
            "closeranks_guard_requests", "Requests, by whether watched.", ("watched", "status"), self.requests
        )
        yield _family(
            "closeranks_guard_unwatched",
            "Chat answers, or parts of one, that could not be watched and were passed on as they came.",
            ("reason",),
            self.unwatched,
        )
        yield _family("closeranks_guard_upstream_errors", "Upstream failures.", ("kind",), self.upstream_errors)
        yield _family("closeranks_guard_events", "Watched stream events.", ("model",), self.events)
        rewritten = CounterMetricFamily("closeranks_guard_rewritten_events", "Stream events that were rewritten.")
        rewritten.add_metric((), self.rewritten)
        yield rewritten
        yield GaugeMetricFamily("closeranks_guard_open_streams", "Chat answers in progress.", value=self.open_streams)

    def registry(self) -> CollectorRegistry:
        """A registry that holds these counters alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry


def _family(name: str, text: str, labels: tuple[str, ...], counts: Counter[Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in list(counts.items()):
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family


def _bounded(value: str, seen: set[str], limit: int) -> str:
    if value in seen:
        return value
    if len(seen) >= limit:
        return "other"
    seen.add(value)
    return value
