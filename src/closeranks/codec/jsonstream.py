"""JSON values that leave piece by piece and can be completed at every point.

`JsonStream` takes the text of one `string="false"` value as it arrives and gives out text that can always be completed:
separators and keys wait for the value after them, numbers and words for their end, escapes for their last digit. Valid
JSON passes verbatim. What is not JSON is handled by how far it got:

- a value that is not JSON from its start on becomes a string, raw (`Bob`, `NaN`, `{'a': 1}`); `True`, `False` and
  `None` are read as the model meant them;
- inside a container raw control characters and bad escapes of strings are escaped, halves of surrogate pairs become
  U+FFFD, `NaN` and its like become strings, a comma before a closer goes;
- anything else breaks the stream: what is open is closed at the end, the rest is handed back as `rejected`.

Time is linear (compiled patterns find spans); memory is the nesting, at most `MAX_DEPTH`, one key and one held number
or word.
"""

import re
from json.encoder import encode_basestring

MAX_DEPTH = 128  # deeper nesting breaks the value: most JSON readers recurse
MAX_PENDING = 1024  # most white space and key that wait for a value
MAX_SCALAR = 1024  # longest held number or word; many readers refuse integers of more than 4300 digits

_SPACES = frozenset(" \t\n\r")
_CLOSERS = {"{": "}", "[": "]"}
_KEYS = frozenset({"key", "first_key"})
_VALUES = frozenset({"value", "first"})
_EMPTY = frozenset({"first", "first_key"})
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_WORD = re.compile(r"[A-Za-z0-9+\-.]*+")
_LONE_WORD = re.compile(rf"[ \t\n\r]*+{_WORD.pattern}[ \t\n\r]*+")
# a whole number or word (group 1), or one that may go on after the text
_scalar = re.compile(rf"((?>{_NUMBER.pattern}|true|false|null)(?![A-Za-z0-9+\-.]))|[A-Za-z0-9+\-.]++\Z").match
_special = re.compile(r'["\\\x00-\x1f]').search
# the inside of a string as long as it is JSON: text, escapes, pairs of surrogates
_INSIDE = re.compile(
    r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*+"
)
_HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE_BEGUN = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?)?\Z"
)
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity", "+Infinity", "nan", "inf", "-inf", "+inf"}


def json_string(text: str) -> str:
    """The JSON string literal of `text`; what is not ASCII stays as it is."""
    return encode_basestring(text)


def string_body(text: str) -> str:
    """`text` as the inside of a JSON string literal."""
    return encode_basestring(text)[1:-1]


def word_value(word: str) -> str | None:
    """JSON for a number or constant standing alone; None if it is neither."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    return word if len(word) <= MAX_SCALAR and _NUMBER.fullmatch(word) else None


class JsonStream:
    """One value. `feed` and `finish` return text to send on; after each, `rejected` is what they refused.

    The closing bracket of the outermost container leaves with `finish` only.
    """

    __slots__ = (
        "_expect",
        "_held",
        "_pending",
        "_sent",
        "_stack",
        "broken",
        "complete",
        "first_key",
        "raw",
        "rejected",
    )

    # _expect, what may come next:
    #   start             all so far is white space or a lone word, kept in _held
    #   value, first      a value; in `first` also "]"
    #   key, first_key    a key; in `first_key` also "}"
    #   string, key_string  the inside of one
    #   colon, next       ":"; "," or a closer
    #   done, raw         nothing; anything, since all is sent as a string

    def __init__(self) -> None:
        self.complete = False  # the value is whole
        self.broken = False  # it stopped being JSON after part of it was sent
        self.raw = False  # it is sent as a string
        self.rejected = ""
        self.first_key: str | None = None  # of the outermost object, as written between its quotes
        self._expect = "start"
        self._held = ""  # begun input: a word or an escape that may go on
        self._pending = ""  # accepted output that waits for a value: separators, keys, the first bracket
        self._sent = False
        self._stack: list[str] = []

    @property
    def unread(self) -> str:
        """Text that was taken and has neither left nor been rejected."""
        return self._pending + self._held

    def feed(self, text: str, final: bool = False) -> str:
        """Take the next piece (if `final`, the last); return what can be sent.

        JSON passes as it is: `text[start:safe]` can leave, `text[safe:at]` waits for a value. Where text waits from
        before, `safe` begins that far before `start`, so that `at - safe` is what waits in all. What passes changed, or
        not at all, or is seldom, is left to `_odd` and `_token`.
        """
        self.rejected = ""
        out: list[str] = []
        if self._held:
            text, self._held = self._held + text, ""
        at, end = 0, len(text)
        expect, stack = self._expect, self._stack
        if expect == "start":
            at = self._start(text, final, out)
            if at < 0:
                return "".join(out)
            expect = self._expect
        elif expect == "raw":
            return string_body(text)
        start, safe = at, at - len(self._pending)
        while at < end:
            if expect == "string" or expect == "key_string":
                found = _special(text, at)
                at = found.start() if found else end
                if found and text[at] != '"' and (inside := _INSIDE.match(text, at)):
                    at = inside.end()
                if expect == "string":
                    safe = at
                if at < end and at - safe <= MAX_PENDING:
                    if text[at] != '"':
                        out.append(self._keep(text, start, safe, at))
                        changed, at = self._odd(text, at, final)
                        if expect == "string":
                            out.append(changed)
                        else:
                            self._pending += changed
                        start, safe = at, at - len(self._pending)
                        continue
                    at += 1
                    if expect == "string":
                        safe = at
                        expect = "next" if stack else "done"
                        self.complete = not stack
                        continue
                    expect = "colon"
                    if self.first_key is None and len(stack) == 1:
                        self.first_key = (self._pending + text[start : at - 1]).partition('"')[2]
            else:
                char = text[at]
                if expect == "next":
                    if char == ",":
                        expect = "key" if stack[-1] == "}" else "value"
                        at += 1
                        continue
                    if char in _SPACES:
                        at = safe = at + 1
                        continue
                    if char == stack[-1] and len(stack) > 1:
                        stack.pop()
                        at = safe = at + 1
                        continue
                elif expect in _VALUES:
                    if char == '"':
                        expect = "string"
                        at = safe = at + 1
                        continue
                    if char in _CLOSERS and len(stack) < MAX_DEPTH:
                        stack.append(_CLOSERS[char])
                        expect = "first_key" if char == "{" else "first"
                        at = safe = at + 1
                        continue
                    whole = None if char == " " else _scalar(text, at)
                    if whole and (stop := whole.end()) - at <= MAX_SCALAR:
                        if stop == end and not final:
                            self._held = text[at:]
                            break
                        if whole.lastindex:
                            expect = "next"
                            at = safe = stop
                            continue
                if char in _SPACES and expect != "done":
                    at += 1
                elif char == ":" and expect == "colon":
                    expect = "value"
                    at += 1
                elif char == '"' and expect in _KEYS:
                    expect = "key_string"
                    at += 1
                elif expect in _EMPTY and char == stack[-1] and len(stack) > 1:
                    stack.pop()
                    expect = "next"
                    at = safe = at + 1
                    continue
                else:
                    self._expect = expect
                    out.append(self._keep(text, start, safe, at))
                    at = self._token(text, at, final, out)
                    if at < 0:
                        return "".join(out)
                    expect = self._expect
                    start, safe = at, at - len(self._pending)
            if at - safe > MAX_PENDING:
                out.append(self._keep(text, start, safe, at))
                return "".join(out) + self._fail(text[at:])
        self._expect = expect
        sent = ""
        if safe > start:
            self._sent = True
            sent = self._pending + text[start:safe]
            self._pending = text[safe:at]
        elif at > start:
            self._pending += text[start:at]
        return "".join((*out, sent)) if out else sent

    def finish(self, hold_last: bool = False) -> str:
        """The value's text is over; return what completes it (less the outermost bracket if `hold_last`)."""
        out = self.feed("", final=True)
        if self.raw:
            self.complete = True
            return out + '"'
        if not self._sent and not self.complete:
            return self._fail("") + '"'  # brackets and keys without a value
        if not self.complete:
            self.broken = True
        if self._expect == "string":
            out += '"'
        if self.complete:
            out, self._pending = out + self._pending, ""
        self.rejected, self._pending = self._pending + self.rejected, ""
        return out + "".join(reversed(self._stack[1:] if hold_last else self._stack))

    def _fail(self, text: str) -> str:
        """What is pending and `text` is not JSON here."""
        text, self._pending, self._held = self._pending + text, "", ""
        self._expect = "done"
        if not self._sent:
            self.raw = True
            self._expect = "raw"
            return '"' + string_body(text)
        self.broken = True
        self.rejected = text
        return ""

    def _begin(self, text: str) -> str:
        """What a value's first text brings along; from here on the stream cannot become raw."""
        self._sent = True
        text, self._pending = self._pending + text, ""
        return text

    def _after_value(self) -> None:
        self._expect = "next" if self._stack else "done"
        self.complete = not self._stack

    def _close(self, out: list[str]) -> None:
        if len(self._stack) == 1:
            self.complete = True  # its bracket stays on the stack for `finish`
            self._expect = "done"
            self._sent = True
            return
        out.append(self._begin(self._stack.pop()))
        self._after_value()

    def _keep(self, text: str, start: int, safe: int, at: int) -> str:
        """A run of `feed` is over: returns what can be sent, keeps what waits."""
        if safe <= start:
            self._pending += text[start:at]
            return ""
        self._sent = True
        sent = self._pending + text[start:safe]
        self._pending = text[safe:at]
        return sent

    def _start(self, text: str, final: bool, out: list[str]) -> int:
        """The top level: a container, a string, or a lone word that is held to its end. -1: all is taken."""
        space = _SPACE.match(text)
        at = space.end() if space else 0
        first = text[at : at + 1]
        if at > MAX_SCALAR:  # white space without end
            out.append(self._fail(text))
            return -1
        if first in _CLOSERS:
            self._pending = text[: at + 1]
            self._stack.append(_CLOSERS[first])
            self._expect = "first_key" if first == "{" else "first"
            return at + 1
        if first == '"':
            self._expect, self._sent = "string", True
            out.append(text[: at + 1])
            return at + 1
        if len(text) > MAX_SCALAR or not _LONE_WORD.fullmatch(text):
            out.append(self._fail(text))
        elif not final:
            self._held = text
        else:
            word = word_value(text.strip(" \t\n\r"))
            if word is None:
                out.append(self._fail(text))
            else:
                self._sent = self.complete = True
                self._expect = "done"
                out.append(word)
        return -1

    def _token(self, text: str, at: int, final: bool, out: list[str]) -> int:
        """One token outside strings, at a character that is not white space. -1: failed, or waits for more."""
        expect, char = self._expect, text[at]
        if expect == "next":
            if char == self._stack[-1]:
                self._close(out)
                return at + 1
        elif expect in _VALUES:
            if char == "]" == self._stack[-1] and ":" not in self._pending[-1:]:
                self._drop_comma()
                self._close(out)
                return at + 1
            return self._word(text, at, final, out)
        elif expect in _KEYS:
            if char == "}":
                self._drop_comma()
                self._close(out)
                return at + 1
        elif expect == "done":
            if char in _SPACES and not self.broken:
                return at + 1
            self.broken = True  # whole, but something follows
            self.rejected = text[at:]
            return -1
        out.append(self._fail(text[at:]))
        return -1

    def _word(self, text: str, at: int, final: bool, out: list[str]) -> int:
        found = _WORD.match(text, at)
        stop = found.end() if found else at
        word = text[at:stop]
        if len(word) <= MAX_SCALAR and stop == len(text) and word and not final:
            self._held = word
            return -1
        value = word_value(word)
        if value is None and word in _NOT_FINITE:
            value = json_string(word)
        if value is None:
            out.append(self._fail(text[at:]))
            return -1
        out.append(self._begin(value))
        self._after_value()
        return stop

    def _drop_comma(self) -> None:
        """A comma before a closer is not JSON: it goes."""
        if self._pending.lstrip()[:1] == ",":
            self._pending = ""

    def _odd(self, text: str, at: int, final: bool) -> tuple[str, int]:
        """What stands for the control character, begun or bad escape at `at` inside a string, and where it ends."""
        if text[at] != "\\":
            return string_body(text[at]), at + 1
        if not final and _ESCAPE_BEGUN.match(text, at):
            self._held = text[at:]
            return "", len(text)
        if half := _HALF.match(text, at):
            return "\ufffd", half.end()
        return "\\\\", at + 1
