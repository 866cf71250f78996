# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Traffic: access log lines, streamed answers, and progress bars."""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact, Value
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader

_PATHS = ("/health", "/health_generate", "/metrics", "/v1/models", "/version", "/v1/chat/completions", "/v1/completions",
          "/generate", "/ready", "/ping", "/v1/loads", "/abort_request", "/live", "/server_info", "/get_server_info", "/v1/messages")  # fmt: skip


class Access:
    """uvicorn access lines: `"GET /health HTTP/1.1" 200 OK`. Query strings and unknown paths are dropped."""

    NAME = "access-log"
    ABOUT = "HTTP access lines: path and status of known endpoints"
    TOKENS = ("HTTP/1.1", "HTTP/2")
    open = False
    _LINE = re.compile(r'"(GET|POST|HEAD|PUT|DELETE) ([^\s?"]{1,200})[^"]*" (\d{3})')

    def line(self, line: Line) -> Iterable[Fact]:
        """One answer."""
        if m := self._LINE.search(line.text):
            path = m[2] if m[2] in _PATHS else "/other"
            data: dict[str, Value] = {"path": path, "status": int(m[3])}
            yield Event(src=line.src, who=line.who, time=line.time, kind="http", data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Stream:
    """A streamed answer (`data: {…}`): counted, and whether it is blank. Its content is never kept."""

    NAME = "sse-stream"
    ABOUT = "Server-sent events of a completion: chunks, blank chunks, finish reason (content is not kept)"
    TOKENS = ("data: {", "data: [DONE]")
    open = False

    def line(self, line: Line) -> Iterable[Fact]:
        """One chunk."""
        if not line.text.startswith("data: "):
            return
        data: dict[str, Value] = {}
        if m := re.search(r'"(?:content|text|reasoning_content)"\s*:\s*"((?:[^"\\]|\\.)*)"', line.text):
            body = m[1].replace("\\n", " ").replace("\\t", " ").replace("\\r", " ")
            data["blank"] = not body.strip() and bool(body)
            data["empty"] = not body
        if m := re.search(r'"finish_reason"\s*:\s*"(\w{1,20})"', line.text):
            data["finish"] = m[1]
        yield Event(src=line.src, kind="chunk", data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Progress:
    """tqdm bars, alone or glued to a log record: what is being built or loaded, and how far it is."""

    NAME = "progress-bar"
    ABOUT = "tqdm bars: schema and kernel compilation, weight loading, graph capture"
    TOKENS = ("%|", "% Completed |", "it/s]", "s/it]", "?it/s")
    open = False
    _BAR = re.compile(
        r"([A-Za-z][^|\r\n]{0,120}?)?(\d{1,3})%(?: Completed )?\|(?:[^|]*\|)?\s*(\d+(?:\.\d+)?)([kMG]?)/(\d+(?:\.\d+)?)([kMG]?)\s*\[([\d:?]+)<([\d:?]+)"
    )
    _WORK = (
        ("grammar", r"(?i)fsm|grammar|regex|schema|guide"),
        ("jit", r"(?i)deepgemm|jit|warm ?up|compil|triton|inductor|autotun"),
        ("capture", r"(?i)captur"),
        ("weights", r"(?i)load|shard|checkpoint|download|fetch"),
    )

    def line(self, line: Line) -> Iterable[Fact]:
        """One bar."""
        for m in self._BAR.finditer(line.text):
            title = m[1] or ""
            work = next((name for name, p in self._WORK if re.search(p, title)), "other")
            data: dict[str, Value] = {"work": work, "done": float(m[3]), "total": float(m[5]), "percent": int(m[2])}
            yield Event(src=line.src, who=line.who, time=line.time, kind="bar", data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


class Clients(SignatureReader):
    """A client's own word that no answer came."""

    NAME = "client"
    ABOUT = "curl: a request that ended by its time-out, and what had come by then"
    SIGNATURES = (
        Sig("unanswered", "curl: (28)", r"after (?P<ms>\d+) (?:ms|milliseconds)(?: with (?P<bytes>\d+)(?: out of \S+)? bytes received)?"),
        Sig("unanswered", "curl: (52)", r"(?=.)"),
    )  # fmt: skip


LINE_READERS = (Access, Clients, Stream, Progress)
