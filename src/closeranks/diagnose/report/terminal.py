"""The verdict for a terminal."""

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from closeranks.diagnose.verdict import SOUND, Finding, Verdict
from closeranks.evidence.redact import redact

_COLOUR = {"shown": "red", "likely": "yellow", "undetermined": "cyan"}


def show(verdict: Verdict, console: Console) -> None:
    """Print the verdict: the main finding in full, the others after it, then what was read."""
    for i, f in enumerate(verdict.findings):
        console.print(_panel(f, "Verdict" if i == 0 else f"Also (finding {i + 1})"))
    for area, files in verdict.patched.items():
        console.print(Text(redact(f"patched: {area} ({files} differ from the release)"), style="yellow"))
    for line in verdict.coverage:
        console.print(Text(redact(f"coverage: {line}"), style="dim"))
    for note in verdict.notes[:20]:
        console.print(Text(redact(f"note: {note}"), style="dim"))


def _panel(f: Finding, title: str) -> Panel:
    colour = "green" if f.cls in SOUND else _COLOUR[f.certainty]
    parts: list[RenderableType] = [Text(redact(f.summary), style="bold")]
    if f.ranks:
        parts.append(_ranks(f))
    for name, items in (
        ("Trigger", [f.trigger]),
        ("Mechanism", [f.mechanism]),
        ("Shown", f.shown),
        ("Only likely", f.likely),
        ("Not to be misled by", f.decoys),
        ("Workaround", [f.workaround]),
        ("Next check", f.next_checks),
    ):
        items = [i for i in items if i]
        if items:
            parts.append(Text.assemble((f"{name}: ", "bold"), redact("; ".join(items))))
    for k in f.known_issues:
        text = f"{k.id} ({k.certainty}): {k.reason}"
        text += f". Workaround: {k.workaround}" if k.workaround else ""
        text += f" (price: {k.price})" if k.price else ""
        text += f". Fix: {k.fix}" if k.fix else ""
        parts.append(Text.assemble(("Known issue: ", "bold"), redact(text)))
    for e in f.evidence:
        parts.append(Text.assemble((f"  {redact(e.file)}:{e.line}  ", "dim"), redact(e.says)))
    heading = f"[bold]{title}: {f.cls}[/bold] ({f.certainty})"
    return Panel(Group(*parts), title=heading, title_align="left", border_style=colour)


def _ranks(f: Finding) -> Table:
    """Ranks that wait alike share a row."""
    table = Table(show_header=False, box=None, pad_edge=False)
    by: dict[str, list[str]] = {}
    for rank, where in f.ranks.items():
        by.setdefault(where, []).append(rank)
    for where, ranks in by.items():
        names = ", ".join(ranks) if len(ranks) <= 8 else f"{ranks[0]} … {ranks[-1]} ({len(ranks)})"
        table.add_row(Text(redact(names), style="bold"), Text(redact(where)))
    if f.ahead:
        table.add_row(Text("ahead", style="dim"), Text(redact(", ".join(f.ahead[:16]))))
    if f.missing:
        table.add_row(Text("missing", style="dim"), Text(redact(", ".join(f.missing[:16]))))
    return table
