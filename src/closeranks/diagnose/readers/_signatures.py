"""A line reader driven by a table: one row per signature string, each with the expression that takes its values out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from closeranks.diagnose.facts import Event, Fact, Value
from closeranks.diagnose.lines import Line


@dataclass(frozen=True)
class Sig:
    """`token` is searched first (plain text); `pattern` must match as well and its named groups become the values.

    Groups must match digits or fixed words only, so no value can carry what a request said. `whole` keeps looking for
    other signatures in the same line.
    """

    kind: str
    token: str
    pattern: str = ""
    whole: bool = False


def value(text: str) -> Value:
    """A number if it is one, else the text."""
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


class SignatureReader:
    """Base of table-driven readers: set NAME, ABOUT and SIGNATURES."""

    NAME = ""
    ABOUT = ""
    SIGNATURES: tuple[Sig, ...] = ()
    open = False

    def __init_subclass__(cls) -> None:
        cls.TOKENS = tuple(dict.fromkeys(s.token for s in cls.SIGNATURES))
        cls._compiled = tuple((s, re.compile(s.pattern)) for s in cls.SIGNATURES)

    TOKENS: tuple[str, ...] = ()
    _compiled: tuple[tuple[Sig, re.Pattern[str]], ...] = ()

    def line(self, line: Line) -> Iterable[Fact]:
        """Events of the signatures in `line`."""
        if carries_request(line.text):
            return
        for sig, pattern in self._compiled:
            if sig.token not in line.text:
                continue
            m = pattern.search(line.text)
            if m is None:
                continue
            data = {k: value(v) for k, v in m.groupdict().items() if v is not None}
            yield Event(src=line.src, who=line.who, time=line.time, kind=sig.kind, data=data)
            if not sig.whole:
                return

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


def carries_request(text: str) -> bool:
    """Whether the line prints a request's content: whatever looks like a signature in there was said by a user."""
    return (
        "input_ids=" in text
        or "origin_input_text" in text
        or "Req(rid=" in text
        or '"messages"' in text
        or "prompt: '" in text
    )
