"""One struct field makes a flag, a variable and a YAML key; flag beats variable beats file beats default."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from closeranks.cli import _settings, watch


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
    [("pagesize: 1", "unknown setting 'pagesize'"), ("page_size: many", "page_size"), ("[1]", "found a list")],
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
