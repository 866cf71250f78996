"""The settings of `serve` and `gateway`: those of the parts that they start, and their own."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from closeranks.cli import _settings
from closeranks.engine.leader.settings import Settings as LeaderSettings
from closeranks.engine.rank.settings import Settings as RankSettings
from closeranks.gateway.settings import Settings as GatewaySettings
from closeranks.lifeline import HEART, PARENT
from closeranks.supervise.service import DRAIN_S

Count = Annotated[int, msgspec.Meta(ge=1)]
# set by the supervisor, or meant for one role only; everything else of the three structs is a setting of `serve`
INTERNAL = frozenset(
    {
        "run_dir",
        "engine",
        "role",
        "epoch",
        "instance",
        "origin",
        "ended_epoch",
        "rank",
        "tp_size",
        "ranks_endpoint",
        "rendezvous",
    }
    | {"model_dir", "prefill", "decode", "both", "endpoint", "log_dir", "salt_file", "drain_s", "first_gpu"}
)
ELSEWHERE = (PARENT, HEART, "CLOSERANKS_WATCH_*", "CLOSERANKS_STATE_DIR", "CLOSERANKS_SPECIMEN_*")
"""Variables that mean something to other commands and between processes."""


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    """Of `closeranks serve` itself."""

    disaggregation_mode: Literal["pair", "null", "prefill", "decode"] = "pair"
    """pair: a prefill and a decode engine; null: one engine that does both; prefill, decode: one engine alone, without
    a gateway."""
    tp_size: Count = 1
    """Tensor-parallel ranks of each engine."""
    prefill_tp_size: Count | None = None
    """Ranks of the prefill engine, where they differ."""
    decode_tp_size: Count | None = None
    """Ranks of the decode engine, where they differ."""
    control: str = ""
    """With prefill or decode: where the engine's leader listens for gateways and peers, e.g. tcp://10.0.0.5:9000 (needs
    --curve-key-file; see `closeranks keygen`); empty: a socket in the run folder."""
    run_dir: str = ""
    """Folder of sockets, logs, step logs and incidents; empty: a state folder."""
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = DRAIN_S
    """Patience with open streams at SIGTERM, seconds."""
    spares: bool = True
    """Keep a spare process for each rank, libraries loaded (about 0.25 GB, mostly shared): faster recovery."""
    allow_faults: bool = False
    """Let --fault work also where another host can reach the service."""

    def ranks(self, role: str) -> int:
        """Of an engine of that role."""
        own: int | None = getattr(self, f"{role}_tp_size", None)
        return self.tp_size if own is None else own


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    """Of `closeranks gateway` itself."""

    run_dir: str = ""
    """Folder of the gateway's files; empty: a state folder."""
    allow_faults: bool = False
    """Let --fault work also where another host can reach the gateway."""


def serve_options() -> list[_settings.Option]:
    parts = _settings.options([RankSettings, LeaderSettings, GatewaySettings], INTERNAL)
    return _settings.options([Serve], frozenset()) + parts


def gateway_options() -> list[_settings.Option]:
    parts = _settings.options([GatewaySettings], frozenset({"run_dir"}))
    model = [o for o in _settings.options([RankSettings], frozenset()) if o.name in ("model_path", "cache_dir")]
    return _settings.options([Gateway], frozenset()) + parts + model


def split(struct: type[Any], values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A command's own settings, and the rest of the values, which belong to the parts."""
    own = _settings.only(struct, values)
    return struct(**own), {name: value for name, value in values.items() if name not in own}


def warn_of_strangers(command: str, environment: Mapping[str, str] = os.environ) -> None:
    """Of variables that are a setting of neither command; one of the other's may well be set for a whole host."""
    of = {"serve": serve_options(), "gateway": gateway_options()}
    others = [variable for options in of.values() for option in options for variable in option.variables]
    _settings.warn_of_strangers(command, of[command], (*ELSEWHERE, *others), environment)
