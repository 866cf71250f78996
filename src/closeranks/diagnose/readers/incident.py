"""`manifest.json` of an incident folder of closeranks: what its supervisor saw, and the leader's word for it."""

import re
import time
from collections.abc import Iterable

from closeranks.diagnose.clock import seconds
from closeranks.diagnose.facts import Event, Fact, Src, Value

_NAME = re.compile(r"[A-Za-z_]\w{0,60}")
_PROCESS = r"leader|gateway|rank\d{1,4}"
_WHOSE = ("prefill", "decode", "both", "gateway")
_SEEN = (
    ("stopped", re.compile(rf"({_PROCESS}) has been stopped by a signal")),
    ("busy", re.compile(rf"({_PROCESS}) has not beaten for [\d.]+ s, in which it used [\d.]+ s of CPU")),
    ("asleep", re.compile(rf"({_PROCESS}) has not beaten for [\d.]+ s, in which it slept")),
    ("silent", re.compile(rf"({_PROCESS}) has not b(?:eaten|egun to beat)")),
    ("cut_off", re.compile(r"control (s)ocket \S{0,4000} has been removed: ")),
    ("removed", re.compile(r"(\S)\S{0,4000} has been removed: ")),
)


class Incident:
    """One event: whose (an engine's role, or the gateway), how it ended, of which process, and the fault's name.

    No detail is kept.
    """

    NAME = "closeranks-incident"
    ABOUT = "manifest.json of closeranks' own incident folders: exit codes, what was seen, the leader's fault"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """None unless it is such a manifest."""
        if not isinstance(found, dict) or found.get("schema") != 1:
            return None
        codes, reason, engine = found.get("exit_codes"), found.get("reason"), found.get("engine")
        if not (isinstance(codes, dict) and isinstance(reason, str) and engine in _WHOSE):
            return None
        data: dict[str, Value] = {"side": engine, "drill": bool(found.get("drill"))}
        if isinstance(found.get("epoch"), int):
            data["epoch"] = found["epoch"]
        data |= _fault(found.get("fault"))
        ended = [(n, c) for n, c in codes.items() if isinstance(c, int) and re.fullmatch(_PROCESS, str(n))]
        for name, code in sorted(ended, key=lambda e: e[1] >= 0):  # a signal tells more than an exit that followed it
            data |= {"how": "ended", "process": name, "code": code}
            break
        else:
            for how, pattern in _SEEN:
                if m := pattern.search(reason[:5000]):
                    data |= {"how": how, "process": m[1] if how not in ("cut_off", "removed") else ""}
                    break
        return [Event(src=src, kind="incident", time=_time(found.get("detected")), data=data)]


def _fault(found: object) -> dict[str, Value]:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        return {}
    rank, step = found.get("rank"), found.get("step")
    data: dict[str, Value] = {"fault": name}
    if isinstance(rank, int) and rank >= 0:
        data["rank"] = rank
    if isinstance(step, int) and step > 0:
        data["step"] = step
    return data


def _time(detected: object) -> float | None:
    if not isinstance(detected, int | float) or not 0 < detected < 2**33:
        return None
    t = time.gmtime(detected)
    return seconds(t.tm_mon, t.tm_mday, time.strftime("%H:%M:%S", t))


DOCUMENT_READERS = (Incident,)
