"""Whether the end of a text stands inside Markdown code, kept up to date piece by piece.

After CommonMark, as far as it can be known without the text to come: a run of three or more backticks or tildes at the
start of a line opens a fence that a run at least as long closes; elsewhere a run of backticks opens inline code that an
equal run closes, or the end of the paragraph. Indentation before a fence is not limited, as lists indent.
"""

import re

_TOKENS = re.compile(r"`+|~+|\n|[^`~\n]+")
_LONGEST_RUN = 256  # longer runs of backticks count as this long
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


class Quoting:
    """State after all text given to `update`; independent of how that text was cut."""

    __slots__ = ("blank", "fence", "info", "inline", "run", "run_at_start")

    def __init__(self) -> None:
        self.fence = ""  # the run that opened the fence we are in
        self.info = False  # still on the line of that run
        self.inline = 0  # length of the run that opened inline code
        self.blank = True  # nothing but white space on this line so far
        self.run = ""  # a run that may still grow
        self.run_at_start = False

    def update(self, text: str) -> None:
        """Append a piece of text."""
        if not self.run and "`" not in text and "~" not in text:
            self._plain(text)
            return
        for token in _TOKENS.findall(text):
            first = token[0]
            if self.run:
                if first == self.run[0]:
                    self.run = (self.run + token)[:_LONGEST_RUN]
                    continue
                self._resolve()
            if first in "`~":
                self.run, self.run_at_start = token[:_LONGEST_RUN], self.blank
                self.blank = False
            else:
                self._plain(token)

    def plain(self, text: str) -> None:
        """Append text that holds no backtick, tilde or newline: the cheap way."""
        if self.run:
            self._resolve()
        if self.blank and not text.isspace():
            self.blank = False

    def quoted(self, more: str = "") -> bool:
        """Whether the next character, after `more`, would stand in code."""
        if self.run or more:
            ahead = Quoting()
            for slot in Quoting.__slots__:
                setattr(ahead, slot, getattr(self, slot))
            ahead.update(more)
            if ahead.run:
                ahead._resolve()
            return bool(ahead.fence or ahead.inline)
        return bool(self.fence or self.inline)

    def in_inline(self, more: str = "") -> bool:
        """Whether the next character, after `more`, would stand in inline code rather than in a fence."""
        return not self.fence and self.quoted(more)

    def at_line_start(self, more: str = "") -> bool:
        """Whether only white space stands before the next character, after `more`, on its line."""
        return self.blank if "\n" not in more else not more.rpartition("\n")[2].strip()

    def _plain(self, text: str) -> None:
        """Text without backticks and tildes."""
        end = text.rfind("\n")
        if end < 0:
            if self.blank and text and not text.isspace():
                self.blank = False
            return
        self.info = False
        if self.inline and ((self.blank and not text[: text.index("\n")].strip()) or _BLANK_LINE.search(text)):
            self.inline = 0
        rest = text[end + 1 :]
        self.blank = not rest or rest.isspace()

    def _resolve(self) -> None:
        """The run is as long as it will get."""
        run, length, at_start = self.run[0], len(self.run), self.run_at_start
        if self.fence:
            if self.info and run == "`" and self.fence[0] == "`":
                # a second run on the line of the first: that was inline code, not a fence
                self.inline = 0 if length == len(self.fence) else len(self.fence)
                self.fence, self.info = "", False
            elif run == self.fence[0] and length >= len(self.fence) and at_start:
                self.fence = ""
        elif self.inline:
            if run == "`" and length == self.inline:
                self.inline = 0
        elif length >= 3 and at_start:
            self.fence, self.info = self.run, True
        elif run == "`":
            self.inline = length
        self.run = ""
