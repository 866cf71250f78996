"""Prometheus text: one scrape after another. A repeated series starts the next scrape."""

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from zlib import crc32

from closeranks.diagnose.facts import Event, Fact, Metric, Setting, Src, Value
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers.settings import flag_fact

_SAMPLE = re.compile(r"^\s*((?:sglang|vllm|trtllm|closeranks|dynamo)[:_]\w+)(?:\{(.*)\})?\s+(\S{1,40})(?:\s+\d+)?\s*$")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_KEPT = (
    "tp_rank",
    "pp_rank",
    "dp_rank",
    "engine",
    "engine_type",
    "category",
    "reason",
    "stage",
    "finished_reason",
    "outcome",
    "rank",
)


class Prometheus:
    """Samples of engine metrics. Model names and other labels are not kept."""

    NAME = "prometheus"
    ABOUT = "Prometheus scrapes of SGLang, vLLM, TensorRT-LLM, Dynamo; two make a rate"
    TOKENS = ("sglang:", "sglang_", "vllm:", "trtllm_", "closeranks_", "dynamo_")
    open = False

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.scrape = 0

    def line(self, line: Line) -> Iterable[Fact]:
        """One sample."""
        if "_bucket{" in line.text:
            return
        m = _SAMPLE.match(line.text)
        number = _finite(m[3]) if m else None
        if m is None or number is None:
            return
        series = f"{m[1]}{{{m[2] or ''}}}"
        if series in self.seen:
            self.seen, self.scrape = set(), self.scrape + 1
        self.seen.add(series)
        pairs = sorted(_LABEL.findall(m[2] or ""))
        labels = {k: v[:40] for k, v in pairs if k in _KEPT and re.fullmatch(r"\d*|[a-z_]{0,24}", v)}
        rest = repr([pair for pair in pairs if pair[0] not in labels])
        digest = f"{crc32(rest.encode()):08x}"
        name = re.sub(r"^(sglang|vllm|trtllm|closeranks|dynamo)_", r"\1:", m[1])
        yield Metric(
            src=line.src, time=line.time, name=name, labels=labels, value=number, scrape=self.scrape, other=digest
        )

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


def _finite(text: str) -> float | None:
    """A sample's value; None for NaN and infinities, which are no count, and for one that was cut off."""
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    return number if math.isfinite(number) else None


class Loads:
    """`/v1/loads`: only `loads[].timestamp` is a heartbeat; the outer one is the time of the answer."""

    NAME = "v1-loads"
    ABOUT = "/v1/loads answers: queues per data-parallel rank, the age of their snapshot, the version"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """One answer."""
        if not isinstance(found, dict) or not isinstance(found.get("loads"), list):
            return None
        out: list[Fact] = _version(found.get("version"), src)
        asked = _seconds(found.get("timestamp"))
        for load in found["loads"][:1024]:
            if not isinstance(load, dict):
                continue
            data: dict[str, Value] = {}
            for key in ("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_tokens", "num_used_tokens"):
                if isinstance(load.get(key), int | float):
                    data[key] = load[key]
            disagg = load.get("disaggregation")
            if isinstance(disagg, dict):
                data |= {
                    k: v
                    for k, v in disagg.items()
                    if isinstance(v, int | float) and re.fullmatch(r"[a-z_]{3,40}", str(k))
                }
            stamp = load.get("timestamp")
            if isinstance(stamp, int | float):
                data["stamp"] = stamp
                if asked is not None:
                    data["age"] = asked - stamp
            out.append(Event(src=src, kind="load", data=data))
        return out


def _seconds(stamp: object) -> float | None:
    """Seconds since 1970 of a number, or of ISO 8601, in which SGLang 0.5.23 writes the time of its answer."""
    if isinstance(stamp, int | float):
        return float(stamp)
    if not isinstance(stamp, str):
        return None
    try:
        when = datetime.fromisoformat(stamp[:40])
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


class ServerInfo:
    """`/server_info`, `/get_server_info`: version and the flags that matter."""

    NAME = "server-info"
    ABOUT = "/server_info answers: version and launch flags"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """One answer."""

        if not isinstance(found, dict) or not ({"tp_size", "model_path", "internal_states"} & found.keys()):
            return None
        out: list[Fact] = []
        for key, v in found.items():
            if isinstance(v, str | int | float | bool) and (fact := flag_fact(str(key), str(v), src)):
                out.append(fact)
        return [*out, *_version(found.get("version"), src)]


def _version(version: object, src: Src) -> list[Fact]:
    """SGLang's version, as its endpoints give it."""
    if isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,40}", version):
        return [Setting(src=src, kind="version", name="sglang", value=version)]
    return []


LINE_READERS = (Prometheus,)
DOCUMENT_READERS = (Loads, ServerInfo)
