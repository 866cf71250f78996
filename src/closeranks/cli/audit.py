"""`closeranks audit`: what in a deployment is known to wedge, leak or corrupt, before it does."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from closeranks.cli._output import NotWritten, write

_PROGRAM = re.compile(r"python[\d.]*|vllm|sglang|trtllm-serve")
_NOTHING = "no engine, model or installation was recognised in what was given"
HELP = "audit flags, units, model folders and installed engines for what is known to wedge, leak or corrupt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`closeranks audit [SOURCE...] [--wheel FILE] [--host] [--json|--sarif] [-- COMMAND LINE]`."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a unit, compose, Kubernetes, flags, log or server-info file; a model or tokenizer folder; a folder with "
        "site-packages; a folder of such files; the URL of an engine; after `--`, an engine's command line",
    )
    parser.add_argument("--engine-version", metavar="V", help="the version of engines that do not say their own")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="show the difference of changed files to this wheel")
    parser.add_argument("--host", action="store_true", help="also judge this machine: py-spy, ptrace")
    parser.add_argument("--catalog", type=Path, metavar="DIR", help="more entries of unsafe configurations (YAML)")
    parser.add_argument("--rules", action="store_true", help="list the rules")
    parser.add_argument("--json", action="store_true", help="JSON, schema 1")
    parser.add_argument("--sarif", action="store_true", help="SARIF 2.1.0")


def run(args: argparse.Namespace) -> int:
    """0 without errors or warnings, 1 with, 2 for wrong usage, 3 when nothing that was given could be judged."""
    from closeranks.catalog.unsafe import CatalogError
    from closeranks.diagnose.audit import audit
    from closeranks.diagnose.audit.judge import all_rules
    from closeranks.diagnose.audit.report import to_json, to_sarif, to_text
    from closeranks.diagnose.audit.sources import SourceError, collect, this_host

    try:
        rules = all_rules(args.catalog)
        if args.rules:
            _list_rules(rules, args.json)
            return 0
        sources, words = _split(args.sources)
        if not sources and not words and not args.host:
            print("nothing to audit: give a file, a folder, a URL, or a command line after `--`", file=sys.stderr)
            return 2
        deployment = collect(sources, words, args.wheel, args.engine_version)
        if args.host:
            deployment = replace(deployment, host=this_host())
        report = audit(deployment, args.catalog)
    except (SourceError, CatalogError, OSError) as error:
        print(f"closeranks audit: {error}", file=sys.stderr)
        return 2
    if args.sarif:
        text = json.dumps(to_sarif(report, rules), indent=2)
    elif args.json:
        text = json.dumps(to_json(report), indent=2, ensure_ascii=False)
    else:
        text = to_text(report, diffs=args.wheel is not None)
    try:
        write(text + "\n")
    except NotWritten as error:
        print(f"closeranks audit: {error}", file=sys.stderr)
        return 2
    if any(finding.severity != "note" for finding in report.findings):
        return 1
    judged = [engine for engine in deployment.engines if engine.judged]
    if not any((judged, deployment.models, deployment.installs, deployment.libraries, deployment.host)):
        others = [f"{e.label}: {e.kind or 'unknown engine'}" for e in deployment.engines]
        said = f"no rule speaks of what was given ({'; '.join(others)})" if others else _NOTHING
        print(f"closeranks audit: {said}", file=sys.stderr)
        return 3
    return 0


def _split(given: list[str]) -> tuple[list[str], list[str]]:
    """Sources, and the words of a command line: those after the first that starts one (argparse has eaten the `--`)."""
    from closeranks.diagnose.audit.sources.flags import is_command_line

    for index in range(len(given)):
        rest = given[index:]
        file = Path(given[index])
        program = not file.exists() or (file.is_file() and _PROGRAM.fullmatch(file.name) is not None)
        if is_command_line(" ".join(rest)) and program and "://" not in given[index]:
            return given[:index], rest
    return given, []


def _list_rules(rules: Sequence[object], as_json: bool) -> None:
    for rule in rules:
        fields = {name: getattr(rule, name) for name in ("id", "severity", "area", "title", "refs")}
        text = json.dumps(fields) if as_json else f"{fields['severity']:8} {fields['id']:38} {fields['title']}"
        print(text)
