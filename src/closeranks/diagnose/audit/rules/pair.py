"""The two sides of a prefill-decode pair against each other, and the pair as a whole."""

import re
from collections.abc import Iterable, Iterator

from closeranks.diagnose.audit.model import Deployment, Engine
from closeranks.diagnose.audit.rule import Hit, Open, rule

ANYWHERE = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


# Words of a path or a name that say which side of a pair it is, or what kind of file.
_SIDES = re.compile(
    r"(?i)p|d|pd|prefill(?:er|s)?\d*|decode(?:r|rs|s)?\d*|producer|consumer|pre|dec|[pd]\d+"
    r"|service|sh|bash|txt|log|yaml|yml|json|conf|env|flags|info"
)


def _stem(engine: Engine) -> tuple[str, ...]:
    """What an engine's label says beside its side of a pair: folders, and the words of its name but for numbers.

    `site/glm-prefill-0.service` and `site/glm-decode.service` have one stem, `site/kimi-decode.service` another.
    """
    *folders, name = re.split(r"/|: ", engine.label.split(" + ")[0].split(" (")[0])
    words = [w for f in folders for w in _words(f)] + [w for w in _words(name) if not w.isdigit()]
    return tuple(words)


def _words(text: str) -> list[str]:
    return [w.lower() for w in re.split(r"[^A-Za-z0-9]+", text) if w and not _SIDES.fullmatch(w)]


def _groups(deployment: Deployment) -> Iterator[tuple[list[Engine], list[Engine]]]:
    """Prefill and decode engines that belong together, as far as that can be told: all of a kind where one side is a
    single engine; else those of one stem, and what is left where one side of it is a single engine."""
    for kind in sorted({e.kind for e in deployment.engines}):
        sides = [[e for e in deployment.engines if e.kind == kind and e.role == role] for role in ("prefill", "decode")]
        if len(sides[0]) <= 1 and len(sides[1]) <= 1:
            yield sides[0], sides[1]
            continue
        stems = [{_stem(e) for e in side} for side in sides]
        for stem in sorted(stems[0] & stems[1]):
            yield ([e for e in sides[0] if _stem(e) == stem], [e for e in sides[1] if _stem(e) == stem])
        yield ([e for e in sides[0] if _stem(e) not in stems[1]], [e for e in sides[1] if _stem(e) not in stems[0]])


def _split(deployment: Deployment) -> tuple[list[tuple[Engine, Engine]], list[str]]:
    """The pairs, and the groups of which cannot be told who is paired with whom: by the labels of their engines.

    Several engines on both sides that serve one model are one deployment. Where both sides serve the same several
    models, each model is one.
    """
    pairs: list[tuple[Engine, Engine]] = []
    unclear: list[str] = []
    for prefills, decodes in _groups(deployment):
        models = [{e.flag("model-path") for e in side} for side in (prefills, decodes)]
        several = len(prefills) > 1 and len(decodes) > 1
        if several and models[0] == models[1] and len(models[0]) > 1:
            pairs += [(p, d) for p in prefills for d in decodes if p.flag("model-path") == d.flag("model-path")]
        elif (
            prefills and decodes and (min(map(len, models)) > 1 or (several and len({_stem(e) for e in prefills}) > 1))
        ):
            unclear.append(" / ".join(e.label for e in (*prefills, *decodes)))
        else:
            pairs += [(p, d) for p in prefills for d in decodes]
    return pairs, unclear


def _pairs(deployment: Deployment) -> list[tuple[Engine, Engine]]:
    return _split(deployment)[0]


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
    "pair-unclear",
    "note",
    "pair",
    "Which prefill engine serves which decode engine cannot be told",
    why="Several of both sides were given, and neither folders, names nor models say who belongs together. Their "
    "sides were not compared.",
    fix="Audit one pair at a time, or give both sides of a pair one folder or one name (`x-prefill`, `x-decode`).",
)
def pair_unclear(deployment: Deployment) -> Iterable[Hit | Open]:
    for labels in _split(deployment)[1]:
        yield Hit(labels, "no two of them are known to be a pair")


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
    """Judged where engines listen on loopback of one host, as they say, or one script starts them side by side: others
    may be on hosts, or in network namespaces, of their own."""
    for flag, roles in (("port", ("", "prefill", "decode", "both")), ("disaggregation-bootstrap-port", ("prefill",))):
        seen: dict[tuple[str, str], str] = {}
        for engine in deployment.engines:
            port, host = engine.flag(flag), engine.flags.get("host") or "0.0.0.0"
            if port is None or engine.role not in roles or engine.front:
                continue
            beside = f"{engine.beside} {'' if host in (*LOOPBACK, *ANYWHERE) else host}" if engine.beside else ""
            places = {"loopback" if host in LOOPBACK else "", beside} - {""}
            taken = [seen[place, port] for place in sorted(places) if (place, port) in seen]
            if taken:
                yield Hit(f"{taken[0]} / {engine.label}", f"--{flag} {port} on {host}")
            seen |= {(place, port): engine.label for place in places}
