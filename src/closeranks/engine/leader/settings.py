"""Settings of a leader's process."""

from typing import Annotated

import msgspec

from .events import Config

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Settings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One JSON file, written by whoever starts the leader."""

    run_dir: str
    """Folder of this deployment's sockets, logs and evidence."""
    engine: str
    """Name of the engine, e.g. `prefill`."""
    role: str
    """`prefill`, `decode` or `both`."""
    epoch: int
    """Number of this life of the engine, from 1."""
    instance: int
    """Random number of this epoch; no two epochs of any engine share one."""
    endpoint: str
    """Public endpoint for gateways and decode engines, `ipc://...` or `tcp://host:port` (port 0: chosen)."""
    ranks_endpoint: str
    """Endpoint for the own ranks, `ipc://...`."""
    origin: int = 0
    ended_epoch: int = 0
    """Every process of this engine's epochs up to this one has been ended and reaped."""
    tp_size: Count = 1
    """Number of ranks."""
    page_size: Count = 16
    """Tokens per page."""
    num_pages: int = 0
    """Pages of the pool; 0: as many as the ranks' memory holds. The leader takes the ranks' word."""
    max_running: Count = 64
    """Most requests that run at once."""
    chunk: Count = 512
    """Most prompt tokens per step (chunked prefill)."""
    overlap: bool = True
    """Issue step n+1 before step n is reported."""
    radix: bool = True
    """Keep computed pages for later requests with the same prefix."""
    max_waiting: Count = 1024
    """Most requests that wait; more are refused as busy."""
    step_deadline_s: Seconds = 4.0
    """A rank that makes no progress in an open step for so long ends the epoch."""
    transfer_deadline_s: Seconds = 20.0
    """A transfer that does not advance for so long ends the epoch, also while nothing is heard of its target."""
    transfer_stall_s: Seconds = 4.0
    """A transfer or check that does not advance for so long, although its target is heard of, ends the epoch."""
    lease_s: Seconds = 5.0
    """Silence of a gateway or peer engine that ends its rooms."""
    drain_s: float = 10.0
    """Longest that open requests may go on after SIGTERM."""
    curve_key_file: str = ""
    """Key file of the deployment (`closeranks keygen`); needed for tcp endpoints."""
    salt_file: str = ""
    """File whose bytes (up to 64) key the page hashes; empty: a random key of this process."""
    log_dir: str = ""
    """Folder of the step log; empty: `RUN/ENGINE/EPOCH/log`. `-`: no log."""
    step_log: bool = True
    """Keep a log of every decision for `closeranks replay`. Off only to measure what it costs."""
    log_segment_bytes: Count = 16 << 20
    """A segment of the step log is closed at this size."""
    log_segments: Count = 8
    """Segments kept; older ones are deleted."""
    log_tokens: bool = False
    """Also write token ids (prompts and outputs) to the step log."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    fault: list[str] = []
    """Faults to inject, for drills: `POINT:ACTION[,key=value]` (see `closeranks.faults`)."""

    def config(self) -> Config:
        """What the core's decisions depend on."""
        return Config(
            engine=self.engine,
            role=self.role,
            epoch=self.epoch,
            instance=self.instance,
            origin=self.origin,
            ended_epoch=self.ended_epoch,
            tp_size=self.tp_size,
            page_size=self.page_size,
            max_running=self.max_running,
            chunk=self.chunk,
            overlap=self.overlap,
            radix=self.radix,
            max_waiting=self.max_waiting,
            step_deadline_s=self.step_deadline_s,
            transfer_deadline_s=self.transfer_deadline_s,
            transfer_stall_s=self.transfer_stall_s,
            lease_s=self.lease_s,
        )
