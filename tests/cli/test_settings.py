"""One struct field makes a flag, a variable and a YAML key; flag beats variable beats file beats default."""

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from closeranks.cli import _recover, _service, _settings, gateway, main, recover, serve, top, watch


class Part(msgspec.Struct):
    run_dir: str
    page_size: int = 16
    """Tokens in a page."""
    overlap: bool = True
    """Issue a step before the last one is reported."""
    verbose: bool = False
    names: list[str] = []
    share: float = 0.5


OPTIONS = _settings.options([Part], frozenset({"run_dir"}))


def settle(argv: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    _settings.add_flags(parser, OPTIONS)
    return _settings.gather(parser.parse_args(argv), OPTIONS, environment or {})


def test_left_out_fields_have_no_flag() -> None:
    assert [o.name for o in OPTIONS] == ["page_size", "overlap", "verbose", "names", "share"]


def test_docstring_is_the_help() -> None:
    assert OPTIONS[0].help == "Tokens in a page."


def test_nothing_set_gives_nothing() -> None:
    assert settle([]) == {}


def test_a_command_s_variables_may_have_a_prefix_of_their_own() -> None:
    """`serve` and `watch` both have a port; a host that sets one for `serve` does not move the other's."""
    known = watch._OPTIONS
    args = argparse.Namespace()
    assert _settings.gather(args, known, {"CLOSERANKS_PORT": "8000"}) == {}
    assert _settings.gather(args, known, {"CLOSERANKS_WATCH_PORT": "8000"}) == {"port": 8000}


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("page-size: 1\nshare: 0.1\nnames: [a]\n")
    assert settle(["--config", str(file)]) == {"page_size": 1, "share": 0.1, "names": ["a"]}
    assert settle(["--config", str(file)], {"CLOSERANKS_PAGE_SIZE": "2"})["page_size"] == 2
    assert settle(["--config", str(file), "--page-size", "3"], {"CLOSERANKS_PAGE_SIZE": "2"})["page_size"] == 3


def test_switches() -> None:
    assert settle(["--disable-overlap-schedule", "--verbose"]) == {"overlap": False, "verbose": True}
    assert settle([], {"CLOSERANKS_OVERLAP": "false", "CLOSERANKS_NAMES": "a b"}) == {
        "overlap": False,
        "names": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pagesize: 1", r"unknown setting 'pagesize' \(do you mean page_size\?\)"),
        ("page_size: many", "page_size"),
        ("[1]", "found a list"),
        ("page_size: 1\npage-size: 2", "page_size and page-size are one setting"),
        ("page_size: 1\npage_size: 2", "page_size and page_size are one setting"),
        ("overlap: true\ndisable-overlap-schedule: true", "overlap and disable-overlap-schedule are one setting"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(_settings.SettingsError, match=says) as caught:
        settle(["--config", str(file)])
    assert str(file) in str(caught.value)


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(_settings.SettingsError, match="CLOSERANKS_SHARE"):
        settle([], {"CLOSERANKS_SHARE": "half"})
    with pytest.raises(_settings.SettingsError, match=r"CLOSERANKS_VERBOSE: .* \(one of true, false\)"):
        settle([], {"CLOSERANKS_VERBOSE": "yes"})


def test_a_setting_that_two_variables_give_is_refused() -> None:
    with pytest.raises(_settings.SettingsError, match="CLOSERANKS_OVERLAP and CLOSERANKS_DISABLE_OVERLAP_SCHEDULE"):
        settle([], {"CLOSERANKS_OVERLAP": "0", "CLOSERANKS_DISABLE_OVERLAP_SCHEDULE": "1"})


COMMANDS = {"serve": (serve, _service.serve_options()), "gateway": (gateway, _service.gateway_options())}
NO_SETTINGS = {"--help", "-h", "--config", "--dry-run"}
"""Flags that say what this call of the command is to do, or where settings are."""


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    COMMANDS[command][0].add_arguments(parser)
    return parser


FLAGS = [
    (command, flag, action)
    for command in COMMANDS
    for action in parser_of(command)._actions
    for flag in action.option_strings
    if flag not in NO_SETTINGS
]


def texts_for(option: _settings.Option) -> list[str]:
    """Values that the setting can have, as a flag has them; its first that will do, and all of one of few values."""
    if few := _settings._choices(option.type):
        return few
    for text in ("7", "cpu"):
        try:
            _settings._convert(option, [text] if _settings._is_list(option.type) else text, "test")
        except _settings.SettingsError:
            continue
        return [text]
    raise AssertionError(f"no value for {option}")


@pytest.mark.parametrize(("command", "flag", "action"), FLAGS, ids=lambda p: p if isinstance(p, str) else "")
def test_every_flag_is_a_variable_and_a_key_under_its_own_spelling(
    command: str, flag: str, action: argparse.Action, tmp_path: Path
) -> None:
    """Of all flags that the parsers have, so that none can be added without."""
    options = COMMANDS[command][1]
    option = next(o for o in options if o.name == action.dest)
    file = tmp_path / "c.yaml"
    switch = action.nargs == 0
    for text in ["true"] if switch else texts_for(option):
        wanted = _settings.gather(parser_of(command).parse_args([flag] if switch else [flag, text]), options, {})
        assert list(wanted) == [option.name]
        name = flag.removeprefix("--")
        variable = {"CLOSERANKS_" + name.upper().replace("-", "_"): text}
        assert _settings.gather(parser_of(command).parse_args([]), options, variable) == wanted
        for key in (name, name.replace("-", "_")):
            number = isinstance(wanted[option.name], int | float)
            value = [text] if isinstance(wanted[option.name], list) else text
            file.write_text(f"{key}: {text if number or text == 'null' else json.dumps(value)}\n")
            args = parser_of(command).parse_args(["--config", str(file)])
            assert _settings.gather(args, options, {}) == wanted


def test_a_switch_that_is_set_to_false_means_the_opposite(tmp_path: Path) -> None:
    options = COMMANDS["serve"][1]
    assert _settings.gather(argparse.Namespace(), options, {"CLOSERANKS_DISABLE_RADIX_CACHE": "0"}) == {"radix": True}
    assert _settings.gather(argparse.Namespace(), options, {"CLOSERANKS_NO_SPARES": "false"}) == {"spares": True}


def test_variables_and_keys_of_a_command_s_own_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not only read: the processes are as many."""
    file = tmp_path / "c.yaml"
    monkeypatch.setenv("CLOSERANKS_TP_SIZE", "2")
    with tempfile.TemporaryDirectory() as folder:  # a short path, for sockets in it
        file.write_text(f"disaggregation-mode: prefill\nrun_dir: {json.dumps(folder)}\n")
        assert main.main(["serve", "--dry-run", "--config", str(file)]) == 0
        assert (Path(folder) / "lock").exists()
    found = json.loads(capsys.readouterr().out)["processes"]
    assert {name: [p["name"] for p in processes] for name, processes in found.items()} == {
        "prefill": ["leader", "rank0", "rank1"]
    }


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_mistyped_variable_is_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {
        "CLOSERANKS_PROT": "1",
        "CLOSERANKS_TP_SIZE": "2",  # of `serve`, and good for a whole host
        "CLOSERANKS_CHUNKED_PREFILL_SIZE": "64",
        "CLOSERANKS_WATCH_PORT": "1",
        "CLOSERANKS_CONFIG": "c.yaml",
        "HOME": "/",
    }
    _service.warn_of_strangers(command, environment)
    said = capsys.readouterr().err
    assert said == (
        f"closeranks {command}: CLOSERANKS_PROT is no setting and does nothing (do you mean CLOSERANKS_PORT?)\n"
    )


@pytest.mark.parametrize("command", [watch, recover, top])
def test_one_file_serves_all_commands_that_watch(
    command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "watch.yaml"
    file.write_text('url: ["http://127.0.0.1:30000"]\nready-s: 900\nprobe: never\nport: 9410\ninterval: 0.5\n')
    monkeypatch.setenv("CLOSERANKS_WATCH_CONFIG", str(file))
    monkeypatch.setenv("CLOSERANKS_WATCH_COOLDOWN_S", "60")  # of recovery
    monkeypatch.setenv("CLOSERANKS_WATCH_PROBE", "always")
    monkeypatch.setenv("CLOSERANKS_WATCH_REDY_S", "5")
    found = _recover.values_of("x", argparse.Namespace(), command._OPTIONS)
    wanted = {"url": ("http://127.0.0.1:30000",), "ready_s": 900, "probe": "always", "port": 9410, "interval": 0.5,
              "cooldown_s": 60}  # fmt: skip
    names = {option.name for option in command._OPTIONS}
    assert found == {name: value for name, value in wanted.items() if name in names}
    assert len(found) in (2, 6)  # recovery's, top's; the watch's
    assert capsys.readouterr().err == (
        "closeranks x: CLOSERANKS_WATCH_REDY_S is no setting and does nothing (do you mean CLOSERANKS_WATCH_READY_S?)\n"
    )
    file.write_text("ready: 900\n")
    with pytest.raises(_settings.SettingsError, match="unknown setting 'ready'"):
        _recover.values_of("x", argparse.Namespace(), command._OPTIONS)
