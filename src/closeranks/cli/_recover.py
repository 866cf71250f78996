"""Options of recovery, the same for `closeranks recover` and `closeranks watch --act`.

`POLICY` goes into the command's own list of options, so that one `--config` file serves all of them.
"""

import argparse
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from closeranks.cli._settings import SettingsError, only
from closeranks.supervise.platforms import NAMES
from closeranks.watch.recover import Recovery, Shown, default_folder
from closeranks.watch.recover_state import Policy
from closeranks.watch.recover_survey import Choice

POLICY = Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What an operator knows better than discovery, and where recovery keeps its own."""
    group = parser.add_argument_group("recovery")
    group.add_argument("--state-dir", type=Path, metavar="DIR", help="recovery's own folder (default: one per user)")
    name = "NAME is an engine's, as `closeranks watch --check` shows it; repeatable"
    group.add_argument("--platform", action="append", default=[], metavar="NAME=P", help=f"{', '.join(NAMES)}; {name}")
    group.add_argument("--unit", action="append", default=[], metavar="NAME=U", help="unit, container or NAMESPACE/POD")
    group.add_argument(
        "--start-command", action="append", default=[], metavar="NAME=C", help="in place of its own command line"
    )


def recovery_of(
    args: argparse.Namespace, values: Mapping[str, Any], show: Callable[[Shown], None] = lambda shown: None
) -> Recovery:
    """As the options say; `values` are the gathered settings. Raises SettingsError, naming the option."""
    policy = msgspec.convert(only(Policy, values), Policy)
    return Recovery(args.state_dir or default_folder(), policy, choices_of(args), show=show)


def choices_of(args: argparse.Namespace) -> dict[str, Choice]:
    """What was said about single engines. Raises SettingsError."""
    found: dict[str, Choice] = {}
    for option, given in (("platform", args.platform), ("unit", args.unit), ("start-command", args.start_command)):
        for text in given:
            name, _, value = text.partition("=")
            if not (name and value):
                raise SettingsError(f"--{option} {text}: expected NAME=VALUE")
            if option == "platform" and value not in NAMES:
                raise SettingsError(f"--platform {text}: known are {', '.join(NAMES)}")
            old = found.get(name, Choice())
            if option == "start-command":
                found[name] = msgspec.structs.replace(old, command=_words(text, value))
            else:
                found[name] = msgspec.structs.replace(old, **{option: value})
    for name, choice in found.items():
        if choice.unit and not choice.platform:
            raise SettingsError(f"--unit {name}={choice.unit}: say its --platform too")
    return found


def _words(text: str, command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise SettingsError(f"--start-command {text}: {error}") from None


def show_step(shown: Shown) -> None:
    """Print a step when it is over."""
    if shown.event != "begin":
        mark = "ok  " if shown.event == "done" else "FAIL"
        print(f"{mark} {shown.kind:6} {shown.engine:28} {shown.took_s:7.2f} s  {shown.says}", flush=True)
