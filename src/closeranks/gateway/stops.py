"""Stop strings: the text before the first of them, whatever pieces it comes in.

"First" is the one that ends first; among those that end at the same character the longest. Only the longest suffix
that may still become a stop string is held back.
"""

from collections.abc import Sequence


class Stops:
    """Knuth-Morris-Pratt over all stop strings at once: linear in the text times the number of strings."""

    __slots__ = ("_fails", "_held", "_states", "_strings", "matched")

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: none empty."""
        self._strings = list(strings)
        self._fails = [_failure(s) for s in self._strings]
        self._states = [0] * len(self._strings)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What of the text is certain to stand before any stop string. After a match: nothing more, ever."""
        if self.matched is not None:
            return ""
        states, strings, fails = self._states, self._strings, self._fails
        for at, character in enumerate(text):
            best = -1
            for i, string in enumerate(strings):
                state = states[i]
                while state and string[state] != character:
                    state = fails[i][state - 1]
                if string[state] == character:
                    state += 1
                states[i] = state
                if state == len(string) and (best < 0 or state > len(strings[best])):
                    best = i
            if best >= 0:
                self.matched = strings[best]
                whole = self._held + text[: at + 1]
                self._held = ""
                return whole[: len(whole) - len(self.matched)]
        whole = self._held + text
        keep = max(states, default=0)
        cut = len(whole) - keep
        self._held = whole[cut:]
        return whole[:cut]

    def close(self) -> str:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        return held


def _failure(string: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    fails = [0] * len(string)
    state = 0
    for i in range(1, len(string)):
        while state and string[i] != string[state]:
            state = fails[state - 1]
        if string[i] == string[state]:
            state += 1
        fails[i] = state
    return fails
