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
MAX_PENDING = 2048  # most white space and key that wait for a value
MAX_SCALAR = 1024  # longest held number, word or key; many readers refuse integers of more than 4300 digits

_SPACES = frozenset(" \t\n\r")
_OPENERS = frozenset("{[")
_KEYS = frozenset({"key", "first_key"})
_VALUES = frozenset({"value", "first"})
_QUOTED = _KEYS | _VALUES
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_scalar = re.compile(rf"(?:{_NUMBER.pattern}|true|false|null)(?![A-Za-z0-9+\-.])").match
_LONE_WORD = re.compile(r"[ \t\n\r]*[A-Za-z0-9+\-.]*[ \t\n\r]*")
_WORD = re.compile(r"[A-Za-z0-9+\-.]*")
_special = re.compile(r'["\\\x00-\x1f]').search
_SPAN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})')
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
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
        "_key",
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
    #   done              nothing

    def __init__(self) -> None:
        self.complete = False  # the value is whole
        self.broken = False  # it stopped being JSON after part of it was sent
        self.raw = False  # it is sent as a string
        self.rejected = ""
        self.first_key: str | None = None  # of the outermost object, as written between its quotes
        self._expect = "start"
        self._held = ""  # begun input: a word or an escape that may go on
        self._pending = ""  # accepted output that waits for a value: separators, keys, the first bracket
        self._key = ""  # the key being read
        self._sent = False
        self._stack: list[str] = []

    @property
    def unread(self) -> str:
        """Text that was taken and has neither left nor been rejected."""
        key = f'"{self._key}' if self._expect == "key_string" else ""
        return self._pending + key + self._held

    def feed(self, text: str) -> str:
        """Take the next piece; return what can be sent."""
        self.rejected = ""
        if self._expect == "string" and not self._held and _SPAN.fullmatch(text):
            return text
        if self.raw:
            return string_body(text)
        if self.broken:
            self.rejected = text
            return ""
        return self._scan(self._held + text if self._held else text, final=False)

    def finish(self, hold_last: bool = False) -> str:
        """The value's text is over; return what completes it (less the outermost bracket if `hold_last`)."""
        self.rejected = ""
        out = ""
        if not self.raw and not self.broken:
            out = self._scan(self._held, final=True)
        if self.raw:
            self.complete = True
            return out + '"'
        if self._expect == "key_string":
            self._pending, self._key = f'{self._pending}"{self._key}', ""
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
        text, self._pending, self._held, self._key = self._pending + text, "", "", ""
        self._expect = "done"
        if not self._sent:
            self.raw = True
            return '"' + string_body(text)
        self.broken = True
        self.rejected = text
        return ""

    def _begin(self, text: str) -> str:
        """What a value's first text brings along; from here on the stream cannot become raw."""
        self._sent = True
        text, self._pending = self._pending + text, ""
        return text

    def _open(self, bracket: str) -> None:
        self._stack.append("}" if bracket == "{" else "]")
        self._expect = "first_key" if bracket == "{" else "first"

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

    def _scan(self, text: str, final: bool) -> str:
        """Run the grammar over `text`, which begins with what was held. What JSON consists of mostly is taken in runs
        here: text up to a quote, white space, separators, scalars; the rest is for `_escapes` and `_token`."""
        self._held = ""
        out: list[str] = []
        at, end = 0, len(text)
        if self._expect == "start":
            at = self._start(text, final, out)
            if at < 0:
                return "".join(out)
        while at < end:
            expect = self._expect
            if expect == "string" or expect == "key_string":
                found = _special(text, at)
                stop = found.start() if found else end
                inside = text[at:stop]
                if stop < end and text[stop] != '"':
                    pieces: list[str] = []
                    stop = self._escapes(text, at, final, pieces)
                    inside = "".join(pieces)
                at = stop + 1
                if expect == "string":
                    out.append(inside)
                    if stop < end:
                        out.append('"')
                        self._after_value()
                else:
                    self._key += inside
                    if len(self._key) > MAX_SCALAR:
                        return "".join(out) + self._fail(f'"{self._key}{self._held}{text[stop:]}')
                    if stop < end:
                        self._end_key()
                continue
            char = text[at]
            if char in _SPACES:
                space = _SPACE.match(text, at)
                stop = space.end() if space else at
                if expect == "next":
                    out.append(text[at:stop])
                elif expect != "done":
                    self._pending += text[at:stop]
                    if len(self._pending) > MAX_PENDING:  # white space without end
                        return "".join(out) + self._fail(text[stop:])
                at = stop
            elif expect == "next" and char == ",":
                self._pending = ", " if text[at + 1 : at + 2] == " " else ","
                self._expect = "key" if self._stack[-1] == "}" else "value"
                at += len(self._pending)
            elif expect == "next" and char == self._stack[-1] and len(self._stack) > 1:
                out.append(self._stack.pop())
                at += 1
            elif char == '"' and expect in _QUOTED:
                if expect in _KEYS:
                    self._expect = "key_string"
                else:
                    out.append(self._begin('"'))
                    self._expect = "string"
                at += 1
            elif expect == "colon" and char == ":":
                colon = ": " if text[at + 1 : at + 2] == " " else ":"
                self._pending += colon
                self._expect = "value"
                at += len(colon)
                if len(self._pending) > MAX_PENDING and len(colon) > 1:
                    return "".join(out) + self._fail(text[at:])
            elif expect in _VALUES and char in _OPENERS and len(self._stack) < MAX_DEPTH:
                out.append(self._begin(char))
                self._open(char)
                at += 1
            elif expect in _VALUES and (whole := _scalar(text, at)) and whole.end() - at <= MAX_SCALAR:
                if whole.end() == end and not final:
                    self._held = whole.group()
                    break
                out.append(self._begin(whole.group()))
                self._expect = "next"
                at = whole.end()
            else:
                at = self._token(text, at, final, out)
                if at < 0:
                    break
        return "".join(out)

    def _start(self, text: str, final: bool, out: list[str]) -> int:
        """The top level: a container, a string, or a lone word that is held to its end. -1: all is taken."""
        space = _SPACE.match(text)
        at = space.end() if space else 0
        first = text[at : at + 1]
        if at > MAX_SCALAR:  # white space without end
            out.append(self._fail(text))
            return -1
        if first in ("{", "["):
            self._pending = text[: at + 1]
            self._open(first)
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

    def _end_key(self) -> None:
        if len(self._stack) == 1 and self.first_key is None:
            self.first_key = self._key
        self._pending += f'"{self._key}"'
        self._key = ""
        self._expect = "colon"

    def _escapes(self, text: str, at: int, final: bool, out: list[str]) -> int:
        """The inside of a string that holds escapes or controls, up to its closing quote, to what is held of a begun
        escape, or to the end of `text`; returns where it stopped."""
        end = len(text)
        while at < end:
            found = _special(text, at)
            stop = found.start() if found else end
            if stop > at:
                out.append(text[at:stop])
                at = stop
            if at == end or text[at] == '"':
                return at
            if text[at] != "\\":
                out.append(string_body(text[at]))
                at += 1
                continue
            escape = _PAIR.match(text, at) or _ESCAPE.match(text, at)
            if escape:
                out.append(escape.group())
                at = escape.end()
            elif not final and _ESCAPE_BEGUN.match(text, at):
                self._held = text[at:]
                return end
            elif half := _HALF.match(text, at):
                out.append("\ufffd")
                at = half.end()
            else:
                out.append("\\\\")
                at += 1
        return end
