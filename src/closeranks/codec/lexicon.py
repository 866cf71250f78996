"""From a dialect to patterns: finding markers in text and reading tags.

Two readings of one dialect. From *text*, markers are character sequences, and look-alikes of the sentinel are
recognised where the dialect has them. From *token ids*, each added token is one private character (a lone surrogate,
which no text holds), so that the same characters spelled by ordinary tokens are never markup.

Every marker begins with a *head* of at most `HEAD_LIMIT` characters, which is all that has to be held back to tell text
from markup. A head is a think tag, a control token, or the sentinel with the angle bracket and slash before it; after
the latter a *tag* goes on to `>`, to the end of the line, to the next `<`, or for `TAG_LIMIT` characters.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from closeranks.codec.dialects import Dialect

HEAD_LIMIT = 48
TAG_LIMIT = 512
_UNKNOWN_LIMIT = 64  # of a tag whose name is unknown, and of any tag's name
NAME_LIMIT = 128  # tool names; longer ones are damage
LOOKAHEAD_LIMIT = 1024  # of a spelled block's opener: wrapper, invoke and the start of its body
_PRIVATE = 0xDC00  # first of the private characters that stand for added tokens


class Kind(Enum):
    """What a marker is. `*_OPEN` and `*_CLOSE` are the dialect's tags; OTHER_* are tags of unknown name."""

    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    CONTROL = "control"
    SENTINEL = "sentinel"  # the sentinel without an angle bracket
    WRAP_OPEN = "wrap_open"
    WRAP_CLOSE = "wrap_close"
    INVOKE_OPEN = "invoke_open"
    INVOKE_EMPTY = "invoke_empty"  # <... invoke name="x"/>
    INVOKE_BAD = "invoke_bad"  # no readable name
    INVOKE_CLOSE = "invoke_close"
    PARAM_OPEN = "param_open"
    PARAM_ODD = "param_odd"  # a readable name, but no readable string attribute
    PARAM_BAD = "param_bad"  # no readable name
    PARAM_CLOSE = "param_close"
    PARAM_CLOSE_BAD = "param_close_bad"  # something between name and end
    OTHER_OPEN = "other_open"
    OTHER_INVOKE = "other_invoke"  # <... r=name>: some other dialect's invoke
    OTHER_CLOSE = "other_close"


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker in the buffer: `buffer[start:end]`. `name` of an invoke or parameter, `string` its string attribute."""

    kind: Kind
    start: int
    end: int
    name: str = ""
    string: bool = True


_ATTRIBUTE_NAME = re.compile(r"""\bname\s*=\s*(?:"([^"\n]{0,256})"|'([^'\n]{0,256})')""")
_ATTRIBUTE_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)["']?(?=[\s/]|\Z)""", re.IGNORECASE)
_ATTRIBUTES = re.compile(r"""(?:\s+[\w-]+\s*=\s*(?:"[^"\n]*"|'[^'\n]*'|\w+))*\s*/?\s*""")
_TOOL_NAME = re.compile(r"[^\s<>\"'｜\ud800-\udfff][^<>\"'\n｜\ud800-\udfff]*")
_NAME = re.compile(r" ?([A-Za-z_]*)")
# a whole parameter opener in one go, for names that hold quotes or angle brackets
_PARAMETER = re.compile(
    r'[ \t]+name="((?:(?!"[ \t]+[\w-]+=")[^\n｜\ud800-\udfff]){0,256})"[ \t]+string="(true|false)"[ \t]*>',
    re.IGNORECASE,
)
_TAG_BODY = re.compile(r"(?:[^\"<>\n｜\ud800-\udfff]|\"[^\"\n｜\ud800-\udfff]*\")*+")
_OPEN_QUOTE = re.compile(r"\"[^\"\n｜\ud800-\udfff]*+")


def _partial(atoms: list[str]) -> str:
    """A pattern for every beginning of `atoms` that reaches the end of the text."""
    pattern = r"\Z"
    for atom in reversed(atoms):
        pattern = rf"(?:\Z|{atom}{pattern})"
    return pattern


def _partial_literals(literals: list[str]) -> str:
    """The same for a set of literals, as one tree: a place where none begins is left after a character or two."""
    branches: dict[str, list[str]] = {}
    for literal in literals:
        if literal:
            branches.setdefault(literal[0], []).append(literal[1:])
    if not branches:
        return r"\Z"
    return r"(?:\Z|" + "|".join(re.escape(char) + _partial_literals(rest) for char, rest in branches.items()) + ")"


def _letters(literal: str) -> list[str]:
    return [re.escape(char) for char in literal]


LOOK_ALIKES = "|‖│∣❘￨"
"""What stands in place of the sentinel's bars where it was spelled: ASCII, double, box, divides, light, halfwidth."""

_BRACKET = "(?:</? ?)?"  # before a sentinel, which is markup without it, too


class Family:
    """One way of writing the sentinel: how its tags begin."""

    def __init__(self, head: str, begun: list[str]) -> None:
        self.head = head
        self.begun = begun
        self.find = re.compile(head)
        self.find_begun = re.compile("|".join(begun))


def _spelled_sentinel(identity: bool) -> tuple[str, list[str]]:
    """Look-alikes of the sentinel, whole and as atoms. With token identity the exact characters are no look-alike but a
    quotation, so the bar of the sentinel counts only with a space beside it."""
    either = f"(?:[{LOOK_ALIKES}｜] ?)"
    bar = f"(?:[{LOOK_ALIKES}] ?|｜ )" if identity else either
    bars = [bar, *[f"{bar}?"] * 3]
    last = [either, *[f"{either}?"] * 3]
    whole = rf" ?{bar}{{1,4}}(?i:DSML) ?{either}{{1,4}}"
    return whole, [" ?", *bars, "[Dd]", "[Ss]", "[Mm]", "[Ll]", " ?", *last]


class Lexicon:
    """All patterns of one dialect under one reading. Immutable; shared by decoders."""

    def __init__(self, dialect: Dialect, added: tuple[str, ...] = ()) -> None:
        """`added`: the dialect's markers that are added tokens and will arrive as such. Empty: reading from text."""
        self.dialect = dialect
        self.identity = bool(added)
        self._word = "" if added or not dialect.sentinel else dialect.sentinel.strip(dialect.sentinel[0])
        self.private = {literal: chr(_PRIVATE + i) for i, literal in enumerate(added)}
        self._shown = {ord(char): literal for literal, char in self.private.items()}
        think_open, think_close = self._mark(dialect.think_open), self._mark(dialect.think_close)
        controls = [self._mark(control) for control in dialect.controls]
        if self.identity:
            # a control token that this vocabulary lacks can only have been spelled
            controls = [control for control in controls if len(control) == 1]
        families = {"real": self._real()}
        if dialect.spelled:
            families["bars"] = self._bars()
            families["plain"] = self._plain()
        self.families = families
        real = families["real"]
        parts = [
            f"(?P<think_open>{re.escape(think_open)})",
            f"(?P<think_close>{re.escape(think_close)})",
            *([f"(?P<control>{'|'.join(map(re.escape, controls))})"] if controls else []),
            f"(?P<real>{real.head})",
        ]
        begun = [_partial_literals([think_open, think_close, *controls])]
        self.block_head = {
            name: re.compile("|".join([*parts, *([f"(?P<{name}>{family.head})"] if name != "real" else [])]))
            for name, family in families.items()
        }
        self.block_begun = {
            name: re.compile("|".join([*begun, *real.begun, *(family.begun if name != "real" else [])]))
            for name, family in families.items()
        }
        # in a value only tags are markup, and a tag begins with an angle bracket (or is one added token)
        tag = real.head.replace(_BRACKET, "</? ?")
        tag_begun = [pattern.replace(_BRACKET, "</? ?") for pattern in real.begun]
        self.value_head = {
            name: re.compile(f"(?P<real>{tag})" + (f"|(?P<{name}>{family.head})" if name != "real" else ""))
            for name, family in families.items()
        }
        self.value_begun = {
            name: re.compile("|".join([*tag_begun, *(family.begun if name != "real" else [])]))
            for name, family in families.items()
        }
        loose = [family for name, family in families.items() if name != "real"]
        loose_parts = [f"(?P<{name}>{family.head})" for name, family in families.items() if name != "real"]
        self.strict_head = self.block_head["real"]
        self.strict_begun = self.block_begun["real"]
        self.head = re.compile("|".join(parts + loose_parts))
        self.begun = re.compile("|".join(begun + real.begun + [b for family in loose for b in family.begun]))
        # anything in a delta that keeps it from being passed on as it is, for prose and for values
        written = (dialect.think_open, dialect.think_close, *dialect.controls, dialect.sentinel or "<")
        begins = {literal[0] for literal in written}
        stops = "".join(sorted(begins | {"<"}))
        self.suspect = re.compile(f"[{re.escape(stops)}\n`~\ud800-\udfff]").search
        self.value_suspect = re.compile("[<\ud800-\udfff]").search

        self._confirms = {name: _confirmation(name, self.identity) for name in families if name != "real"}
        self._wrappers = dialect.aliases | ({dialect.wrapper} if dialect.wrapper else set())

    def _mark(self, literal: str) -> str:
        return self.private.get(literal, literal)

    def show(self, text: str) -> str:
        """`text` with private characters written out."""
        return text.translate(self._shown) if self.identity and not text.isascii() else text

    def _real(self) -> Family:
        sentinel = self._mark(self.dialect.sentinel)
        if not sentinel:
            return self._tags((self.dialect.invoke,))
        if len(sentinel) == 1:
            bar = self.dialect.sentinel[0]  # surplus bars beside the token are of the tag
            run = f"{bar}{{0,3}}{sentinel}{{1,4}}{bar}{{0,3}}"
            atoms = [f"{bar}{{0,3}}", sentinel, *[f"{sentinel}?"] * 3, f"{bar}{{0,3}}"]
        else:  # bars may be doubled, the whole may be repeated
            bar, word = sentinel[0], sentinel.strip(sentinel[0])
            run = f"{bar}{{1,4}}(?:{word}{bar}{{1,4}}){{1,3}}"
            once = [*_letters(word), f"{bar}{{1,4}}"]
            atoms = [f"{bar}{{1,4}}", *once]
            again = _partial(once + once)
            return Family(f"{_BRACKET}{run}", [f"{_BRACKET}{_partial([*atoms, again])}", _partial(["<", "/?", " ?"])])
        return Family(f"{_BRACKET}{run}", [f"{_BRACKET}{_partial(atoms)}", _partial(["<", "/?", " ?"])])

    def _tags(self, names: tuple[str, ...]) -> Family:
        """Tags without sentinel; the head ends before the name."""
        marked = [self._mark(f"<{name}>") for name in names] + [self._mark(f"</{name}>") for name in names]
        if all(len(m) == 1 for m in marked):
            return Family("|".join(f"(?={m})" for m in marked), [r"(?!)"])
        choice = "|".join(names)
        begun = [_partial(["<", "/?", *_letters(name)]) for name in names]
        return Family(rf"</?(?=(?:{choice})[\s>/=\"])", begun)

    def _bars(self) -> Family:
        sentinel, atoms = _spelled_sentinel(self.identity)
        return Family(f"</?{sentinel}", [_partial(["<", "/?", *atoms])])

    def _plain(self) -> Family:
        return self._tags(("tool_calls", "function_calls", "tool_use", "invoke", "parameter"))

    def may_grow(self, buffer: str, found: "re.Match[str]") -> bool:
        """Whether more text could make this head a longer one."""
        rest = buffer[found.end() :]
        return not rest or (found.lastgroup == "real" and len(rest) <= len(self._word) and self._word.startswith(rest))

    def read_tag(self, buffer: str, found: "re.Match[str]", final: bool) -> Marker | None:
        """The tag whose head is `found`. None: it goes on beyond the buffer (never if `final`)."""
        start, head_end = found.span()
        size = len(buffer)
        opening = buffer[start:head_end]
        if opening and opening[0] != "<" and self.dialect.sentinel:
            if head_end == size and not final:
                return None
            return Marker(Kind.SENTINEL, start, head_end)
        if self.identity and not self.dialect.sentinel:
            return self._private_tag(buffer, start)
        closing = opening.startswith("</")
        if not closing and buffer[head_end : head_end + 1] == "/":  # a slash on the wrong side of the sentinel
            closing, head_end = True, head_end + 1
        named = _NAME.match(buffer, head_end, head_end + _UNKNOWN_LIMIT)
        name, name_end = (named.group(1), named.end()) if named else ("", head_end)
        if name_end == size and not final and name_end < head_end + _UNKNOWN_LIMIT:
            return None
        known = name == self.dialect.invoke or (name and name == self.dialect.parameter) or name in self._wrappers
        bound = head_end + (TAG_LIMIT if known else _UNKNOWN_LIMIT)
        limit = min(size, bound)
        body = _TAG_BODY.match(buffer, name_end, limit)
        stop = body.end() if body else name_end
        if name and name == self.dialect.parameter and not closing:
            whole = _PARAMETER.match(buffer, name_end, limit)
            if whole and (whole.end() <= stop + 1 or buffer[stop : stop + 1] == '"'):
                return Marker(Kind.PARAM_OPEN, start, whole.end(), whole.group(1), whole.group(2).lower() == "true")
        if stop < limit and buffer[stop] == '"':
            quote = _OPEN_QUOTE.match(buffer, stop, limit)
            stop = quote.end() if quote else stop
            broken_quote = stop < limit
            while broken_quote and buffer[stop] not in '"\n' and buffer[stop - 1] in "</":
                stop -= 1  # the next tag began inside the quote
        else:
            broken_quote = False
        if stop == limit == size and not final and limit < bound:
            return None
        ended = stop < limit and buffer[stop] == ">" and not broken_quote
        end = stop + 1 if ended else stop
        if not known:
            text = buffer[name_end:stop]
            if not ended:
                end = head_end if text.strip() or stop == bound else name_end
            if closing:
                kind = (
                    Kind.PARAM_CLOSE
                    if ended and (not name or name.startswith("param")) and not text.strip()
                    else Kind.OTHER_CLOSE
                )
                return Marker(kind, start, end)
            return Marker(Kind.OTHER_INVOKE if ended and text.startswith("=") else Kind.OTHER_OPEN, start, end)
        attributes = buffer[name_end:stop]
        if closing:
            return Marker(self._closer(name, attributes), start, end)
        if not ended and "=" not in attributes and attributes.strip():
            end = name_end + (attributes[0] == " ")  # a mention in prose, or a wrapper that runs into text
        if name == self.dialect.invoke:
            return self._invoke(attributes, start, end, ended or stop < limit)
        if name == self.dialect.parameter:
            return _parameter(attributes, start, end, ended)
        return Marker(Kind.WRAP_OPEN, start, end)

    def _closer(self, name: str, attributes: str) -> Kind:
        if name == self.dialect.invoke:
            return Kind.INVOKE_CLOSE
        if name == self.dialect.parameter:
            return Kind.PARAM_CLOSE_BAD if attributes.strip() else Kind.PARAM_CLOSE
        return Kind.WRAP_CLOSE

    def _invoke(self, attributes: str, start: int, end: int, ended: bool) -> Marker:
        if self.dialect.body == "envelope":
            return Marker(Kind.INVOKE_OPEN, start, end)
        found = _ATTRIBUTE_NAME.search(attributes)
        name = (found.group(1) or found.group(2) or "") if found else ""
        readable = (
            found and len(name) <= NAME_LIMIT and _TOOL_NAME.fullmatch(name) and _ATTRIBUTES.fullmatch(attributes)
        )
        if not ended or not readable:
            return Marker(Kind.INVOKE_BAD, start, end)
        empty = attributes.rstrip().endswith("/")
        return Marker(Kind.INVOKE_EMPTY if empty else Kind.INVOKE_OPEN, start, end, name)

    def _private_tag(self, buffer: str, start: int) -> Marker:
        shown = self.show(buffer[start])
        return Marker(Kind.INVOKE_CLOSE if shown.startswith("</") else Kind.INVOKE_OPEN, start, start + 1)

    def opens_invoke(self, buffer: str, start: int, family: str, final: bool) -> bool | None:
        """Whether a spelled opener at `start` begins a block with an invoke. None: cannot be known yet."""
        at, last = start, min(len(buffer), start + LOOKAHEAD_LIMIT)
        waits = len(buffer) < start + LOOKAHEAD_LIMIT and not final
        wrapper, invoke, body = self._confirms[family]
        if waits and wrapper.begun.match(buffer, at, last):
            return None
        opened = wrapper.whole.match(buffer, at, last)
        if opened:
            at = opened.end()
        for step in (invoke, body):
            found = step.whole.match(buffer, at, last)
            if not found:
                return None if waits and step.begun.match(buffer, at, last) else False
            at = found.end()
        return True


@dataclass(frozen=True, slots=True)
class _Step:
    whole: re.Pattern[str]
    begun: re.Pattern[str]


def _step(atoms: list[str], whole: str) -> _Step:
    return _Step(re.compile(whole), re.compile(_partial(atoms)))


def _confirmation(family: str, identity: bool) -> tuple[_Step, _Step, _Step]:
    """Wrapper, invoke, body of a spelled block, each with the white space after it."""
    sentinel, sentinel_atoms = _spelled_sentinel(identity) if family == "bars" else ("", [])
    wrappers = "tool_calls|function_calls|calls|tool_use|tools?|tool_?calls?"
    wrapper = _step(
        ["<", *sentinel_atoms, "(?!invoke)[a-z_]{1,16}", r" ?", ">?", r"\s{0,16}"],
        rf"<{sentinel}(?:{wrappers})(?: ?>|(?=\s))\s{{0,16}}",
    )
    invoke = _step(
        [
            "<",
            *sentinel_atoms,
            *"invoke",
            r"\s+",
            *_letters('name="'),
            r'[^"<\n]{0,128}',
            '"',
            r"\s*",
            ">",
            r"\s{0,16}",
        ],
        rf'<{sentinel}invoke\s+name="[^"<\n]{{1,128}}"\s*>\s{{0,16}}',
    )
    if family == "bars":
        body = _step(["<", "/?", *sentinel_atoms], rf"\{{|</?{sentinel}(?:parameter|invoke)")
        body = _Step(body.whole, re.compile("|".join([_partial(["<", "/?", *sentinel_atoms, "[a-z]{1,9}"])])))
    else:
        parameter = r'<parameter\s+name="[^"<\n]{0,128}"\s+string="'
        body = _Step(
            re.compile(rf"{parameter}|</invoke"),
            re.compile(
                "|".join(
                    [
                        _partial([*"</invoke"]),
                        _partial(
                            [
                                *"<parameter",
                                r"\s+",
                                *_letters('name="'),
                                r'[^"<\n]{0,128}',
                                '"',
                                r"\s+",
                                *_letters('string="'),
                            ]
                        ),
                    ]
                )
            ),
        )
    return wrapper, invoke, body


def _parameter(attributes: str, start: int, end: int, ended: bool) -> Marker:
    named, typed = _ATTRIBUTE_NAME.search(attributes), _ATTRIBUTE_STRING.search(attributes)
    if not named or not ended:
        return Marker(Kind.PARAM_BAD, start, end)
    name = named.group(1) if named.group(1) is not None else named.group(2)
    if not typed:
        return Marker(Kind.PARAM_ODD, start, end, name)
    return Marker(Kind.PARAM_OPEN, start, end, name, typed.group(1).lower() == "true")


@lru_cache(maxsize=32)
def lexicon_of(dialect: Dialect, added: tuple[str, ...] = ()) -> Lexicon:
    """The lexicon of a dialect, built once."""
    return Lexicon(dialect, added)
