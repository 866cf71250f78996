"""Flags, environment variables and a YAML file for every field of the parts' `Settings` structs.

The structs are the single source: a field's name, type, default and docstring make its flag (`--page-size`), its
variable (`CLOSERANKS_PAGE_SIZE`), its YAML key (`page-size` or `page_size`) and its help text. Precedence: flag,
variable, file, default. Where SGLang or vLLM know the setting under another name, that name is the flag (`FLAGS`).
However a flag is spelled, so is its variable and its key; the field's own name is good for both, too.
"""

import argparse
import ast
import difflib
import fnmatch
import inspect
import os
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import yaml

# field -> flag as SGLang and vLLM spell it
FLAGS = {
    "chunk": "--chunked-prefill-size",
    "max_running": "--max-running-requests",
    "transfer_backend": "--disaggregation-transfer-backend",
}
# field (a bool that is on by default) -> the flag that turns it off
OFF_FLAGS = {"overlap": "--disable-overlap-schedule", "radix": "--disable-radix-cache"}


class SettingsError(ValueError):
    """A setting is unknown or has a value of the wrong type. The text names the setting, its source and the type."""


class Option(msgspec.Struct, frozen=True):
    """One setting as the command line sees it."""

    name: str
    type: Any
    default: Any
    help: str
    prefix: str = "CLOSERANKS_"

    @property
    def flag(self) -> str:
        return FLAGS.get(self.name) or OFF_FLAGS.get(self.name) or "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> dict[str, bool]:
        """Names under which the setting is known, written with `_`, and whether one turns its meaning round."""
        found = {self.name: False, self.flag.removeprefix("--").replace("-", "_"): self.name in OFF_FLAGS}
        if self.type is bool and self.name not in OFF_FLAGS:
            found["no_" + self.name] = True
        return found

    @property
    def variables(self) -> dict[str, bool]:
        """The same of its environment variables."""
        return {self.prefix + name.upper(): opposite for name, opposite in self.spellings.items()}


def options(
    structs: Iterable[type[msgspec.Struct]], leave_out: frozenset[str], prefix: str = "CLOSERANKS_"
) -> list[Option]:
    """The settings of several structs, each name once (a name means the same everywhere), in order of appearance.

    `prefix`: of their variables; a command whose names mean something else than those of `serve` has its own.
    """
    found: dict[str, Option] = {}
    for struct in structs:
        docs = _field_docs(struct)
        for field in msgspec.structs.fields(struct):
            if field.name in leave_out or field.name in found:
                continue
            default = field.default_factory() if callable(field.default_factory) else field.default
            found[field.name] = Option(field.name, field.type, default, docs.get(field.name, ""), prefix)
    return list(found.values())


def add_flags(parser: argparse.ArgumentParser, known: Iterable[Option]) -> None:
    """One flag an option; absent flags leave nothing in the namespace, so that lower sources show through."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings (keys as in this list)")
    for option in known:
        text = option.help.replace("%", "%%")
        if option.name in OFF_FLAGS:
            text = "turns this off: " + text
        if choices := _choices(option.type):
            text += f" One of {', '.join(choices)}."
        if option.default is not msgspec.NODEFAULT and option.name not in OFF_FLAGS:
            text += f" (default: {option.default!r})".replace("%", "%%")
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
        if option.name in OFF_FLAGS:
            parser.add_argument(option.flag, action="store_const", const=False, **common)
        elif option.type is bool:
            parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
        elif _is_list(option.type):
            parser.add_argument(option.flag, nargs="+", action="extend", **common)
        else:
            parser.add_argument(option.flag, **common)


def gather(
    args: argparse.Namespace,
    known: Sequence[Option],
    environment: Mapping[str, str] = os.environ,
    elsewhere: Sequence[Option] = (),
) -> dict[str, Any]:
    """The values that were set anywhere, by name, converted to their types.

    `elsewhere`: settings of other commands that read the same file; its keys may be theirs.
    Raises SettingsError for an unknown key in the file, for a setting that one source gives twice and for a value that
    does not convert, naming its source.
    """
    path = getattr(args, "config", None) or environment.get(known[0].prefix + "CONFIG")
    values = _from_file(path, known, elsewhere) if path else {}
    for option in known:
        given = [variable for variable in option.variables if variable in environment]
        if len(given) > 1:
            raise SettingsError(f"{' and '.join(given)} are one setting: give one of them")
        for variable in given:
            raw: Any = environment[variable]
            if _is_list(option.type):
                raw = raw.split()
            values[option.name] = _convert(option, raw, variable, option.variables[variable])
        if hasattr(args, option.name):
            values[option.name] = _convert(option, getattr(args, option.name), option.flag)
    return values


def warn_of_strangers(
    command: str, known: Sequence[Option], elsewhere: Iterable[str] = (), environment: Mapping[str, str] = os.environ
) -> None:
    """Say on standard error which variables with our prefix are no setting: a mistyped one does nothing.

    `elsewhere`: patterns (`NAME_*`) of names that mean something to others.
    """
    prefix = known[0].prefix
    names = [prefix + "CONFIG", *(variable for option in known for variable in option.variables)]
    for variable in sorted(environment):
        if not variable.startswith(prefix) or variable in names:
            continue
        if not any(fnmatch.fnmatchcase(variable, pattern) for pattern in elsewhere):
            said = f"{variable} is no setting and does nothing{_nearest(variable, names)}"
            print(f"closeranks {command}: {said}", file=sys.stderr)


def only(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that belongs to a struct."""
    names = {field.name for field in msgspec.structs.fields(struct)}
    return {name: value for name, value in values.items() if name in names}


def _from_file(path: str, known: Iterable[Option], elsewhere: Iterable[Option]) -> dict[str, Any]:
    by_spelling = {name: option for option in known for name in option.spellings}
    others = {name: option for option in elsewhere for name in option.spellings if name not in by_spelling}
    values: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for key, value in _read_yaml(path):
        spelling = str(key).replace("-", "_")
        if spelling in others:  # it does nothing here, and must be right all the same
            _convert(others[spelling], value, f"{path}: {key}", others[spelling].spellings[spelling])
            continue
        if spelling not in by_spelling:
            said = f"{path}: unknown setting {key!r}{_nearest(spelling, list(by_spelling))}"
            raise SettingsError(f"{said}; `--help` lists the settings")
        option = by_spelling[spelling]
        if option.name in keys:
            raise SettingsError(f"{path}: {keys[option.name]} and {key} are one setting: give one of them")
        keys[option.name] = key
        values[option.name] = _convert(option, value, f"{path}: {key}", option.spellings[spelling])
    return values


def _read_yaml(path: str) -> list[tuple[Any, Any]]:
    """Keys and values as the file has them, also those that it has twice."""
    try:
        with open(path) as file:
            loader = yaml.SafeLoader(file)
            try:
                node = loader.get_single_node()
                if node is None:
                    return []
                if not isinstance(node, yaml.MappingNode):
                    found = type(loader.construct_document(node)).__name__
                    raise SettingsError(f"{path}: expected `name: value` lines, found a {found}")
                loader.flatten_mapping(node)
                construct = partial(loader.construct_object, deep=True)
                return [(construct(key), construct(value)) for key, value in node.value]
            finally:
                loader.dispose()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: nested too deeply for settings") from error


def _convert(option: Option, value: Any, source: str, opposite: bool = False) -> Any:
    choices = _choices(option.type)
    if value is None and "null" in choices:  # as YAML reads the word
        value = "null"
    try:
        found = msgspec.convert(value, option.type, strict=False)
    except msgspec.ValidationError as error:
        choices = choices or (["true", "false"] if option.type is bool else [])
        said = f" (one of {', '.join(choices)})" if choices else ""
        raise SettingsError(f"{source}: {error}{said}") from error
    return not found if opposite else found


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f" (do you mean {found[0]}?)" if found else ""


def _choices(kind: Any) -> list[str]:
    """The values of a setting that has a few only."""
    few = typing.get_origin(kind) is typing.Literal
    return [str(value) for value in typing.get_args(kind) if value != ""] if few else []


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", kind) in (list, tuple)


@cache
def _field_docs(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """The string under each field, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs
