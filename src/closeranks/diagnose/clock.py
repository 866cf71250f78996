# ruff: noqa: E501 - sentences and expressions stay in one piece, so that a search finds them
"""Clocks of log lines, as seconds since 1 January. The year is dropped: half of the formats have none."""

import re

_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
_MONTHS = {
    m: i + 1 for i, m in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"])
}
DAY = 86400.0


def seconds(month: int, day: int, hms: str) -> float | None:
    """`month`, `day`, `HH:MM:SS[.frac]` as seconds since 1 January of a leap year; None if out of range."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    t = time_of_day(hms)
    return None if t is None else (_BEFORE[month - 1] + day - 1) * DAY + t


def time_of_day(hms: str) -> float | None:
    """`HH:MM:SS[.,]frac` as seconds since midnight."""
    m = re.match(r"(\d\d?):(\d\d):(\d\d)(?:[.,](\d{1,9}))?", hms)
    if not m:
        return None
    h, mi, s = int(m[1]), int(m[2]), int(m[3])
    if h > 24 or mi > 59 or s > 60:
        return None
    return h * 3600 + mi * 60 + s + (float(f"0.{m[4]}") if m[4] else 0.0)


_FORMS = re.compile(
    r"""(?x)
    (?P<iso> (?:\d{4}[-/](?P<m1>\d\d)[-/](?P<d1>\d\d)) [T ] (?P<t1>\d\d:\d\d:\d\d(?:[.,]\d+)?) )
    | (?P<us> (?P<m2>\d\d)/(?P<d2>\d\d)/\d{4}-(?P<t2>\d\d:\d\d:\d\d) )
    | (?P<vllm> (?<!\d)(?P<m3>\d\d)-(?P<d3>\d\d)\ (?P<t3>\d\d:\d\d:\d\d(?:[.,]\d+)?) )
    | (?P<glog> (?<![A-Za-z0-9])[IWEF](?P<m4>\d{1,2})(?P<d4>\d\d)\ (?P<t4>\d\d:\d\d:\d\d(?:\.\d+)?) )
    | (?P<word> (?P<m5>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\ +(?P<d5>\d{1,2})(?:,\ \d{4}\ @)?\ +(?P<t5>\d\d:\d\d:\d\d(?:\.\d+)?) )
    """
)


def find(text: str, limit: int = 160) -> float | None:
    """The first clock in the first `limit` characters of `text`."""
    m = _FORMS.search(text, 0, limit)
    if not m:
        return None
    for i in range(1, 6):
        month = m[f"m{i}"]
        if month is not None:
            number = _MONTHS[month.lower()] if i == 5 else int(month)
            return seconds(number, int(m[f"d{i}"]), m[f"t{i}"])
    return None


def show(t: float | None) -> str:
    """`MM-DD HH:MM:SS` of a time, which may be reckoned back into the year before; empty for None and for other years."""
    if t is None or not -31 * DAY <= t < 366 * DAY:
        return ""
    t %= 366 * DAY
    day = int(t // DAY)
    month = max(i for i, b in enumerate(_BEFORE) if b <= day)
    rest = int(t % DAY)
    return f"{month + 1:02}-{day - _BEFORE[month] + 1:02} {rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
