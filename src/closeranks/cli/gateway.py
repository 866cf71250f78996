"""`closeranks gateway`: the HTTP side alone, joined to engines that run elsewhere."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from closeranks import faults
from closeranks.cli import _service, _settings
from closeranks.cli.serve import (
    check_endpoint,
    check_key,
    check_model,
    check_port,
    convert,
    default_run_dir,
    locked,
    model_name,
)
from closeranks.gateway.settings import Settings as GatewaySettings
from closeranks.output import fill_standard
from closeranks.supervise.engine import Program
from closeranks.supervise.service import write_settings

HELP = "answer OpenAI clients for engines that run elsewhere (--prefill … --decode …, or --both …)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _settings.add_flags(parser, _service.gateway_options())


def run(args: argparse.Namespace) -> int:
    fill_standard()
    try:
        _service.warn_of_strangers("gateway")
        own, values = _service.split(_service.Gateway, _settings.gather(args, _service.gateway_options()))
        endpoints = [e for name in ("prefill", "decode", "both") for e in values.get(name, [])]
        addresses = [values.get("host", "127.0.0.1"), *endpoints]
        faults.admit(values.get("fault", []), addresses, own.allow_faults, ranks={}, gateway=True)
        _check(values)
        folder = Path(own.run_dir or default_run_dir(values.get("port", 8000), "gateway")).absolute()
        with locked(folder):
            path = _write(values, folder)
            # the lock's file stays open over the exec, so that the gateway holds the folder
            os.execv(sys.executable, [sys.executable, "-m", "closeranks.gateway", str(path)])
    except (_settings.SettingsError, faults.FaultSpecError) as error:
        print(f"closeranks gateway: {error}", file=sys.stderr)
        return 2


def _check(values: dict[str, Any]) -> None:
    """What the gateway would end with, or never be let in for. Raises SettingsError."""
    for name in ("prefill", "decode", "both"):
        for endpoint in values.get(name, []):
            check_endpoint(f"--{name}", endpoint)
            if endpoint.startswith("tcp://") and not values.get("curve_key_file"):
                said = f"--{name} {endpoint} needs --curve-key-file: that of the engines"
                raise _settings.SettingsError(said)
    if values.get("curve_key_file"):
        check_key(values["curve_key_file"])
    check_port(values.get("host", "127.0.0.1"), values.get("port", 8000))


def _write(values: dict[str, Any], folder: Path) -> Path:
    if not values.get("model_dir"):
        values["model_dir"] = convert(values, 1)
        values["served_model_name"] = values.get("served_model_name") or model_name(values.get("model_path", ""))
        check_model(values)
    settings = _settings.only(GatewaySettings, values | {"run_dir": str(folder)})
    try:
        GatewaySettings(**settings)
    except (TypeError, ValueError) as error:
        raise _settings.SettingsError(str(error)) from error
    return write_settings(folder, Program("gateway", "closeranks.gateway", settings))
