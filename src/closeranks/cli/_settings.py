"""Flags, environment variables and a YAML file for every field of the parts' `Settings` structs.

The structs are the single source: a field's name, type, default and docstring make its flag (`--page-size`), its
variable (`CLOSERANKS_PAGE_SIZE`), its YAML key (`page_size`) and its help text. Precedence: flag, variable, file,
default. Where SGLang or vLLM know the setting under another name, that name is the flag (`FLAGS`).
"""

import argparse
import ast
import inspect
import os
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
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
    def variable(self) -> str:
        return self.prefix + self.name.upper()


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
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings (keys as in this list, with _ for -)")
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
    args: argparse.Namespace, known: Sequence[Option], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The values that were set anywhere, by name, converted to their types.

    Raises SettingsError for an unknown key in the file and for a value that does not convert, naming its source.
    """
    by_name = {option.name: option for option in known}
    values: dict[str, Any] = {}
    path = getattr(args, "config", None) or environment.get(known[0].prefix + "CONFIG")
    if path:
        for key, value in _read_yaml(path).items():
            name = str(key).replace("-", "_")
            if name not in by_name:
                raise SettingsError(f"{path}: unknown setting {key!r}; `--help` lists the settings")
            values[name] = _convert(by_name[name], value, f"{path}: {key}")
    for option in by_name.values():
        if option.variable in environment:
            raw: Any = environment[option.variable]
            if _is_list(option.type):
                raw = raw.split()
            values[option.name] = _convert(option, raw, option.variable)
        if hasattr(args, option.name):
            values[option.name] = _convert(option, getattr(args, option.name), option.flag)
    return values


def only(struct: type[msgspec.Struct], values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that belongs to a struct."""
    names = {field.name for field in msgspec.structs.fields(struct)}
    return {name: value for name, value in values.items() if name in names}


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        with open(path) as file:
            found = yaml.safe_load(file) or {}
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: nested too deeply for settings") from error
    if not isinstance(found, dict):
        raise SettingsError(f"{path}: expected `name: value` lines, found a {type(found).__name__}")
    return found


def _convert(option: Option, value: Any, source: str) -> Any:
    try:
        return msgspec.convert(value, option.type, strict=False)
    except msgspec.ValidationError as error:
        choices = _choices(option.type)
        said = f" (one of {', '.join(choices)})" if choices else ""
        raise SettingsError(f"{source}: {error}{said}") from error


def _choices(kind: Any) -> list[str]:
    """The values of a setting that has a few only."""
    few = typing.get_origin(kind) is typing.Literal
    return [str(value) for value in typing.get_args(kind) if value != ""] if few else []


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", kind) in (list, tuple)


def _field_docs(struct: type[msgspec.Struct]) -> dict[str, str]:
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
