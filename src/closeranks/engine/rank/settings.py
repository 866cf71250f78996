"""Settings of one rank process, read once at its start from a JSON file written by the supervisor."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank of one engine in one epoch. Unknown fields are refused: a typo is an error, never a default."""

    run_dir: str
    """Folder of the deployment's sockets, logs and incident files."""
    engine: str
    """Name of the engine, e.g. `prefill`."""
    role: Literal["prefill", "decode", "both"] = "both"
    """Which side of a hand-over the engine takes."""
    epoch: Count = 1
    """Number of this life of the engine; grows by one with each restart."""
    instance: Size = 0
    """Random 63-bit name of this epoch, the same for all its processes."""
    tp_size: Count = 1
    """Number of tensor-parallel ranks."""
    page_size: Count = 16
    """Tokens per KV page."""
    num_pages: Size = 0
    """Pages of the pool; 0: as many as fit into `kv_memory`."""
    kv_memory: Count = 1 << 30
    """Bytes of KV cache of the engine over all its ranks, where `num_pages` is 0."""
    max_running: Count = 64
    """Slots: the largest number of requests in one step."""
    chunk: Count = 512
    """Chunked prefill: the most prompt tokens computed in one step."""
    overlap: bool = True
    """Prepare the next step while this one runs."""
    radix: bool = True
    """Reuse the KV of shared prefixes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    rank: Size = 0
    """Number of this rank, 0 .. tp_size - 1; rank 0 samples."""
    model_path: str = ""
    """GGUF file or Hugging Face folder; empty: the embedded default model."""
    cache_dir: str = ""
    """Folder of converted weights; empty: `$XDG_CACHE_HOME/closeranks`."""
    dtype: Literal["float32", "bfloat16", "float16", ""] = ""
    """Type of weights and KV; empty: float32 on the CPU, bfloat16 on CUDA."""
    device: Annotated[str, msgspec.Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """`cpu`, `cuda` (a GPU per rank, decode after prefill where there are enough) or `cuda:N` (from GPU N on)."""
    first_gpu: Size = 0
    """With `cuda`: the GPU of rank 0, if there are enough from there on; set by the supervisor."""
    threads: Size = 0
    """CPU threads of the forward pass; 0: the machine's cores divided by the ranks of the engine, at least 1."""
    transfer_backend: Literal["nixl", "shm", ""] = ""
    """How pages move between engines; empty: NIXL if it imports, else shared memory."""
    nixl_transport: str = "tcp"
    """UCX_TLS for NIXL where the environment does not set it. `tcp` is asynchronous everywhere; empty: UCX's choice."""
    checksums: bool = True
    """Compare each page that arrives with its sender's checksum. Off only to measure what that costs: a damaged page
    goes unnoticed. Engines that pair must have the same."""
    digest: bool = True
    """Report a digest of what each step did. Off only to measure what that costs: ranks that differ go unnoticed."""
    transfer_stuck_s: Seconds = 30.0
    """A transfer open for longer is logged by its age. It stays open: only its end is proof that it writes no more."""
    collectives: Literal["shm", "gloo", "nccl", ""] = ""
    """How ranks sum; empty: NCCL on CUDA, shared memory where `rendezvous` is a path, gloo where it is host:port."""
    collective_deadline_s: Seconds = 20.0
    """A collective in which no awaited rank advances for this long is a fault."""
    join_deadline_s: Seconds = 300.0
    """The ranks of a group must have met within this time (they load weights before)."""
    ranks_endpoint: str = ""
    """The leader's ROUTER for its ranks, e.g. `ipc:///run/…/ranks.sock`."""
    endpoint: str = ""
    """The leader's own, as its peers dial it: where no other host can reach it, NIXL keeps to the loopback device."""
    curve_key_file: str = ""
    """Key file of the deployment (`closeranks keygen`); needed for tcp endpoints."""
    fault: list[str] = []
    """Faults to inject, for drills: `POINT:ACTION[,key=value]` (see `closeranks.faults`)."""
    rendezvous: str = ""
    """Where the ranks of the group meet: a folder (one host), or host:port of rank 0 (several hosts)."""

    def __post_init__(self) -> None:
        if self.rank >= self.tp_size:
            raise ValueError(
                f"rank {self.rank} of a group of tp_size {self.tp_size}: ranks are 0 .. {self.tp_size - 1}"
            )


def read(path: str | Path) -> Settings:
    """Decode a settings file.

    Raises:
        msgspec.ValidationError: it names the field that is wrong.
        OSError: the file cannot be read.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=Settings)
