# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Lines: the wrappers of log collectors taken off, and the prefix of an engine's own log read."""

import json
import re
from dataclasses import dataclass

from closeranks.diagnose import clock, names
from closeranks.diagnose.facts import Src, Who

MAX_LINE = 4096  # characters of a line that are looked at
_ENDLESS = re.compile(r"(\d{24})\d+")  # no engine counts so far, and no rule need fear what does not fit a float

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r$")
_WRAPPERS = re.compile(
    r"""(?x) ^ (?:
    \[pod/[^\]\s]+\]\x20                                                    # kubectl logs --prefix
    | [A-Za-z0-9][\w.-]{0,63}\s*\|\x20                                      # docker compose
    | \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)\x20(?:std(?:out|err)\x20[FP]\x20)?   # docker -t, CRI
    | [A-Z][a-z]{2}\x20\d{1,2},\x20\d{4}\x20@\x20\d\d:\d\d:\d\d(?:\.\d+)?\x20{1,4}           # Kibana
    | [A-Z][a-z]{2}\x20{1,2}\d{1,2}\x20\d\d:\d\d:\d\d(?:\.\d+)?\x20[\w.-]+\x20[\w@./:-]+(?:\[\d+\])?:\x20   # journald, syslog
    | (?:<\d{1,3}>)(?=\S)                                                    # syslog priority
    | >\x20                                                                  # quoted in an issue
    )"""
)
_ORIGIN = re.compile(r"(?:\x1b\[[0-9;]*m)*(?:\[pod/([^/\]\s]{1,200})[^\]\s]*\] |([A-Za-z0-9][\w.-]{0,63})\s*\| )")
_JSON_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "line", "event")
_SGLANG = re.compile(
    r"\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?P<parts>(?: (?:[A-Z_]+\d+))*)\] ?(?P<msg>.*)", re.S
)
_SGLANG_ALT = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,\d]* [A-Z]+ (?:\d+ )?\[ ?(?P<parts>(?:(?:[A-Z_]+\d+) )*)[\w.]+:\d+\] ?(?P<msg>.*)",
    re.S,
)
_NCCL_RANK = re.compile(r"\[rank(\d+)\]:")
_BRACKET_RANK = re.compile(r"\[Rank (\d+)\]")
_VLLM_MSG = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d[.,\d]* (?:\[[^\]]*\]|[\w.]+:\d+\]) ?"
)
_TRT = re.compile(r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] (?:\[[^\]]*\] ){1,3}")


@dataclass(slots=True)
class Line:
    """One line: where it stands, its text without wrappers, and what its prefix says."""

    src: Src
    text: str
    msg: str
    time: float | None
    who: Who | None
    own_prefix: bool  # the line starts a record: it carries a prefix of its own
    origin: str = ""  # the pod or container that a collector names
    stamped: bool = False  # the clock is the collector's, which may be in another time zone


def unwrap(text: str) -> tuple[str, float | None]:
    """`text` without colours and collectors' wrappers, and the wrapper's clock. Indentation inside is kept."""
    text = _ANSI.sub("", text)
    stamp: float | None = None
    for _ in range(6):
        if m := _WRAPPERS.match(text):
            stamp = clock.find(m[0]) if stamp is None else stamp
            text = text[m.end() :]
            continue
        inner = text
        if text.startswith('{"') and text.rstrip().endswith("}"):
            inner, stamp = _from_json(text, stamp)
        if inner == text:
            break
        text = _ANSI.sub("", inner)
    return text, stamp


def _from_json(text: str, stamp: float | None) -> tuple[str, float | None]:
    """A line of docker's json-file, of a structured logger, of a cloud's export: its message."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text, stamp
    if not isinstance(record, dict):
        return text, stamp
    fields = record.get("fields")
    inner = fields if isinstance(fields, dict) else record
    for key in _JSON_KEYS:
        value = inner.get(key, record.get(key))
        if isinstance(value, str):
            for time_key in ("time", "timestamp", "ts", "@timestamp"):
                if isinstance(record.get(time_key), str):
                    stamp = clock.find(record[time_key]) if stamp is None else stamp
            return value.rstrip("\n")[:MAX_LINE], stamp
    return text, stamp


def parse(raw: str, src: Src) -> Line:
    """The line behind `raw`."""
    line = _parse(raw, src)
    if "| " in raw[:100] or "[pod/" in raw[:100]:
        m = _ORIGIN.match(raw)
        line.origin = (m[1] or m[2]) if m else ""
    return line


def _parse(raw: str, src: Src) -> Line:
    text, stamp = unwrap(raw[:MAX_LINE])
    text = _ENDLESS.sub(r"\1", text)
    head = text.lstrip()
    if m := _SGLANG.match(head) or _SGLANG_ALT.match(head):
        where = names.parts(m["parts"])
        who = Who(kind="scheduler", family="sglang", **where) if where else None
        t = clock.find(head, 40)
        if t is None:  # 2024's form has the time of day only
            t = clock.time_of_day(head[1:9])
        return Line(
            src, text, m["msg"], t if t is not None else stamp, who, True, stamped=t is None and stamp is not None
        )
    t = clock.find(text)
    t = stamp if t is None else t
    if m := _NCCL_RANK.search(text, 0, 40) or (
        _BRACKET_RANK.search(text, 0, 160) if "ProcessGroup" in text[:120] else None
    ):
        return Line(src, text, text, t, Who(kind="torch", family="torch", rank=int(m[1])), True)
    m = _VLLM_MSG.search(text, 0, 400)
    before = text[: m.start()] if m else text  # a message may name other processes
    proc = names.from_vllm_proc(before) if "pid=" in before[:160] else None
    if m:
        return Line(src, text, text[m.end() :], t, proc, True)
    if m := _TRT.match(head):
        rank = re.search(r"global_rank = (\d+)", text)
        who = Who(kind="worker", family="tensorrt-llm", rank=int(rank[1])) if rank else None
        return Line(src, text, head[m.end() :], t, who, True)
    own = proc is not None or (t is not None and t is not stamp)
    return Line(src, text, text, t, proc, own, stamped=t is not None and t is stamp)
