"""Lines with their times as a recording: an asciicast (version 2) and an animated SVG."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

WIDTH, LINE, CHAR = 118, 18, 7.9
COLOURS = {"error": "#ff6b68", "warning": "#e5c07b", "info": "#d7dae0", "good": "#98c379", "command": "#61afef"}
CODES = {"error": "31", "warning": "33", "info": "0", "good": "32", "command": "36"}
FONT = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:13px"

Line = tuple[float, str, str]
"""Seconds since the begin, one of COLOURS, text."""


def wrapped(head: str, text: str) -> Iterator[str]:
    """`text` after `head` (a time), in lines that fit the width; what goes on stands under its own text."""
    indent = " " * (len(text) - len(text.lstrip()))
    for number, part in enumerate(textwrap.wrap(text, WIDTH - len(head), subsequent_indent=indent + "  ")):
        yield (" " * len(head) if number else head) + part


def cast(lines: Sequence[Line], command: str) -> str:
    """asciicast v2."""
    out = [json.dumps({"version": 2, "width": WIDTH, "height": 40, "title": command})]
    out.append(json.dumps([0.0, "o", f"\x1b[36m$ {command}\x1b[0m\r\n"]))
    out += [json.dumps([round(t, 2), "o", f"\x1b[{CODES[c]}m{text}\x1b[0m\r\n"]) for t, c, text in lines]
    return "\n".join(out) + "\n"


def svg(lines: Sequence[Line], command: str, speed: float = 4.0) -> str:
    """A picture whose lines appear in their order, `speed` times as fast as it was; whole where nothing is animated."""
    shown = [(0.0, "command", f"$ {command}"), *lines]
    height, width = LINE * (len(shown) + 2), int(CHAR * WIDTH) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>@keyframes in{from{opacity:0}to{opacity:1}}text{white-space:pre;" + FONT + "}"
        "@media(prefers-reduced-motion:no-preference){text{opacity:0;animation:in .2s forwards}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e222a"/>',
    ]
    for number, (at, colour, text) in enumerate(shown):
        y, delay = LINE * (number + 2) - 4, at / speed
        parts.append(
            f'<text x="12" y="{y}" fill="{COLOURS[colour]}" style="animation-delay:{delay:.2f}s">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(out: Path, lines: Sequence[Line], command: str) -> str:
    """Write OUT.cast and OUT.svg; a word about them."""
    out.with_suffix(".cast").write_text(cast(lines, command))
    out.with_suffix(".svg").write_text(svg(lines, command))
    return f"{len(lines)} lines, {lines[-1][0]:.0f} s: {out}.cast, {out}.svg"
