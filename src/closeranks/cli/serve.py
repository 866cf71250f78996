"""`closeranks serve`: a prefill and a decode engine and a gateway on this host, supervised together.

`--disaggregation-mode null` serves with one engine that does both; `prefill` or `decode` starts one engine alone, for a
gateway (`closeranks gateway`) on this or another host.
"""

import argparse
import asyncio
import errno
import faulthandler
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from closeranks import faults
from closeranks.cli import _service, _settings
from closeranks.cli._output import NotWritten, write
from closeranks.engine.leader.settings import Settings as LeaderSettings
from closeranks.engine.rank.settings import Settings as RankSettings
from closeranks.gateway.engines import CurveKeyError, load_curve
from closeranks.gateway.settings import Settings as GatewaySettings
from closeranks.output import fill_standard, make_unblocking
from closeranks.supervise import lines
from closeranks.supervise.engine import Engine, Epoch, Plan, Program, State
from closeranks.supervise.service import Service

HELP = "serve a model: engines, their ranks and a gateway, supervised together"
ROLES = {"pair": ("prefill", "decode"), "null": ("both",), "prefill": ("prefill",), "decode": ("decode",)}
SOCKET_PATH_LIMIT = 107
LEAVES_S = 3.0
"""How long the processes of a service that was killed may take to leave its address."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the processes and settings, start nothing")
    _settings.add_flags(parser, _service.serve_options())


def run(args: argparse.Namespace) -> int:
    fill_standard()
    try:
        _service.warn_of_strangers("serve")
        own, values = _service.split(_service.Serve, _settings.gather(args, _service.serve_options()))
        return _serve(own, values, args.dry_run)
    except (_settings.SettingsError, faults.FaultSpecError) as error:
        print(f"closeranks serve: {error}", file=sys.stderr)
        return 2
    except NotWritten as error:
        print(f"closeranks serve: {error}", file=sys.stderr)
        return 3


def _serve(own: _service.Serve, values: dict[str, Any], dry_run: bool) -> int:
    roles = ROLES[own.disaggregation_mode]
    alone = own.disaggregation_mode in ("prefill", "decode")
    tp = {role: own.ranks(role) for role in roles}
    addresses = [values.get("host", "127.0.0.1"), *([own.control] if own.control else [])]
    faults.admit(values.get("fault", []), addresses, own.allow_faults, tp, gateway=not alone)
    if own.control and not alone:
        raise _settings.SettingsError("--control goes with --disaggregation-mode prefill or decode")
    if own.control:
        check_endpoint("--control", own.control)
    if own.control.startswith("tcp://") and not values.get("curve_key_file"):
        raise _settings.SettingsError(
            "--control tcp://… needs --curve-key-file (make one with `closeranks keygen FILE`)"
        )
    folder = Path(own.run_dir or default_run_dir(values.get("port", 8000), own.disaggregation_mode)).absolute()
    endpoints = {role: own.control or f"ipc://{folder}/{role}.sock" for role in roles}
    for endpoint in endpoints.values():
        if endpoint.startswith("ipc://") and len(os.fsencode(endpoint)) - 6 > SOCKET_PATH_LIMIT - 24:
            said = f"the path of {folder} is too long for sockets in it: give a shorter --run-dir"
            raise _settings.SettingsError(f"--control {own.control}: a path too long" if own.control else said)
    if values.get("curve_key_file"):
        check_key(values["curve_key_file"])
    if values.get("transfer_backend") == "nixl" and find_spec("nixl_cu12") is None:
        raise _settings.SettingsError(
            "--disaggregation-transfer-backend nixl: nixl_cu12 is not installed: install closeranks[nixl], or give shm"
        )
    if not alone:
        check_gateway(values)
        if not dry_run:
            check_port(values.get("host", "127.0.0.1"), values.get("port", 8000))
    if own.control and not dry_run:
        check_bind(own.control)
    if not dry_run:
        make_unblocking()
    as_json = values.get("log_format") == "json"
    lines.configure(sys.stderr, as_json)
    with locked(folder):
        stacks_on_signal(folder / "supervisor.stacks")
        (folder / faults.RECORD).unlink(missing_ok=True)  # each service begins its drills anew
        if values.get("fault"):
            structlog.get_logger().warning("drill: faults will be injected", faults=values["fault"])
        values["model_dir"] = convert(values, max(tp.values()))
        if not alone:
            check_model(values)
        first = {role: tp["prefill"] if roles == ROLES["pair"] and role == "decode" else 0 for role in roles}
        engines = [
            Engine(
                role,
                sys.executable,
                folder / role,
                plan(role, folder, endpoints[role], tp[role], values | {"first_gpu": first[role]}, own.spares),
                _say,
            )
            for role in roles
        ]
        gateway = None if alone else gateway_program(folder, endpoints, values, own.drain_s)
        if dry_run:
            show(engines, gateway)
            return 0
        service = Service(engines, gateway, sys.executable, folder, own.drain_s, None if as_json else lines.for_people)
        return asyncio.run(service.run())


def default_run_dir(port: int, mode: str) -> Path:
    """`$XDG_STATE_HOME/closeranks/PORT`: the same at the next start, so that epochs and incidents go on."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "closeranks" / (str(port) if mode in ("pair", "null") else f"{mode}-{port}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder (0700: it has the control sockets). Raises SettingsError if another service holds it."""
    with _usable(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        file = (folder / "lock").open("a+")
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise _settings.SettingsError(
                f"{folder} is in use by process {lock.read().strip() or '?'}: stop it, or give another --run-dir"
            ) from None
        os.set_inheritable(lock.fileno(), True)  # `gateway` keeps the lock over its exec
        with _usable(folder):
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        yield


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """What cannot be written to the run folder is an error of the setting. Raises SettingsError."""
    try:
        yield
    except OSError as error:
        said = f"{folder} cannot be used as run folder ({error.strerror}): make room there, or give another --run-dir"
        raise _settings.SettingsError(said) from error


def stacks_on_signal(path: Path) -> None:
    """SIGUSR1 appends the stacks of all threads to `path`. Raises SettingsError."""
    with _usable(path.parent):
        file = path.open("a")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)  # keeps the file open


def convert(values: dict[str, Any], tp_size: int) -> str:
    """The converted model's folder; converts on the first start (progress on stderr).

    Raises SettingsError with the converter's own words if the model is not there or not supported, and if it has fewer
    KV heads than `tp_size` ranks.
    """
    from closeranks.engine.rank import convert as converter

    dtype = values.get("dtype") or ("float32" if values.get("device", "cpu") == "cpu" else "bfloat16")
    try:
        found = converter.prepare(values.get("model_path", ""), values.get("cache_dir", ""), dtype)
    except (ValueError, OSError) as error:
        raise _settings.SettingsError(str(error)) from error
    if tp_size > found.config.kv_heads:
        said = f"tp_size {tp_size} is more than the model's {found.config.kv_heads} KV heads: a rank would hold none"
        raise _settings.SettingsError(said)
    return str(found.path)


def plan(role: str, folder: Path, endpoint: str, tp_size: int, values: dict[str, Any], spares: bool = True) -> Plan:
    """How one engine's processes are started in each epoch."""

    def programs(epoch: Epoch, place: Path) -> list[Program]:
        shared = values | {
            "run_dir": str(folder),
            "engine": role,
            "role": role,
            "epoch": epoch.number,
            "instance": epoch.instance,
            "origin": epoch.origin,
            "ended_epoch": epoch.ended,
            "tp_size": tp_size,
            "ranks_endpoint": f"ipc://{place}/ranks.sock",
            "rendezvous": str(place),
            "endpoint": endpoint,
            "log_dir": str(place / "log"),
        }
        threads = values.get("threads") or 0
        leader = Program("leader", "closeranks.engine.leader", _settings.only(LeaderSettings, shared))
        ranks = []
        for rank in range(tp_size):
            settings = _settings.only(RankSettings, shared | {"rank": rank, "threads": threads})
            ranks.append(Program(f"rank{rank}", "closeranks.engine.rank", settings, huge_pages(), spares))
        return [leader, *ranks]

    return programs


def huge_pages() -> dict[str, str]:
    """What lets a rank's weights lie in huge pages where the kernel gives them to who asks (`madvise`, the usual case).

    A decode step reads every weight once; by pages of 4 KiB it waits for the page tables (3/4 of the speed). The C
    library reads this when a process starts, so it cannot be set from within. Yours stands if you set the variable.
    """
    return {} if "GLIBC_TUNABLES" in os.environ else {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def check_gateway(values: dict[str, Any]) -> None:
    """What the gateway would end with, before anything is started. Raises SettingsError."""
    settings = _settings.only(GatewaySettings, values) | {"prefill": [], "decode": [], "both": ["-"]}
    try:
        msgspec.convert(settings | {"run_dir": "-", "model_dir": "-"}, GatewaySettings)
    except msgspec.ValidationError as error:
        raise _settings.SettingsError(str(error)) from error


def check_key(path: str) -> None:
    """Whether the key file can be used. Raises SettingsError."""
    try:
        load_curve(path)
    except CurveKeyError as error:
        raise _settings.SettingsError(f"{error} (make one with `closeranks keygen FILE`)") from error


def check_model(values: dict[str, Any]) -> None:
    """Whether the gateway can use the model's tokenizer and chat template, or the one given. Raises SettingsError."""
    from closeranks.gateway import model

    try:
        model.load(values["model_dir"], chat_template=values.get("chat_template", ""))
    except model.ModelError as error:
        given = values.get("model_path") or "the embedded model"
        raise _settings.SettingsError(f"{given} cannot be served: {error}") from error


def check_port(host: str, port: int) -> None:
    """Whether the gateway can listen there: engines take long to start. Raises SettingsError."""
    from closeranks.gateway import server

    try:
        server.bind(host, port).close()
    except (OSError, UnicodeError) as error:  # the second: no host can be called that
        said = getattr(error, "strerror", None) or f"cannot bind {host}:{port}: {error}"
        raise _settings.SettingsError(f"{said}: give another --port or --host") from error


def check_endpoint(flag: str, endpoint: str) -> None:
    """Whether it is one at which a leader can be met. Raises SettingsError."""
    kind, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if not place or kind not in ("ipc", "tcp") or (kind == "tcp" and not (host and (port == "*" or port.isdecimal()))):
        raise _settings.SettingsError(f"{flag} {endpoint}: give tcp://HOST:PORT or ipc://PATH")


def check_bind(endpoint: str) -> None:
    """Whether a leader can listen there, for other hosts; one that was killed a moment ago may still. Raises
    SettingsError."""
    if not endpoint.startswith("tcp://"):
        return
    end = time.monotonic() + LEAVES_S
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        while True:
            try:
                socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < end:
                    time.sleep(0.1)
                    continue
                said = f"cannot listen on {endpoint} ({error.strerror}): give another --control"
                raise _settings.SettingsError(said) from error


def gateway_program(folder: Path, endpoints: dict[str, str], values: dict[str, Any], drain_s: float) -> Program:
    """The gateway's process. It drains a little shorter than its supervisor waits."""
    places: dict[str, Any] = {role: [endpoint] for role, endpoint in endpoints.items()}
    places["served_model_name"] = values.get("served_model_name") or model_name(values.get("model_path", ""))
    places["drain_s"] = max(1.0, drain_s - 5.0)
    settings = _settings.only(GatewaySettings, values | {"run_dir": str(folder)} | places)
    return Program("gateway", "closeranks.gateway", settings)


def model_name(model_path: str) -> str:
    """The name of the file or folder, as users call the model."""
    from closeranks.engine.rank import convert as converter

    return converter.locate(model_path).name.removesuffix(".gguf")


def show(engines: list[Engine], gateway: Program | None) -> None:
    """`--dry-run`: one JSON object with every process that would be started. Raises NotWritten."""
    found = {}
    for engine in engines:
        programs = engine.plan(Epoch(1, 0, 0, 0), Path("EPOCH"))
        found[engine.name] = [{"name": p.name, "module": p.module, "settings": p.settings} for p in programs]
    if gateway:
        found["gateway"] = [{"name": "gateway", "module": gateway.module, "settings": _redacted(gateway.settings)}]
    write(json.dumps({"schema": 1, "processes": found}, indent=1) + "\n")


def _redacted(settings: dict[str, object]) -> dict[str, object]:
    return {k: "…" if k.endswith("api_key") and v else v for k, v in settings.items()}


def _say(engine: Engine) -> None:
    level = "error" if engine.state is State.GIVEN_UP else "info"
    getattr(structlog.get_logger(), level)("engine", engine=engine.name, state=engine.state.value)
