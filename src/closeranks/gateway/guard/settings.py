"""The settings of a guard."""

from dataclasses import dataclass

SAMPLES_PATH = "/.closeranks/guard/samples"


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds.

    upstream: base URL, without a slash at its end. The client's path is appended to it.
    report_only: change nothing, count only.
    max_request: larger chat requests are handed on unwatched (their tools are unknown).
    max_event, max_body: larger stream events and JSON answers are handed on unwatched.
    read_timeout: longest silence of the upstream within an answer, None for none.
    """

    upstream: str
    report_only: bool = False
    metrics_path: str = "/metrics"
    max_request: int = 64 << 20
    max_event: int = 1 << 20
    max_body: int = 16 << 20
    connect_timeout: float = 10.0
    read_timeout: float | None = 900.0
