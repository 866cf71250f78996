"""Wrappers that only the file as a whole gives away: prefixes which could be content, where nearly every line has one.

`lines.unwrap` takes off what is unmistakable on one line. `0: ` (srun --label), `[80746] ` (numbered lines),
`pod container ` (stern), `[pod] ` (kubetail), an actor of Ray: these are taken off only if most lines of the file begin
so and records of engines begin behind them, not before. Line numbers stay.
"""

import csv
import io
import re
from collections.abc import Callable

from closeranks.diagnose import quotes

SAMPLE_CHARS = 64 << 10
SAMPLE_LINES = 400
LEAST = 2  # lines, below which nothing is agreed upon

_KEPT = (
    r"(?P<keep>(?:\x1b\[[0-9;]*m|[A-Za-z0-9][\w.-]{0,63}\s{0,20}\| |\[pod/[^\]\s]{1,200}\] "
    r"|\d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?){0,4})"
)
_DNS = r"[a-z0-9][a-z0-9.-]*"
# Each with the share of lines that must have it.
_SHAPES = tuple(
    (re.compile(_KEPT + shape), share)
    for shape, share in (
        (r"[^\t\n]{1,100}\t[^\t\n]{1,100}\t(?=\ufeff?\d{4}-\d\d-\d\dT)\ufeff?", 0.9),  # gh run view --log
        (rf"\[(?P<pod>{_DNS})(?: {_DNS})?\] ?(?=[^:]|$)", 0.9),  # kubetail
        (rf"(?P<pod>[a-z0-9][a-z0-9.]*(?:-[a-z0-9.]+)+) {_DNS}(?: |$)", 0.9),  # stern
        (r"\[\d{1,9}\](?: |$)", 0.95),  # numbered
        (r"\d{1,5}:(?: |$)", 0.95),  # srun --label
        (r"\[\d+,\d+\]<std(?:out|err)>: ?", 0.9),  # mpirun --tag-output
    )
)
_RAY = re.compile(rf"{_KEPT}\([A-Za-z_][\w.:<>]{{0,60}} pid=\d+(?:, ip=[\da-fA-F.:]+)?\)(?:\x1b\[[0-9;]*m)?(?: |$)")
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\n]{0,40}\] |Process \d+: sglang")
_VLLM = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d")
_ALSO = re.compile(
    r"# (?:HELP|TYPE) \w|[a-zA-Z_:]\w*(?::\w+)?\{\w+=\"|Thread \d+ \(|Thread 0x|Traceback \(most|INFO: +\d|\{\""
)
_MESSAGE = ("message", "content", "log", "line", "@message", "msg", "body")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)")


def stripper(head: str) -> Callable[[bytes], bytes] | None:
    """What takes the wrapper that `head`, the beginning of a file, shows off a block of whole lines; None for none."""
    pattern = _agreed(head)
    if pattern is None:
        return None
    return lambda block: _cut(block.decode("utf-8", "surrogateescape"), pattern).encode("utf-8", "surrogateescape")


def strip(text: str) -> str:
    """`text` without such a wrapper: a log, or a table of one that was exported as CSV."""
    pattern = _agreed(text[:SAMPLE_CHARS])
    return _cut(text, pattern) if pattern is not None else _from_csv(text)


def _cut(text: str, pattern: re.Pattern[str]) -> str:
    """The lines without the prefix; the name of a pod stays, in the form in which kubectl gives it."""
    left = r"\g<keep>[pod/\g<pod>] " if "pod" in pattern.groupindex else r"\g<keep>"
    out, same, instead = [], "", ""  # the prefix of the line before, which most lines share
    for line in text.split("\n"):
        if same and line.startswith(same):
            out.append(instead + line[len(same) :])
        elif m := pattern.match(line):
            same, instead = (m[0], m.expand(left)) if m[0].endswith(" ") else ("", m.expand(left))
            out.append(instead + line[m.end() :])
        else:
            out.append(line)
    return "\n".join(out)


def _agreed(head: str) -> re.Pattern[str] | None:
    lines = [line for line in head.split("\n")[:SAMPLE_LINES] if line.strip()]
    if len(head) >= SAMPLE_CHARS:
        lines = lines[:-1]
    if len(lines) < LEAST:
        return None
    behind = [m["keep"] + line[m.end() :] for line in lines if (m := _RAY.match(line))]
    if len(behind) >= len(lines) / 2 and any(map(_SGLANG.search, behind)) and not any(map(_VLLM.search, behind)):
        return _RAY
    if any(map(begins, lines)):
        return None
    for pattern, share in _SHAPES:
        found = [(line, m) for line in lines if (m := pattern.match(line))]
        behind = [m["keep"] + line[m.end() :] for line, m in found]
        labels = {m[0] for _, m in found}
        few = len(labels) <= max(1, len(behind) // 2) or pattern in _COUNTED
        if len(behind) >= share * len(lines) and few and any(map(begins, behind)):
            return pattern
    return None


def begins(line: str) -> bool:
    """Whether a record, a dump, a scrape or a document of some engine begins with this line."""
    return quotes.RECORD.match(line.encode("utf-8", "replace")) is not None or _ALSO.match(line) is not None


_COUNTED = {_SHAPES[0][0], _SHAPES[3][0]}  # every line has another one: a time, a number


def _from_csv(text: str) -> str:
    """The messages of a table of log records (Datadog and others), each behind its date; else `text`."""
    first = text[:2000].partition("\n")[0].strip().lower()
    names = [name.strip('" \ufeff') for name in first.split(",")]
    at = next((n for n, name in enumerate(names) if name in _MESSAGE), None)
    if at is None or len(names) < 2 or not all(re.fullmatch(r"[@\w. -]{1,40}", name) for name in names):
        return text
    out, when = [""], -1
    rows = csv.reader(io.StringIO(text, newline=""), strict=False)
    try:
        next(rows)
        for row in rows:
            if len(row) != len(names):
                return text
            if len(out) == 1:  # the column of dates
                when = next((n for n, cell in enumerate(row) if n != at and _DATE.fullmatch(cell)), -1)
            out.append(f"{row[when]} {row[at]}" if when >= 0 else row[at])
    except csv.Error:
        return text
    if not any(map(begins, "\n".join(out[:SAMPLE_LINES]).split("\n"))):
        return text
    return "\n".join(out) + "\n"
