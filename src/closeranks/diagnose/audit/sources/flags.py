"""Command lines of SGLang and vLLM as flags, under one set of names. Secrets are dropped here, before anything else."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from closeranks.diagnose.audit.model import ON, Engine
from closeranks.evidence.redact import redact

HIDDEN = "***"
_SECRET = re.compile(r"key|token$|secret|passw|credential", re.IGNORECASE)
_PROGRAM = re.compile(
    r"sglang\.launch_server|dynamo\.(?:sglang|vllm)\b|sglang[._ ]serve\b|"
    r"vllm\.entrypoints|\bvllm[ \"',]+serve\b|(^|/)sglang$|(^|/)vllm$"
)
_MODULE = re.compile(
    r"(?:(sglang)\.(?:launch_server|srt\.entrypoints\.\w+)|(vllm)\.entrypoints\.[\w.]+|dynamo\.(sglang|vllm))"
)
_READERS = {
    *("grep", "egrep", "fgrep", "zgrep", "rg", "ag", "pgrep", "pkill", "ps", "watch", "awk", "sed", "echo", "printf"),
    *("vi", "vim", "nvim", "nano", "emacs", "less", "more", "cat", "bat", "tail", "head", "man", "which", "diff"),
}
"""Programs whose words may be a server's command line without starting one."""
_OTHER_IMAGE = re.compile(r"router|gateway|proxy|bench|frontend|exporter|\bui\b|\bsmg\b")
_USAGE = re.compile(r"\[options\]|^\s*(Example|[Uu]sage):|Warning: ")
_UNTOLD = "<redacted>"
"""What SGLang 0.5.23 shows in place of some secrets, also of those that were not given."""

ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "model": "model-path",
    "tokenizer": "tokenizer-path",
    "enable-hicache": "enable-hierarchical-cache",
    "max-model-len": "context-length",
    "block-size": "page-size",
    "optimistic-prefill-retries": "optimistic-prefill-attempts",
}
DEFAULTS: dict[str, dict[str, str]] = {
    "sglang": {
        "tp-size": "1",
        "pp-size": "1",
        "disaggregation-mode": "null",
        "disaggregation-transfer-backend": "mooncake",
        "disaggregation-bootstrap-port": "8998",
        "hicache-storage-prefetch-policy": "timeout",
        "hicache-write-policy": "write_through",
        "watchdog-timeout": "300",
        "kv-cache-dtype": "auto",
        "host": "127.0.0.1",
        "port": "30000",
    },
    "vllm": {"tp-size": "1", "pp-size": "1", "kv-cache-dtype": "auto", "port": "8000"},
}


def engine_kind(words: Sequence[str]) -> str:
    """`sglang`, `vllm` or `` for a command line or a piece of one."""
    text = " ".join(words)
    if re.search(r"\bsglang\b|sgl_|sglang\.", text):
        return "sglang"
    return "vllm" if re.search(r"\bvllm\b", text) else ""


def program(words: Sequence[str]) -> tuple[str, int] | None:
    """The kind of the engine that these words start and where its program stands; None where they start none.

    A word that only speaks of a server (what `grep` looks for, a log that `tail` shows) starts none, nor do a router
    and a benchmark.
    """
    for at, word in enumerate(words):
        base = word.rpartition("=")[2].rsplit("/", 1)[-1]
        before = words[at - 1] if at else ""
        kind = ""
        module = _MODULE.fullmatch(word)
        if module and (not at or re.fullmatch(r"-\w*m", before)):
            kind = module[module.lastindex or 0]
        elif base in ("sglang", "vllm") and words[at + 1 : at + 2] == ["serve"]:
            kind = base
        elif word.endswith(("sglang/launch_server.py", "vllm/entrypoints/openai/api_server.py")):
            kind = "sglang" if "sglang" in word else "vllm"
        if kind:
            return None if speaks(words[:at]) else (kind, at)
    return None


def speaks(words: Sequence[str]) -> bool:
    """Whether a program is among the words for which what follows is no command but something to find or to show."""
    return any(word.rsplit("/", 1)[-1] in _READERS for word in words)


def image_kind(image: str) -> str:
    """The engine whose server an image starts by itself, or `` (also for images of routers and benchmarks)."""
    name = image.partition("@")[0].rsplit("/", 1)[-1].partition(":")[0]
    dynamo = "dynamo" in image  # its tags count its own releases
    return "" if dynamo or _OTHER_IMAGE.search(name) else engine_kind([image])


_ONLY = {
    "sglang": {
        *("tp", "tp-size", "pp-size", "mem-fraction-static", "chunked-prefill-size", "disaggregation-mode"),
        *(
            "watchdog-timeout",
            "enable-hierarchical-cache",
            "enable-hicache",
            "cuda-graph-max-bs",
            "max-running-requests",
        ),
    },
    "vllm": {
        *("tensor-parallel-size", "pipeline-parallel-size", "gpu-memory-utilization", "max-num-seqs", "max-model-len"),
        *("kv-transfer-config", "enforce-eager", "enable-auto-tool-choice", "max-num-batched-tokens"),
    },
}


def kind_by_flags(words: Sequence[str]) -> str:
    """The engine that alone knows some of these flags, or `` when none or both do."""
    given = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    kinds = [kind for kind, flags in _ONLY.items() if given & flags]
    return kinds[0] if len(kinds) == 1 else ""


def is_command_line(text: str) -> bool:
    """Whether a line starts an engine. One of usage, such as SGLang logs, does not."""
    if _USAGE.search(text):
        return False
    return bool(_PROGRAM.search(text)) or bool(re.search(r"^\s*(sglang|vllm)==\S+\s+--", text))


def split_line(line: str) -> list[str]:
    """Words of a shell line; an unbalanced quote does not raise, its line is split at blanks."""
    try:
        return shlex.split(line, comments=False)
    except ValueError:
        return line.split()


def parse(words: Sequence[str], label: str, env: Mapping[str, str] | None = None) -> Engine:
    """An engine from its words: `KEY=VALUE` in front, a program or `sglang==0.5.14`, then flags.

    `--flag value`, `--flag=value` and bare `--flag` are understood; underscores become dashes; a repeated flag keeps
    its last value, as argparse does. Values of secret flags are replaced by `***`.
    """
    started = program(words)
    kind, version = started[0] if started else engine_kind(words), None
    environment, flags = dict(env or {}), {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if started and position <= started[1] and word.startswith("-"):
            continue  # of docker, numactl, torchrun...
        if match := re.fullmatch(r"(sglang|vllm)==(\S+)", word):
            kind, version = match[1], match[2]
        elif not word.startswith("-"):
            if match := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", word, re.DOTALL):
                environment[match[1]] = match[2]
            elif words[position - 2 : position - 1] == ["serve"] and kind == "vllm":
                flags["model-path"] = word
        elif word != "-m":  # python's own: the module is what follows
            name, given, value = word.lstrip("-").partition("=")
            if not given and position < len(words) and _is_value(words[position]):
                value = words[position]
                position += 1
            flags[normal(name)] = value if given or value else ON
    if started is None or not words[started[1]].startswith("dynamo."):
        return make(kind, label, flags, environment, version)
    for flag, role in (("is-prefill-worker", "prefill"), ("is-decode-worker", "decode")):
        if flag in flags:
            flags.setdefault("disaggregation-mode", role)
    return replace(make(kind, label, flags, environment, version), front="dynamo")


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(re.fullmatch(r"-\d+(\.\d+)?", word))


def normal(name: str) -> str:
    """The one name of a flag."""
    name = name.strip().lower().replace("_", "-")
    return ALIASES.get(name, name)


def hide(name: str, value: str) -> str:
    """The value, unless the name says that it is a secret."""
    plural = name.endswith("-tokens") or name.endswith("_tokens")
    secret = _SECRET.search(name) and not plural and value not in ("", ON, "false", _UNTOLD)
    return HIDDEN if secret else redact(value)


def make(
    kind: str, label: str, flags: Mapping[str, str], env: Mapping[str, str] | None = None, version: str | None = None
) -> Engine:
    """An engine with vLLM's KV connector read into the PD role, defaults of its kind, and no secret in it."""
    shown = {name: hide(name, value) for name, value in flags.items()}
    if kind == "vllm":
        shown |= _kv_transfer(shown.get("kv-transfer-config", ""))
    return Engine(
        label,
        kind,
        version,
        shown,
        {name: hide(name, value) for name, value in (env or {}).items()},
        DEFAULTS.get(kind, {}),
    )


def _kv_transfer(text: str) -> dict[str, str]:
    """vLLM's `--kv-transfer-config` JSON as role and connector; unreadable JSON is left to vLLM's own error."""
    try:
        config = json.loads(text) if text else {}
    except ValueError:
        return {}
    if not isinstance(config, dict) or "kv_connector" not in config:
        return {}
    role = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}.get(str(config.get("kv_role")), "")
    return {"disaggregation-mode": role, "kv-connector": str(config["kv_connector"])}


def from_json(data: Mapping[str, object], label: str) -> Engine | None:
    """An engine from `/server_info` (SGLang: the server arguments; vLLM: `vllm_config`), or None."""
    arguments = data.get("server_args") if isinstance(data.get("server_args"), dict) else data
    if not isinstance(arguments, Mapping):
        return None
    if "vllm_config" in data or "vllm_env" in data:
        return _from_vllm_info(data, label)
    if not {"model_path", "tp_size"} <= arguments.keys():
        return None
    flags = {}
    for name, value in arguments.items():
        if value is None or value is False or isinstance(value, (dict, list)):
            continue
        flags[normal(str(name))] = ON if value is True else str(value)
    version = data.get("version") or arguments.get("version")
    return make("sglang", label, flags, version=str(version) if version else None)


def _from_vllm_info(data: Mapping[str, object], label: str) -> Engine:
    """vLLM's `/server_info` prints its configuration as text: only what is plainly there is taken."""
    text = str(data.get("vllm_config", ""))
    flags = {}
    for name, flag in (
        ("model", "model-path"),
        ("tensor_parallel_size", "tp-size"),
        ("kv_cache_dtype", "kv-cache-dtype"),
    ):
        if match := re.search(rf"\b{name}='?([^',)]+)", text):
            flags[flag] = match[1]
    env = data.get("vllm_env")
    shown = {str(k): str(v) for k, v in env.items()} if isinstance(env, Mapping) else {}
    return make("vllm", label, flags, shown)
