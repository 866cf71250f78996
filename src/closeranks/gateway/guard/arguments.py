"""Counts markup inside the arguments (and names) of the upstream's own tool calls. It never changes them.

Arguments may quote markup for good reasons (a tool that edits a parser's tests), so this is a counter for the
operator, not a verdict.
"""

import re

from closeranks.codec.lexicon import LOOK_ALIKES
from closeranks.gateway.guard.chunk import Call

_SENTINEL = re.compile(
    rf"</?[｜{LOOK_ALIKES}]{{1,2}} ?DSML ?[｜{LOOK_ALIKES}]{{1,2}} ?(?P<tag>\w{{0,20}})"
    r"|<[｜|](?:begin|end)[▁_]of[▁_]sentence[｜|]>|</?think>"
)
_TAGS = frozenset(("tool_calls", "function_calls", "calls", "invoke", "parameter"))
_TAIL = 48  # at least the longest spelling that `_SENTINEL` matches, less one


class ArgumentScan:
    """Scans the arguments of one choice's calls as they stream, across deltas."""

    __slots__ = ("_tails",)

    def __init__(self) -> None:
        self._tails: dict[int, str] = {}

    def feed(self, calls: list[Call]) -> list[tuple[str, str]]:
        """The (shape, text around it) of each sentinel that these deltas complete."""
        found = []
        for call in calls:
            function = call.function
            if function is None:
                continue
            if isinstance(function.name, str):
                found += self._scan(function.name)
            if isinstance(function.arguments, str):
                key = call.index if isinstance(call.index, int) and 0 <= call.index < 1024 else -1
                found += self._scan(function.arguments, key)
        return found

    def _scan(self, text: str, key: int | None = None) -> list[tuple[str, str]]:
        tail = self._tails.get(key, "") if key is not None else ""
        if not tail and "<" not in text:
            return []
        whole = tail + text
        found = []
        end = 0
        for match in _SENTINEL.finditer(whole):
            if match.end() == len(whole) and match.group("tag") is not None and key is not None:
                break  # the tag's name may go on in the next delta
            end = match.end()
            tag = match.group("tag")
            shape = "argument_token" if tag is None else f"argument_{tag if tag in _TAGS else 'sentinel'}"
            found.append((shape, whole[max(0, match.start() - 80) : match.end() + 80]))
        if key is not None:
            rest = whole[max(end, len(whole) - _TAIL) :]
            start = rest.rfind("<")
            self._tails[key] = rest[start:] if start >= 0 else ""
        return found
