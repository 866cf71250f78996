"""Launch flags and environment variables of command lines, unit files and `server_args=`. Known names only."""

import re
from collections.abc import Iterable

from closeranks.diagnose.facts import Fact, Setting, Src
from closeranks.diagnose.lines import Line

# Flags that a rule or a catalog entry may ask for. Everything else, and every odd value, is dropped.
_FLAGS = frozenset(
    [
        "tp",
        "tp-size",
        "tensor-parallel-size",
        "pp",
        "pp-size",
        "pipeline-parallel-size",
        "dp",
        "dp-size",
        "data-parallel-size",
        "ep",
        "ep-size",
        "nnodes",
        "node-rank",
        "disaggregation-mode",
        "disaggregation-transfer-backend",
        "disaggregation-bootstrap-port",
        "disable-overlap-schedule",
        "enable-hierarchical-cache",
        "enable-hicache",
        "hicache-size",
        "hicache-ratio",
        "hicache-write-policy",
        "hicache-io-backend",
        "hicache-storage-backend",
        "hicache-storage-prefetch-policy",
        "enable-dp-attention",
        "disable-cuda-graph",
        "disable-custom-all-reduce",
        "chunked-prefill-size",
        "max-running-requests",
        "max-num-seqs",
        "max-model-len",
        "watchdog-timeout",
        "soft-watchdog-timeout",
        "dist-timeout",
        "tokenizer-worker-num",
        "speculative-algorithm",
        "attention-backend",
        "sleep-on-idle",
        "enable-expert-parallel",
        "all2all-backend",
        "kv-transfer",
        "kv-transfer-config",
        "gpu-memory-utilization",
        "mem-fraction-static",
        "async-scheduling",
        "moe-a2a-backend",
        "grammar-backend",
        "guided-decoding-backend",
        "enable-mixed-chunk",
        "cuda-graph-max-bs",
        "disable-radix-cache",
        "enable-metrics",
        "page-size",
        "dcp-size",
        "enable-dp-lm-head",
        "context-length",
        "kv-cache-dtype",
        "disable-attn-tp-gather",
    ]
)
_ENV = re.compile(
    r"\b((?:SGLANG|VLLM|NCCL|TORCH_NCCL|CUDA|GLOO|UCX|NVSHMEM|DEEPEP|SGL|TRTLLM|TLLM|LMCACHE|MOONCAKE)_[A-Z0-9_]{2,60})=([\w.:/,+-]{0,60})(?=\s|$|\"|')"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH")
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]{1,60})(?:[ =](?!-)([\w.:/,+-]{1,60}))?(?=\s|$|\"|'|\\)")
_ARG = re.compile(r"\b([a-z][a-z0-9_]{2,50})(?:=|': )('?[\w.:/+-]{1,60}'?|None|True|False)(?=[,)}])")


def flag_fact(name: str, value: str, src: Src) -> Setting | None:
    """A flag that is known and whose value is a plain word; else None."""
    name = name.replace("_", "-").lower()
    if name not in _FLAGS or not re.fullmatch(r"[\w.:/,+-]{0,60}", value) or value in ("None", "False", "null"):
        return None
    return Setting(src=src, kind="flag", name=name, value="" if value == "True" else value)


class Flags:
    """Command lines, `KEY=value` lines, `server_args=ServerArgs(...)` or `{...}`."""

    NAME = "launch-flags"
    ABOUT = "Launch flags, environment variables and server_args (known names only; keys and model names never)"
    TOKENS = ("--", "SGLANG_", "VLLM_", "NCCL_", "server_args=", "CUDA_", "GLOO_", "UCX_")
    open = False

    def line(self, line: Line) -> Iterable[Fact]:
        """Every known setting in the line."""
        text = line.text
        if "Stack trace" in text or text.startswith("---"):
            return
        for m in _FLAG.finditer(text):
            if fact := flag_fact(m[1], m[2] or "", line.src):
                yield fact
        if "server_args=" in text:
            for m in _ARG.finditer(text):
                if fact := flag_fact(m[1], m[2].strip("'"), line.src):
                    yield fact
        for m in _ENV.finditer(text):
            if not _SECRET.search(m[1].removeprefix("SGLANG_SYNC_TOKEN")):
                yield Setting(src=line.src, kind="env", name=m[1], value=m[2])

    def end(self) -> Iterable[Fact]:
        """Nothing waits."""
        return ()


LINE_READERS = (Flags,)
