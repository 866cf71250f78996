"""`closeranks diagnose PATH…`: evidence in, a verdict out."""

import argparse
import io
import sys
from pathlib import Path

from rich.console import Console

from closeranks.cli._output import NotWritten, write
from closeranks.diagnose.audit.sources.installed import Damaged, compare, site_packages_of
from closeranks.diagnose.facts import Setting, Src
from closeranks.diagnose.judge import diagnose_paths
from closeranks.diagnose.readers.install import patched
from closeranks.diagnose.report import json_report, markdown, page, terminal
from closeranks.diagnose.verdict import SOUND, Verdict

HELP = "say from stacks, logs, metrics and dumps why an engine stands still, or that it does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, folders, archives, or - for standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON, schema 1 (src/closeranks/diagnose/schema)")
    form.add_argument("--markdown", action="store_true", help="Markdown")
    form.add_argument("--issue", action="store_true", help="an upstream bug report in the engine's form, redacted")
    form.add_argument("--html", action="store_true", help="one self-contained page")
    parser.add_argument("--catalog", action="append", default=[], metavar="DIR", help="more known issues (YAML files)")
    parser.add_argument("--site", metavar="DIR", help="the engine's site-packages: name what differs from its release")
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")
    parser.add_argument("--rules", action="store_true", help="list the rules, nearest to the cause first")
    parser.add_argument("--readers", action="store_true", help="list the formats that are read")


def run(args: argparse.Namespace) -> int:
    """0 nothing wrong, 1 a finding, 2 usage, 3 undetermined or nothing could be read."""
    if args.rules or args.readers:
        _list(args)
        return 0
    if not args.paths:
        print(
            "closeranks diagnose: give at least one file, folder or archive, or - for standard input", file=sys.stderr
        )
        return 2
    folders = [Path(d) for d in args.catalog]
    missing = next((d for d in folders if not d.is_dir()), None)
    if missing is not None:
        print(f"closeranks diagnose: --catalog {missing}: no such folder", file=sys.stderr)
        return 2
    site = site_packages_of(Path(args.site)) if args.site else None
    if args.site and site is None:
        print(f"closeranks diagnose: --site {args.site}: no folder with installed packages", file=sys.stderr)
        return 2
    try:
        verdict = diagnose_paths(args.paths, folders, _installed(site) if site else ())
    except Damaged as e:
        print(f"closeranks diagnose: --site {args.site}: {e}", file=sys.stderr)
        return 2
    except OSError as e:  # a path that is not there, or that cannot be read as evidence
        print(f"closeranks diagnose: {e}", file=sys.stderr)
        return 2
    try:
        write(_text(args, verdict), args.output)
    except NotWritten as e:
        print(f"closeranks diagnose: {e}", file=sys.stderr)
        return 2
    return exit_code(verdict)


def _installed(site: Path) -> list[Setting]:
    """Versions and patched areas of the engines in `site`."""
    src = Src("site-packages", 1)
    out: list[Setting] = []
    for install in compare(site):
        out.append(Setting(src=src, kind="version", name=install.name, value=install.version))
        out += patched(src, f"{install.name} {install.version}", [c.area for c in install.changed])
    return out


def exit_code(verdict: Verdict) -> int:
    """0 sound, 1 finding, 3 could not judge."""
    if verdict.main.cls == "UNDETERMINED":
        return 3
    return 0 if verdict.main.cls in SOUND else 1


def _text(args: argparse.Namespace, verdict: Verdict) -> str:
    """The verdict in the form that was asked for; for a terminal in its colours and width."""
    if args.json or args.markdown or args.issue or args.html:
        make = json_report.render if args.json else markdown.render if args.markdown else None
        text = make(verdict) if make else (markdown.issue if args.issue else page.render)(verdict)
        return text if text.endswith("\n") else text + "\n"
    there = Console()
    out = io.StringIO()
    width, colours = (120, False) if args.output else (there.width, there.is_terminal)
    terminal.show(verdict, Console(file=out, width=width, force_terminal=colours, highlight=False))
    return out.getvalue()


def _list(args: argparse.Namespace) -> None:
    from closeranks.diagnose.readers import document_readers, line_readers
    from closeranks.diagnose.rules import rules

    if args.readers:
        rows = [(r.NAME, r.ABOUT) for r in line_readers()] + [(d.NAME, d.ABOUT) for d in document_readers()]
    else:
        rows = [(f"{r.stage:>3} {r.name}", f"{r.looks_for} → {', '.join(r.classes)}") for r in rules()]
    if args.json:
        import json

        print(
            json.dumps(
                {"schema": 1, "readers" if args.readers else "rules": [{"name": n, "about": a} for n, a in rows]}
            )
        )
        return
    width = max(len(n) for n, _ in rows)
    for name, about in rows:
        print(f"{name:<{width}}  {about}")
