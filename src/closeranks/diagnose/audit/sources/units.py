"""systemd units, containers of compose and Kubernetes files, shell files and logs: where command lines are found."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from closeranks.diagnose.audit.model import Engine
from closeranks.diagnose.audit.sources import flags

_SERVER_ARGS = re.compile(r"server_args=(?:ServerArgs\(|\{(?='))(.*)[)}]\s*$")
_ARGUMENT = re.compile(r"(\w+)(?:=|': )('(?:[^'\\]|\\.)*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|[^,()]+)(?:, |$)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*)")
_ITEM = re.compile(r"'(\w+)': ('[^']*'|[\d.]+|True)")
_KV = re.compile(r"kv_(connector|role)='(\w+)'")
_VLLM_VERSION = re.compile(r"(?:vLLM (?:API server )?|[█▀▄] +)version (\d\S*)")  # newer ones print a banner
_TAG = re.compile(r"(sglang|vllm)[^:/\s]*:v?(\d+\.\d+[^\s\"']*)")


def from_unit(text: str, label: str) -> list[Engine]:
    """The engine that a systemd unit starts; [] when it starts none."""
    directives: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        name, given, value = line.partition("=")
        if given and not line.lstrip().startswith(("#", ";", "[")):
            directives.setdefault(name.strip().lower(), []).append(value.strip())
    env: dict[str, str] = {}
    for value in directives.get("environment", []):
        for word in flags.split_line(value):
            name, given, content = word.partition("=")
            if given:
                env[name] = content
    started = [line for line in directives.get("execstart", []) if flags.is_command_line(line)]
    unit = {name: tuple(values) for name, values in directives.items() if name not in ("execstart", "environment")}
    unit["execstart"] = tuple("" for _ in started)  # its words are in the engine's flags, without secrets
    complete = "environmentfile" not in directives
    engines = [flags.parse(flags.split_line(line.lstrip("-@:+!")), label, env) for line in started]
    return [replace(engine, unit=unit, complete_env=complete) for engine in engines]


def from_yaml(text: str, label: str) -> list[Engine]:
    """Engines in a compose file or in Kubernetes manifests; [] when there are none, or it is no YAML."""
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        return []
    engines = []
    for document in documents:
        for name, container, shared in _containers(document):
            engine = _container(name, container, shared, label)
            if engine is not None:
                engines.append(engine)
    return engines


def _containers(document: Any) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    if not isinstance(document, Mapping):
        return
    services = document.get("services")
    if isinstance(services, Mapping):
        for name, service in services.items():
            if isinstance(service, Mapping):
                yield str(name), service, {"restart": str(service.get("restart", ""))}
        return
    pending: list[Any] = [document]
    while pending:
        here = pending.pop()
        if isinstance(here, Mapping):
            found = here.get("containers")
            for container in found if isinstance(found, list) else []:
                if isinstance(container, Mapping):
                    yield (
                        str(container.get("name", "?")),
                        container,
                        {"restart": str(here.get("restartPolicy", "Always"))},
                    )
            pending += here.values()
        elif isinstance(here, list):
            pending += here


def _container(name: str, container: Mapping[str, Any], shared: Mapping[str, str], label: str) -> Engine | None:
    words = [*_words(container.get("entrypoint")), *_words(container.get("command")), *_words(container.get("args"))]
    if len(words) == 3 and words[1] == "-c":
        words = flags.split_line(words[2])
    image = str(container.get("image", ""))
    if not flags.engine_kind([*words, image]) or not any(word.startswith("--") for word in words):
        return None
    environment = container.get("environment") or container.get("env") or {}
    env = _environment(environment)
    engine = flags.parse(words, f"{label}: {name}", env)
    tag = _TAG.search(image)
    security = _mapping(container.get("securityContext"))
    caps = [*_words(container.get("cap_add")), *_words(_mapping(security.get("capabilities")).get("add"))]
    privileged = container.get("privileged") or security.get("privileged")
    return replace(
        flags.make(engine.kind or flags.engine_kind([image]), engine.label, engine.flags, engine.env, engine.version),
        version=engine.version or (tag[2].split("-")[0] if tag else None),
        container={"cap_add": " ".join(caps), "privileged": str(bool(privileged)).lower(), **shared},
        complete_env="env_file" not in container and "envFrom" not in container,
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return flags.split_line(value)
    return [str(word) for word in value] if isinstance(value, list) else []


def _environment(given: Any) -> dict[str, str]:
    if isinstance(given, Mapping):
        return {str(name): str(value) for name, value in given.items()}
    env = {}
    for item in given if isinstance(given, list) else []:
        if isinstance(item, Mapping):
            env[str(item.get("name"))] = str(item.get("value", ""))
        else:
            name, _, value = str(item).partition("=")
            env[name] = value
    return env


def from_text(text: str, label: str) -> list[Engine]:
    """Engines in a shell file, a list of flags, a `ps` listing or a log.

    SGLang logs `server_args=ServerArgs(...)` or a dictionary; vLLM its version and `non-default args: {...}`.
    """
    version = _VLLM_VERSION.search(text)
    joined = re.sub(r"\\\n\s*", " ", text)
    env = {}
    engines, logs = [], dict[object, Engine]()
    for line in joined.splitlines():
        if exported := re.fullmatch(r"\s*(?:export\s+)?([A-Z_][A-Z0-9_]*)=(\S*)\s*", line):
            env[exported[1]] = exported[2].strip("'\"")
        elif logged := _SERVER_ARGS.search(line):
            found = {name: value.strip("'\"") for name, value in _ARGUMENT.findall(logged[1])}
            given = {
                flags.normal(k): "true" if v == "True" else v for k, v in found.items() if v not in ("None", "False")
            }
            engine = flags.make("sglang", label, given, env)
            logs[engine.flag("host"), engine.flag("port"), engine.role] = engine  # of several lives the last one
        elif logged := _NON_DEFAULT.search(line):
            engines.append(_from_vllm_log(logged[1], label, env, version[1] if version else None))
        elif flags.is_command_line(line):
            engines.append(flags.parse(flags.split_line(line), label, env))
        elif line.lstrip().startswith("--") and not engines:
            words = flags.split_line(line)
            engine = flags.parse(words, label, env)
            engines.append(flags.make(engine.kind or flags.kind_by_flags(words), label, engine.flags, env))
    return [*engines, *logs.values()]


def _from_vllm_log(logged: str, label: str, env: Mapping[str, str], version: str | None) -> Engine:
    given = {flags.normal(name): "true" if v == "True" else v.strip("'") for name, v in _ITEM.findall(logged)}
    given["model-path"] = given.pop("model-tag", given.get("model-path", ""))
    transfer = {f"kv_{name}": value for name, value in _KV.findall(logged)}
    if transfer:
        given["kv-transfer-config"] = json.dumps(transfer)
    return flags.make("vllm", label, {name: value for name, value in given.items() if value}, env, version)
