"""Settings of the gateway process, read once at its start from a JSON file."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

PARSERS = {
    "deepseek_v32": "v32",
    "deepseekv32": "v32",
    "deepseek_v4": "v4",
    "deepseekv4": "v4",
    "deepseek_v41": "v41",
    "deepseekv41": "v41",
    "hermes": "hermes",
    "qwen": "hermes",
    "qwen25": "hermes",
}
"""Names of `--tool-call-parser` and `--reasoning-parser` (those of SGLang and vLLM where they have one) -> dialect."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One gateway. Unknown fields are refused: a typo is an error, never a default."""

    run_dir: str
    """Folder of the deployment's sockets, logs and incident files."""
    model_dir: str
    """Converted model folder: tokenizer.json, config.json and the chat template are read from it."""
    prefill: list[str] = []
    """Endpoints of prefill leaders (`ipc://…` or `tcp://…`); each is paired with each decode leader."""
    decode: list[str] = []
    """Endpoints of decode leaders."""
    both: list[str] = []
    """Endpoints of leaders that prefill and decode in one engine."""
    host: str = "127.0.0.1"
    """Address that the HTTP server binds."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """Port of the HTTP server; 0: any free one, written to `gateway.json` in the run folder."""
    served_model_name: str = ""
    """Name of the model in requests and answers; empty: the name in the model's folder. `default` always works."""
    api_key: str = ""
    """Bearer token that clients must send; empty: none."""
    admin_api_key: str = ""
    """Bearer token for /abort_request (and good for everything else); empty: the api key."""
    curve_key_file: str = ""
    """The deployment's CURVE keypair (a ZeroMQ certificate with its secret) for `tcp://` endpoints."""
    chat_template: str = ""
    """File of a Jinja chat template to use in place of the model's own."""
    tool_call_parser: str = ""
    """How the model writes tool calls: `deepseek_v32`, `deepseek_v4`, `deepseek_v41`, `hermes`; empty: as text."""
    reasoning_parser: str = ""
    """The same for its reasoning (named alone, tool-call markup is kept out of the text too); empty: it stays text."""

    max_open_requests: Count = 512
    """Requests open at once (each choice of `n` counts); beyond it 429 with Retry-After."""
    max_body_bytes: Count = 16 * 2**20
    """Largest request body; beyond it 413."""
    max_header_bytes: Count = 64 * 2**10
    """Largest request line and headers together; beyond it 431."""
    header_timeout_s: Seconds = 10.0
    """A connection must have sent its request's headers within this time."""
    body_timeout_s: Seconds = 30.0
    """A request's body must have arrived within this time after its headers."""
    write_timeout_s: Seconds = 60.0
    """A client that takes nothing for this long is cut off and its request aborted."""
    keep_alive_s: Seconds = 75.0
    """Idle time after which a kept-alive connection is closed."""
    request_timeout_s: Seconds = 600.0
    """Deadline of a request from its arrival to its last token, over all its attempts."""
    comment_interval_s: Seconds = 10.0
    """A stream without a token for this long gets an SSE comment, so that nobody takes it for dead."""
    engine_silence_s: Seconds = 5.0
    """An engine whose last Status is older counts as gone: its requests go elsewhere, or wait."""
    engine_wait_s: Seconds = 120.0
    """A request for which no engine was there for this long ends with 503."""
    wait_bound_s: Seconds = 30.0
    """Health: a request may wait this long before it counts as stuck, unless work moved within the same time."""
    drain_s: Seconds = 25.0
    """How long open requests may go on after SIGTERM."""
    log_format: Literal["console", "json"] = "console"
    """How log lines are written to stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    fault: list[str] = []
    """Faults to inject, for drills: `POINT:ACTION[,key=value]` (see `closeranks.faults`)."""

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode endpoints go together: give both, or only `both`")
        if not self.prefill and not self.both:
            raise ValueError("no engine: give prefill and decode endpoints, or `both`")
        for parser in (self.tool_call_parser, self.reasoning_parser):
            if parser and parser not in PARSERS:
                raise ValueError(f"unknown parser {parser!r}; known are {', '.join(PARSERS)}")
        if len({PARSERS[p] for p in (self.tool_call_parser, self.reasoning_parser) if p}) > 1:
            raise ValueError("tool_call_parser and reasoning_parser name different dialects")
        endpoints = [*self.prefill, *self.decode, *self.both]
        if len(set(endpoints)) < len(endpoints):
            raise ValueError("an endpoint is given twice")

    @property
    def dialect(self) -> str:
        """The codec's name of what the model writes; empty: its text is passed on as it is."""
        return PARSERS.get(self.tool_call_parser or self.reasoning_parser, "")


def read(path: str | Path) -> Settings:
    """Decode a settings file.

    Raises:
        msgspec.ValidationError: it names the field that is wrong.
        OSError: the file cannot be read.
    """
    return msgspec.json.decode(Path(path).read_bytes(), type=Settings)
