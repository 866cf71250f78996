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
_DNS = r"[a-z0-9](?:[a-z0-9.-]{0,100}[a-z0-9])?"
# Each with the share of lines that must have it.
_SHAPES = tuple(
    (re.compile(rf"(?m)^{_KEPT}{shape}"), share)
    for shape, share in (
        (r"[^\t\n]{1,100}\t[^\t\n]{1,100}\t(?=\ufeff?\d{4}-\d\d-\d\dT)\ufeff?", 0.9),  # gh run view --log
        (rf"\[(?P<pod>{_DNS})(?: {_DNS})?\] ?(?=[^:]|$)", 0.9),  # kubetail
        (rf"(?P<pod>{_DNS}-[a-z0-9.-]{{1,60}}) {_DNS}(?: |$)", 0.9),  # stern
        (r"\[\d{1,9}\](?: |$)", 0.95),  # numbered
        (r"\d{1,5}:(?: |$)", 0.95),  # srun --label
        (r"\[\d+,\d+\]<std(?:out|err)>: ?", 0.9),  # mpirun --tag-output
    )
)
_RAY = re.compile(
    rf"(?m)^{_KEPT}\([A-Za-z_][\w.:<>]{{0,60}} pid=\d+(?:, ip=[\da-fA-F.:]+)?\)(?:\x1b\[[0-9;]*m)?(?: |$)"
)
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
    found = re.compile(pattern.pattern.encode())
    return lambda block: found.sub(_left(pattern).encode(), block)


def strip(text: str) -> str:
    """`text` without such a wrapper: a log, or a table of one that was exported as CSV."""
    pattern = _agreed(text[:SAMPLE_CHARS])
    return pattern.sub(_left(pattern), text) if pattern is not None else _from_csv(text)


def _left(pattern: re.Pattern[str]) -> str:
    """What stays of a prefix: the name of a pod, in the form in which kubectl gives it."""
    return r"\g<keep>[pod/\g<pod>] " if "pod" in pattern.groupindex else r"\g<keep>"


def _agreed(head: str) -> re.Pattern[str] | None:
    lines = [line for line in head.split("\n")[:SAMPLE_LINES] if line.strip()]
    if len(head) >= SAMPLE_CHARS:
        lines = lines[:-1]
    if len(lines) < LEAST:
        return None
    inner = [(line, _RAY.sub(r"\g<keep>", line)) for line in lines]
    behind = [text for line, text in inner if text != line]
    if len(behind) >= len(lines) / 2 and any(map(_SGLANG.search, behind)) and not any(map(_VLLM.search, behind)):
        return _RAY
    if any(map(begins, lines)):
        return None
    for pattern, share in _SHAPES:
        inner = [(line, pattern.sub(r"\g<keep>", line, count=1)) for line in lines]
        behind = [text for line, text in inner if text != line]
        labels = {line.removesuffix(text) for line, text in inner if text != line}
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
    out = [""]
    try:
        for row in list(csv.reader(io.StringIO(text, newline=""), strict=False))[1:]:
            if len(row) != len(names):
                return text
            date = next((cell for n, cell in enumerate(row) if n != at and _DATE.fullmatch(cell)), "")
            out.append(f"{date} {row[at]}" if date else row[at])
    except csv.Error:
        return text
    if not any(map(begins, "\n".join(out[:SAMPLE_LINES]).split("\n"))):
        return text
    return "\n".join(out) + "\n"
