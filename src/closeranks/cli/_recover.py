"""Settings of `closeranks watch`, `recover` and `top`, and the options of recovery, the same for the first two.

Each of them takes a part of `SETTINGS`; one `--config` file and one set of variables serve all.
"""

import argparse
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from closeranks.cli._settings import Option, SettingsError, gather, only, options, warn_of_strangers
from closeranks.supervise.platforms import NAMES
from closeranks.watch.recover import Recovery, default_folder
from closeranks.watch.recover_run import Shown
from closeranks.watch.recover_state import Policy
from closeranks.watch.recover_survey import Choice
from closeranks.watch.settings import Settings

SETTINGS = options([Settings, Policy], frozenset(), "CLOSERANKS_WATCH_")


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


def part_of(*structs: type[msgspec.Struct], without: frozenset[str] = frozenset()) -> list[Option]:
    """Those of `SETTINGS` that a command has."""
    names = {field.name for struct in structs for field in msgspec.structs.fields(struct)} - without
    return [option for option in SETTINGS if option.name in names]


def values_of(command: str, args: argparse.Namespace, known: Sequence[Option]) -> dict[str, Any]:
    """What was set of `known`, by name; says which variables are no setting of any. Raises SettingsError."""
    warn_of_strangers(command, SETTINGS)
    return gather(args, known, elsewhere=SETTINGS)


def recovery_of(
    args: argparse.Namespace, values: Mapping[str, Any], show: Callable[[Shown], None] = lambda shown: None
) -> Recovery:
    """As the options say; `values` are the gathered settings. Raises SettingsError, naming the option."""
    policy = msgspec.convert(only(Policy, values), Policy)
    if said := _wrong(policy):
        raise SettingsError(said)
    return Recovery(args.state_dir or default_folder(), policy, choices_of(args), show=show)


def _wrong(policy: Policy) -> str:
    """What is wrong with it: a time that is none would never be over, and a check of nothing always passes."""
    for name in ("cooldown_s", "end_s", "ready_s", "verify_s", "resume_within_s"):
        seconds = getattr(policy, name)
        if not (math.isfinite(seconds) and seconds >= 0):
            return f"--{name.replace('_', '-')} {seconds}: seconds, from 0 on"
    if policy.per_hour < 0 or policy.verify_tries < 1:
        return f"--per-hour {policy.per_hour}, --verify-tries {policy.verify_tries}: at least 0 and 1"
    if min(policy.ramp, default=0) < 1:
        return f"--ramp {' '.join(map(str, policy.ramp))}: check requests at a time, each at least 1"
    if policy.router and not is_address(policy.router):
        return f"--router {policy.router}: an address such as http://127.0.0.1:30080"
    return ""


def is_address(url: str, port: bool = False) -> bool:
    """Whether it is one of HTTP; `port`: that says its port, too."""
    try:
        parts = urlsplit(url)
        said = parts.port  # ValueError for one that is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and (bool(said) or not port)


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
