"""What `/metrics` shows: the gateway's own counters, and the engines' from their last Status, labelled by engine."""

import sys
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from closeranks.gateway.resume import Requests
from closeranks.gateway.router import Engine, Router
from closeranks.output import Unblocking

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PAGES = {"free": "pages_free", "cached": "pages_cached", "owned": "pages_owned", "quarantined": "pages_quarantined"}
_GAUGES = {
    "pages_total": ("closeranks_pool_pages", "Pages of the engine's pool"),
    "waiting": ("closeranks_waiting_requests", "Requests that the engine has not begun"),
    "running": ("closeranks_running_requests", "Requests in the engine's batch"),
    "rooms_open": ("closeranks_open_rooms", "Hand-overs that have not ended on this side"),
    "oldest_wait_s": ("closeranks_oldest_wait_seconds", "Age of the oldest request for which nothing has happened"),
    "last_progress_s": ("closeranks_last_progress_seconds", "Since a step was last reported by all ranks"),
    "epoch": ("closeranks_epoch", "Number of the engine's current life"),
}


disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter that nobody asks for


class Metrics:
    """The registry of one gateway."""

    def __init__(self, router: Router, requests: Requests, clock: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        common = {"registry": self._registry, "namespace": "closeranks"}
        self.http = Counter("http_requests", "HTTP requests answered", ["endpoint", "status"], **common)  # type: ignore[arg-type]
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of requests", **common)  # type: ignore[arg-type]
        self.discarded = Counter("discarded_characters", "Markup kept from clients", ["reason"], **common)  # type: ignore[arg-type]
        self.disconnects = Counter("client_disconnects", "Clients that left early", **common)  # type: ignore[arg-type]
        self.first = Histogram(
            "time_to_first_token_seconds",
            "Arrival to first token",
            buckets=_SECONDS,
            **common,  # type: ignore[arg-type]
        )
        self.whole = Histogram("request_seconds", "Arrival to end", buckets=_SECONDS, **common)  # type: ignore[arg-type]
        self.per_token = Histogram(
            "time_per_output_token_seconds",
            "Mean time between tokens of a request",
            buckets=_GAP_SECONDS,
            **common,  # type: ignore[arg-type]
        )
        self._registry.register(_Known(router, requests, clock))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Known(Collector):
    """Values that others keep, read when asked for."""

    def __init__(self, router: Router, requests: Requests, clock: Callable[[], float]) -> None:
        self._router = router
        self._requests = requests
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("closeranks_open_requests", "Requests open at the gateway", len(self._requests.open))
        waiting = self._requests.waiting
        yield GaugeMetricFamily("closeranks_unplaced_requests", "Open requests that run in no engine", waiting)
        resumed = CounterMetricFamily("closeranks_resumed", "Attempts that were given up for another", labels=["why"])
        for name, value in self._requests.counts.items():
            if name.startswith("resumed_"):
                resumed.add_metric([name.removeprefix("resumed_")], value)
            elif name == "output_tokens":
                yield CounterMetricFamily("closeranks_output_tokens", "Tokens that came for clients, each once", value)
            else:
                yield CounterMetricFamily(f"closeranks_gateway_{name}", f"Gateway: {name.replace('_', ' ')}", value)
        yield resumed
        lost = sys.stderr.lost if isinstance(sys.stderr, Unblocking) else 0
        yield CounterMetricFamily("closeranks_lost_log_lines", "Log lines that nobody took", lost)
        yield from self._engines()

    def _label(self, engine: Engine) -> str:
        """Its name; of several of a role, which share one, with the endpoint: a page with a series twice is refused."""
        if sum(other.role == engine.role for other in self._router.engines.values()) > 1:
            return f"{engine.role}@{engine.endpoint}"
        return engine.status.engine if engine.status else engine.endpoint

    def _engines(self) -> Iterator[Metric]:
        now = self._clock()
        up = GaugeMetricFamily("closeranks_engine_up", "1: fresh Status, ready", labels=["engine"])
        pages = GaugeMetricFamily("closeranks_pages", "Pages of the pool by state", labels=["engine", "state"])
        gauges = {f: GaugeMetricFamily(n, d, labels=["engine"]) for f, (n, d) in _GAUGES.items()}
        counters: dict[str, CounterMetricFamily] = {}
        for engine in self._router.engines.values():
            status = engine.status
            name = self._label(engine)
            up.add_metric([name], float(self._router.usable(engine.endpoint, now)))
            if status is None:
                continue
            for state, field in _PAGES.items():
                pages.add_metric([name, state], getattr(status, field))
            for field, gauge in gauges.items():
                gauge.add_metric([name], getattr(status, field))
            for counter, value in status.counters.items():
                if counter not in counters:
                    title = f"closeranks_{counter.removesuffix('_total')}"
                    counters[counter] = CounterMetricFamily(title, f"Engine counter {counter}", labels=["engine"])
                counters[counter].add_metric([name], value)
        yield from (up, pages, *gauges.values(), *counters.values())
