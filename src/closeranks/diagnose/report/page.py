# ruff: noqa: E501 - markup stays in one piece
"""The verdict as one self-contained page: findings, the timeline, and the rank × collective picture. No scripts."""

from html import escape

from closeranks.diagnose import clock
from closeranks.diagnose.verdict import SOUND, Finding, Verdict
from closeranks.evidence.redact import redact

_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#667;--line:#d8dde3;--shown:#b42318;--likely:#b54708;--undetermined:#175cd3;--sound:#067647}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e8eaed;--dim:#9aa4ad;--line:#333b43;--shown:#f97066;--likely:#fdb022;--undetermined:#84adff;--sound:#47cd89}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
section{border:1px solid var(--line);border-left:5px solid var(--c);border-radius:6px;padding:.8rem 1.2rem;margin:1rem 0}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:.2rem 0;color:var(--c)}code,td,th{font:13px/1.4 ui-monospace,monospace}
table{border-collapse:collapse}td,th{border:1px solid var(--line);padding:.15rem .5rem;text-align:left}
td.here{background:var(--c);color:var(--bg);text-align:center}dt{font-weight:600;margin-top:.4rem}dd{margin-left:1rem}
svg text{fill:var(--fg);font:11px ui-monospace,monospace}.scroll{overflow-x:auto}.dim{color:var(--dim)}
"""


def render(verdict: Verdict) -> str:
    """The page."""
    body = [
        "<h1>closeranks diagnose</h1>",
        *(_finding(f, i) for i, f in enumerate(verdict.findings)),
        _timeline(verdict),
    ]
    if verdict.patched:
        rows = "".join(
            f"<li>{_safe(f'{area}: {files} differ from the release')}</li>" for area, files in verdict.patched.items()
        )
        body.append(f"<h2>Patched areas of the installed engine</h2><ul>{rows}</ul>")
    read = "".join(f"<li>{_safe(line)}</li>" for line in [*verdict.coverage, *verdict.notes[:60]])
    body.append(f"<h2>What was read</h2><ul class=dim>{read}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>closeranks diagnose</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _safe(text: str) -> str:
    return escape(redact(text))


def _finding(f: Finding, i: int) -> str:
    colour = "sound" if f.cls in SOUND else f.certainty
    parts = [
        f"<h2>{'Verdict' if i == 0 else f'Finding {i + 1}'}: {f.cls} ({f.certainty})</h2>",
        f"<p><b>{_safe(f.summary)}</b></p>",
    ]
    parts.append(_matrix(f))
    rows = []
    for name, items in (
        ("Trigger", [f.trigger]),
        ("Mechanism", [f.mechanism]),
        ("Missing", f.missing),
        ("Ahead", f.ahead),
        ("Shown", f.shown),
        ("Only likely", f.likely),
        ("Not to be misled by", f.decoys),
        ("Workaround", [f.workaround]),
        ("Next check", f.next_checks),
    ):
        rows += [f"<dt>{name}</dt>" + "".join(f"<dd>{_safe(x)}</dd>" for x in items if x)] if any(items) else []
    for k in f.known_issues:
        more = "; ".join(
            x for x in (k.reason, k.workaround, k.price and f"price: {k.price}", k.fix and f"fix: {k.fix}") if x
        )
        rows.append(f"<dt>Known issue {_safe(k.id)} ({k.certainty})</dt><dd>{_safe(more)}</dd>")
    parts.append(f"<dl>{''.join(rows)}</dl>")
    cited = "".join(f"<tr><td>{_safe(e.file)}:{e.line}</td><td>{_safe(e.says)}</td></tr>" for e in f.evidence)
    parts.append(f"<div class=scroll><table>{cited}</table></div>" if cited else "")
    return f'<section style="--c:var(--{colour})">{"".join(parts)}</section>'


def _matrix(f: Finding) -> str:
    """Ranks down, places across: who stands where."""
    if len(f.ranks) < 2:
        return ""
    columns = list(dict.fromkeys(f.ranks.values()))[:12]
    head = "".join(f"<th>{_safe(c)}</th>" for c in columns)
    rows = "".join(
        f"<tr><th>{_safe(rank)}</th>"
        + "".join("<td class=here>●</td>" if where == c else "<td></td>" for c in columns)
        + "</tr>"
        for rank, where in list(f.ranks.items())[:256]
    )
    return f"<div class=scroll><table><tr><th></th>{head}</tr>{rows}</table></div>"


def _timeline(verdict: Verdict) -> str:
    events = [e for e in verdict.timeline if e.time is not None][:120]
    if len(events) < 2:
        return ""
    height = 18 * len(events) + 10
    marks, last = [], None
    for i, e in enumerate(events):
        y = 18 * i + 16
        gap = (e.time or 0) - last if last is not None else 0.0
        label = f"+{gap:.0f} s" if gap >= 1 else ""
        marks.append(
            f'<circle cx="150" cy="{y - 4}" r="4" fill="var(--undetermined)"/><text x="4" y="{y}">{clock.show(e.time)}</text>'
            f'<text x="164" y="{y}">{label}</text><text x="236" y="{y}">{_safe(f"{e.says[:110]}  ({e.file}:{e.line})")}</text>'
        )
        last = e.time
    line = f'<line x1="150" y1="0" x2="150" y2="{height}" stroke="var(--line)" stroke-width="2"/>'
    return f'<h2>Timeline</h2><div class=scroll><svg width="1200" height="{height}" role="img" aria-label="Timeline">{line}{"".join(marks)}</svg></div>'
