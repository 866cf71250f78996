"""The two sides of a prefill-decode pair against each other, and the pair as a whole."""

from collections.abc import Iterable, Iterator

from closeranks.diagnose.audit.model import Deployment, Engine
from closeranks.diagnose.audit.rule import Hit, Open, rule

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _pairs(deployment: Deployment) -> Iterator[tuple[Engine, Engine]]:
    """Every prefill engine with every decode engine of its kind."""
    for prefill in deployment.engines:
        for decode in deployment.engines:
            if prefill.role == "prefill" and decode.role == "decode" and prefill.kind == decode.kind:
                yield prefill, decode


def _differ(deployment: Deployment, *flags: str) -> Iterable[Hit]:
    for prefill, decode in _pairs(deployment):
        for flag in flags:
            one, two = prefill.flag(flag), decode.flag(flag)
            if one != two:
                yield Hit(f"{prefill.label} / {decode.label}", f"--{flag}: prefill {one or '-'}, decode {two or '-'}")


@rule(
    "pair-other-version",
    "error",
    "pair",
    "Prefill and decode run different versions",
    why="Wire messages differ between releases: decode's ABORT frame ends the bootstrap thread of a prefill that does "
    "not know it, in silence and for good.",
    fix="Run one version on both sides; replace both together.",
    refs=("sglang#30301", "sglang#30352"),
)
def pair_other_version(deployment: Deployment) -> Iterable[Hit | Open]:
    for prefill, decode in _pairs(deployment):
        where = f"{prefill.label} / {decode.label}"
        if prefill.version is None or decode.version is None:
            if prefill.version != decode.version:
                yield Open(where, "the version of both sides")
        elif prefill.version != decode.version:
            yield Hit(where, f"prefill {prefill.version}, decode {decode.version}")


@rule(
    "pair-other-backend",
    "error",
    "pair",
    "Prefill and decode use different transfer backends",
    why="The two do not understand each other's handshake; every request waits for its timeout.",
    fix="Set the same --disaggregation-transfer-backend (vLLM: the same kv_connector) on both sides.",
)
def pair_other_backend(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "disaggregation-transfer-backend", "kv-connector")


@rule(
    "pair-other-model",
    "error",
    "pair",
    "Prefill and decode serve different models or tokenizers",
    why="KV of one model read by another gives fluent nonsense, without an error.",
    fix="Give both sides the same weights and tokenizer (compare checksums when the paths differ on purpose).",
)
def pair_other_model(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "model-path", "tokenizer-path", "revision")


@rule(
    "pair-other-kv-layout",
    "error",
    "pair",
    "Prefill and decode lay out KV differently",
    why="Pages of another dtype or size land at wrong offsets: corruption, or an exception in the bootstrap thread.",
    fix="Set the same --kv-cache-dtype, --page-size and --dtype on both sides.",
    refs=("sglang#33043",),
)
def pair_other_kv_layout(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "kv-cache-dtype", "page-size", "dtype", "quantization")


@rule(
    "pair-other-speculation",
    "warning",
    "pair",
    "Only one side of the pair speculates, or they differ in it",
    why="The draft's KV and hidden states are part of a request's hand-over; a side without them starts decode blind.",
    fix="Set the same --speculative-algorithm on both sides.",
)
def pair_other_speculation(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "speculative-algorithm")


@rule(
    "pair-other-parsers",
    "warning",
    "pair",
    "The sides of a pair have different parsers or templates",
    why="Depending on the router either side renders the prompt or parses the answer.",
    fix="Give both sides the same --tool-call-parser, --reasoning-parser and --chat-template.",
)
def pair_other_parsers(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "tool-call-parser", "reasoning-parser", "chat-template")


@rule(
    "pair-other-context-length",
    "warning",
    "pair",
    "The sides of a pair accept different lengths",
    why="A request that one side takes and the other refuses leaves the first with pages that nobody fetches.",
    fix="Set the same --context-length on both sides.",
)
def pair_other_context_length(deployment: Deployment) -> Iterable[Hit | Open]:
    return _differ(deployment, "context-length")


@rule(
    "pair-half",
    "note",
    "pair",
    "Only one side of the pair was given",
    why="Most faults of a pair show only when both sides are compared: versions, backends, layouts, lengths.",
    fix="Audit the other side's configuration together with this one.",
)
def pair_half(deployment: Deployment) -> Iterable[Hit | Open]:
    roles = {engine.role for engine in deployment.engines}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in roles and not roles & {other, "both"}:
            yield Hit("pair", f"{role} without {other}")


@rule(
    "port-taken-twice",
    "error",
    "pair",
    "Two engines on one host want the same port",
    why="The second fails at start, or listens on another address family and gets half of the traffic.",
    fix="Give each engine its own --port and --disaggregation-bootstrap-port.",
)
def port_taken_twice(deployment: Deployment) -> Iterable[Hit | Open]:
    """Judged where an engine says that it listens on loopback: others may be on hosts of their own."""
    for flag, roles in (("port", ("", "prefill", "decode", "both")), ("disaggregation-bootstrap-port", ("prefill",))):
        seen: dict[str, str] = {}
        for engine in deployment.engines:
            port = engine.flag(flag)
            if port is None or engine.role not in roles or engine.flags.get("host") not in LOOPBACK:
                continue
            if port in seen:
                yield Hit(f"{seen[port]} / {engine.label}", f"--{flag} {port} on {engine.flags['host']}")
            seen[port] = engine.label
