"""The `closeranks` command: finds one module per sub-command in this package and runs it.

A command module has `HELP: str`, `add_arguments(parser)` and `run(args) -> int`. Exit codes: 0 sound, 1 finding,
2 usage, 3 could not judge. Only the chosen command's module is imported to run, so `closeranks diagnose` never
imports the engine.
"""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import closeranks
import closeranks.cli

_NOT_COMMANDS = {"main"}


def commands() -> list[str]:
    """Names of the sub-commands, in alphabetical order (`replay`, `serve`, ...)."""
    found = (m.name for m in pkgutil.iter_modules(closeranks.cli.__path__))
    return sorted(name for name in found if name not in _NOT_COMMANDS and not name.startswith("_"))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's), run the command, and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    names = commands()
    parser = argparse.ArgumentParser(prog="closeranks", description=closeranks.__doc__)
    parser.add_argument("--version", action="version", version=f"closeranks {closeranks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((a for a in argv if not a.startswith("-")), None)
    for name in names:
        if wanted in names and name != wanted:
            continue
        module = importlib.import_module(f"closeranks.cli.{name}")
        sub = subparsers.add_parser(name.replace("_", "-"), help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        if sys.stdout is not None:  # None where it was closed when we began
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left (`| head`): nothing more to say, and nothing to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
