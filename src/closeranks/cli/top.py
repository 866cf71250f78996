"""`closeranks top`: engines, ranks, what each does, queues, signals, last incidents and recoveries, live."""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from closeranks.cli import _recover
from closeranks.cli._settings import SettingsError, add_flags
from closeranks.watch.picture import Engine, Observer, Picture
from closeranks.watch.recover import default_folder
from closeranks.watch.settings import Settings

HELP = "engines, ranks and what each does, live; takes no stacks and changes nothing"
_OPTIONS = _recover.part_of(Settings, without=frozenset({"log", "probe", "probe_url", "port", "wait_s"}))
_COLOURS = {"healthy": "green", "suspect": "yellow", "confirmed": "bold red", "excluded": "cyan", "blind": "magenta"}
SETTLE_LOOKS = 3
"""Looks of `--once`: rates need two, and a state three."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`closeranks top [--once] [--json]`."""
    parser.add_argument("--once", action="store_true", help="one picture, then end")
    parser.add_argument("--json", action="store_true", help="JSON, schema 1, one object per picture")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="recovery's own folder (default: one per user)")
    add_flags(parser, _OPTIONS)


def run(args: argparse.Namespace) -> int:
    """0; with --once 1 if an engine is suspect or confirmed, 3 if none is seen or one is blind. 2 usage."""
    try:
        settings = Settings(**_recover.values_of("top", args, _OPTIONS))
    except SettingsError as error:
        print(f"closeranks top: {error}", file=sys.stderr)
        return 2
    if not 0.2 <= settings.interval <= 60:
        print(f"closeranks top: --interval {settings.interval}: between 0.2 and 60 seconds", file=sys.stderr)
        return 2
    bad = next((url for url in settings.url if not _recover.is_address(url, port=True)), None)
    if bad is not None:
        print(f"closeranks top: --url {bad}: an address such as http://127.0.0.1:30000", file=sys.stderr)
        return 2
    observer = Observer(settings, args.state_dir or default_folder())
    try:
        return asyncio.run(_once(observer, args.json) if args.once else _live(observer, settings, args.json))
    except KeyboardInterrupt:
        return 0


async def _once(observer: Observer, as_json: bool) -> int:
    try:
        for _ in range(SETTLE_LOOKS - 1):
            await observer.look()
            await asyncio.sleep(1.0)
        picture = await observer.look()
    finally:
        await observer.close()
    _print(picture, as_json)
    phases = {engine.phase for engine in picture.engines}
    if phases & {"suspect", "confirmed"}:
        return 1
    return 3 if not phases or "blind" in phases else 0


async def _live(observer: Observer, settings: Settings, as_json: bool) -> int:
    console = Console()
    try:
        if as_json or not console.is_terminal:
            while True:
                _print(await observer.look(), as_json)
                await asyncio.sleep(settings.interval)
        with Live(Text("looking…"), console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(render(await observer.look()), refresh=True)
                await asyncio.sleep(settings.interval)
    finally:
        await observer.close()


def _print(picture: Picture, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"schema": 1, **msgspec.to_builtins(picture)}), flush=True)
        return
    wide = Console().is_terminal
    Console(width=None if wide else 150, highlight=False).print(render(picture))


def render(picture: Picture) -> RenderableType:
    """The picture as a terminal shows it."""
    clock = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(picture.at))
    parts: list[RenderableType] = [Text(f"closeranks top  {clock}  {len(picture.engines)} engine(s)", style="bold")]
    if not picture.engines:
        parts.append(Text("no engine is seen in this pid namespace", style="magenta"))
    for engine in picture.engines:
        parts += [_head(engine), _ranks(engine)]
    parts += _past("incidents", picture.incidents, ("time", "engine", "verdict", "certainty", "summary"))
    parts += _past("recoveries", picture.recoveries, ("time", "engines", "verdict", "now", "took_s"))
    parts += [Text(note, style="red") for note in picture.notes]
    return Group(*parts)


def _head(engine: Engine) -> RenderableType:
    text = Text(f"\n{engine.name}", style="bold")
    text.append(f"  {engine.kind} {engine.role}  {engine.url}  ", style="none")
    text.append(engine.phase, style=_COLOURS.get(engine.phase, ""))
    counts = {"running": engine.running, "waiting": engine.waiting, **engine.queues}
    numbers = [f"{name} {value:.0f}" for name, value in counts.items() if value is not None]
    numbers += [f"{engine.tokens_s:.1f} tokens/s"] if engine.tokens_s is not None else []
    numbers += [engine.http] if engine.http else []
    text.append("  " + "  ".join(numbers), style="none")
    for line in engine.why:
        text.append(f"\n  {line}", style=_COLOURS.get(engine.phase, ""))
    for line in engine.blind:
        text.append(f"\n  blind: {line}", style="magenta")
    return text


def _ranks(engine: Engine) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name, justify in (("process", "left"), ("pid", "right"), ("state", "left"), ("CPU %", "right"),
                          ("switches/s", "right"), ("threads", "right"), ("waits in", "left")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for rank in engine.ranks:
        dead = rank.state in "XZT"
        table.add_row(
            Text(rank.label),
            str(rank.pid),
            rank.state,
            "" if rank.cpu_percent is None else f"{rank.cpu_percent:.0f}",
            "" if rank.switches_s is None else f"{rank.switches_s:.0f}",
            str(rank.threads or ""),
            Text(rank.wchan.partition(".")[0] if rank.wchan != "0" else ""),
            style="red" if dead else "",
        )
    return table


def _past(title: str, rows: tuple[dict[str, str], ...], columns: tuple[str, ...]) -> list[RenderableType]:
    if not rows:
        return []
    table = Table(box=None, padding=(0, 2), header_style="dim", title=f"last {title}", title_justify="left")
    for name in columns:
        wide = name in ("summary", "now")
        table.add_column(name, overflow="ellipsis" if wide else "fold", no_wrap=wide, ratio=1 if wide else None)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    return [Text(""), table]
