"""Routers and gateways in front of engines: Dynamo, sglang router (smg), aibrix, and their kind."""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Event, Fact, Value
from closeranks.diagnose.lines import Line
from closeranks.diagnose.readers._signatures import Sig, SignatureReader


class Routers(SignatureReader):
    """Messages of a router that mean: a request was lost or a leg failed here."""

    NAME = "router-log"
    ABOUT = "Router and gateway lines: no handler, no worker, circuit breaker, a failed leg"
    SIGNATURES = (
        Sig("aibrix_line", "pd_disaggregation.go", r"(?=.)", whole=True),
        Sig("no_handler", "No handler found", r"(?=.)"),
        Sig("lease_lost", "lease", r"(?i)lease.{0,20}\b(?:lost|revoked)|unable to maintain lease"),
        Sig("no_worker", "no instances found", r"(?=.)"),
        Sig("no_worker", "No available workers", r"(?=.)"),
        Sig("no_worker", "no healthy workers", r"(?i)no (?:available|healthy)"),
        Sig("no_worker", "No available prefill", r"(?=.)"),
        Sig("no_worker", "No available decode", r"(?=.)"),
        Sig("no_worker", "no responders", r"(?=.)"),
        Sig("breaker_open", "ircuit breaker", r"(?i)circuit breaker.{0,80}\bopen"),
        Sig("breaker_closed", "ircuit breaker", r"(?i)circuit breaker.{0,80}\bclosed"),
        Sig("worker_removed", "marked unhealthy", r"(?=.)"),
        Sig("worker_removed", "Removing worker", r"(?=.)"),
        Sig("stream_lost", "Stream ended before generation completed", r"(?=.)"),
        Sig("request_count", "Successful requests", r"Successful requests: *(?P<ok>\d+)"),
        Sig("unanswered", "still pending after", r"still pending after (?P<after>\d+)"),
        Sig("request_lost", "Still running after", r"Still running after [\d.]+ s: *(?P<n>\d+)"),
    )


class FailedLeg:
    """A gateway line that a prefill or decode request failed, with its status and a mark to join it by."""

    NAME = "router-failed-leg"
    ABOUT = "Gateway lines: prefill/decode request failed, with HTTP status and request id (kept as a mark only)"
    TOKENS = (
        "request failed",
        "request error",
        "Prefill failed",
        "prefill failed",
        "Prefill request",
        "prefill dispatched",
        "Decode request",
    )
    open = False
    _LEG = re.compile(r"(?i)\b(prefill|decode)\b[^\"]{0,60}?\b(fail\w*|error|dispatched)")

    def line(self, line: Line) -> Iterable[Fact]:
        """One leg."""
        m = self._LEG.search(line.text)
        if (
            not m
            or "transfer failed" in line.text
            or "bootstrap failed" in line.text
            or "handshake failed" in line.text
        ):
            return
        data: dict[str, Value] = {"leg": m[1].lower()}
        if s := re.search(r"(?i)status[=: ]+(\d{3})", line.text):
            data["status"] = int(s[1])
        if r := re.search(r"(?:request_id|rid|req(?:uest)?[_ -]?id)[=: ]+['\"]?([\w-]{1,80})", line.text):
            data["_request"] = r[1]
        kind = "leg_dispatched" if m[2].lower() == "dispatched" else "leg_failed"
        yield Event(src=line.src, who=line.who, time=line.time, kind=kind, data=data)

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (Routers, FailedLeg)
